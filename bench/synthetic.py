"""Checkpoints of real shapes with random weights, written at the speed of memory: folders that a runner serves (safetensors, a made-up tokenizer).

Usage: python -m bench.synthetic 8b fp8 FOLDER [--layers N] [--counts]
Shapes are those of bench/gpu_models (Qwen 3). Blocks of random values repeat through the file; FORMAT is bf16 or fp8 (e4m3, scales per 128 x 128).
With --counts the model counts: layers add next to nothing, and the row of the head for token t + 1 is the embedding of t, so the answer to t is t + 1, t + 2, ...
Tokens mean nothing: 256 bytes, then names. Prompts are given as ids (bench.load --api ids).
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

SHAPES = {  # width, feed-forward, layers, heads, kv heads, head width, vocabulary
    "tiny": (256, 512, 2, 4, 2, 64, 2048),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "8b": (4096, 12288, 36, 32, 8, 128, 151936),
    "32b": (5120, 25600, 64, 64, 8, 128, 151936),
}
BLOCK_BYTES = 32 << 20
CTX_TOKENS = 131072


def config(shape: tuple[int, ...], n_layers: int, kind: str) -> dict[str, object]:
    """config.json."""
    m, f, _, h, k, d, v = shape
    found: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": m, "intermediate_size": f, "num_hidden_layers": n_layers,
        "num_attention_heads": h, "num_key_value_heads": k, "head_dim": d, "vocab_size": v, "max_position_embeddings": CTX_TOKENS, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 0, "bos_token_id": 0,
        "attention_bias": False, "use_sliding_window": False,
    }  # fmt: skip
    if kind == "fp8":
        found["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return found


def tokenizer(n_vocab: int) -> dict[str, object]:
    """tokenizer.json: one token a byte, then names, no merges."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in visible}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    vocab = {letters[b]: b for b in range(256)} | {f"t{i}": i for i in range(256, n_vocab)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []},
    }  # fmt: skip


def tensors(shape: tuple[int, ...], n_layers: int, kind: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, format and shape of every tensor."""
    m, f, _, h, k, d, v = shape
    linear = {"self_attn.q_proj": (h * d, m), "self_attn.k_proj": (k * d, m), "self_attn.v_proj": (k * d, m), "self_attn.o_proj": (m, h * d)}
    linear |= {"mlp.gate_proj": (f, m), "mlp.up_proj": (f, m), "mlp.down_proj": (m, f)}
    norms = {"input_layernorm": m, "post_attention_layernorm": m, "self_attn.q_norm": d, "self_attn.k_norm": d}
    found: list[tuple[str, str, tuple[int, ...]]] = [("model.embed_tokens.weight", "BF16", (v, m)), ("lm_head.weight", "BF16", (v, m)), ("model.norm.weight", "ONES", (m,))]
    for layer in range(n_layers):
        prefix = f"model.layers.{layer}."
        for name, size in linear.items():
            found.append((f"{prefix}{name}.weight", "F8_E4M3" if kind == "fp8" else "BF16", size))
            if kind == "fp8":
                found.append((f"{prefix}{name}.weight_scale_inv", "F32", (-(-size[0] // 128), -(-size[1] // 128))))
        found += [(f"{prefix}{name}.weight", "ONES", (n,)) for name, n in norms.items()]
    return found


def blocks() -> dict[str, bytes]:
    """Random values of each format; norms are ones, scales are one value."""
    rng = np.random.default_rng(1)
    normal = (rng.standard_normal(BLOCK_BYTES // 2) * 0.02).astype(np.float32)
    eights = rng.integers(0, 0x70, BLOCK_BYTES, np.uint8) | (rng.integers(0, 2, BLOCK_BYTES, np.uint8) << 7)
    return {
        "BF16": (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        "F8_E4M3": eights.tobytes(),
        "F32": np.full(1 << 16, 2e-4, np.float32).tobytes(),
        "FAINT": (normal.view(np.uint32) - (20 << 23) >> 16).astype(np.uint16).tobytes(),
        "FAINT F32": np.full(1 << 16, 2e-10, np.float32).tobytes(),
        "ONES": np.full(1 << 16, 0x3F80, np.uint16).tobytes(),
    }


def row_places(n_rows: int, is_head: bool) -> list[int]:
    """Where in the block the row of each token begins, no two alike; the head's are those of the tokens before."""
    step = BLOCK_BYTES // 2 // n_rows * 2
    found = [step * t for t in range(n_rows)]
    return [found[-1], *found[:-1]] if is_head else found


def write(name: str, kind: str, folder: Path, n_layers: int = 0, words: Path | None = None, counts: bool = False) -> int:
    """Writes the folder; bytes of its weights. words: a tokenizer.json(.xz) to take instead of a made-up one. counts: a model that counts."""
    shape = SHAPES[name]
    n_layers = n_layers or shape[2]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape, n_layers, kind)))
    made = json.dumps(tokenizer(shape[6])).encode() if words is None else words.read_bytes()
    (folder / "tokenizer.json").write_bytes(lzma.decompress(made) if words is not None and words.suffix == ".xz" else made)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}))
    header: dict[str, object] = {}
    at, jobs = 0, list[tuple[int, int, str]]()
    width = {"BF16": 2, "ONES": 2, "F32": 4, "F8_E4M3": 1}
    for tensor, kind_of, size in tensors(shape, n_layers, kind):
        n_bytes = int(np.prod(size)) * width[kind_of]
        header[tensor] = {"dtype": "BF16" if kind_of == "ONES" else kind_of, "shape": list(size), "data_offsets": [at, at + n_bytes]}
        if counts and tensor.startswith(("model.embed", "lm_head")):
            jobs.append((at, n_bytes, "HEAD" if tensor.startswith("lm") else "EMBED"))
        elif counts and (".o_proj." in tensor or ".down_proj." in tensor) and kind_of != "F8_E4M3":
            jobs.append((at, n_bytes, "FAINT" if kind_of == "BF16" else "FAINT F32"))
        else:
            jobs.append((at, n_bytes, kind_of))
        at += n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pools = blocks()
    file = os.open(folder / "model.safetensors", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.pwrite(file, len(text).to_bytes(8, "little") + text, 0)
        base = 8 + len(text)
        os.truncate(file, base + at)

        def fill(job: tuple[int, int, str]) -> None:
            first, n_bytes, kind_of = job
            if kind_of in ("HEAD", "EMBED"):
                size, block = n_bytes // shape[6], memoryview(pools["BF16"] + pools["BF16"])
                for i, place in enumerate(row_places(shape[6], kind_of == "HEAD")):
                    os.pwrite(file, block[place : place + size], base + first + i * size)
                return
            pool = memoryview(pools[kind_of])
            for done in range(0, n_bytes, len(pool)):
                os.pwrite(file, pool[: n_bytes - done], base + first + done)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(fill, jobs))
    finally:
        os.close(file)
    return at


def main() -> None:
    """Writes one folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(SHAPES))
    parser.add_argument("format", choices=["bf16", "fp8"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--counts", action="store_true")
    options = parser.parse_args()
    begun = time.perf_counter()
    n_bytes = write(options.model, options.format, options.folder, options.layers, options.tokenizer, options.counts)
    sys.stdout.write(f"{options.folder}: {n_bytes / 1e9:.2f} GB in {time.perf_counter() - begun:.1f} s\n")


if __name__ == "__main__":
    main()
