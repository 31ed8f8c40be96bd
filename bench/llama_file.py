"""A GGUF of an 8B's shape (Qwen 3) with random weights, for llama.cpp beside bench.gpu_models: the same shapes and formats, written at the speed of memory.

Usage: python -m bench.llama_file bf16|q8_0|q4_k_m FILE [--model 8b] [--layers N]. Blocks of random values repeat through a tensor. Tokens mean nothing: 256 bytes, then names.
"""

from __future__ import annotations

import argparse
import math
import os
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from paddock_runner.formats.table import by_name

from .gpu_models import SHAPES, format_of
from .gpu_weights import Weight

ALIGN = 32
BLOCK_ROWS = 1024
U32, F32, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5
GGML = {"f32": 0, "q8_0": 8, "q4_k": 12, "q6_k": 14, "bf16": 30}
FILE_TYPES = {"q8_0": 7, "q4_k_m": 15, "bf16": 32}
PER_LAYER = {  # ours, theirs
    "norm": "attn_norm", "q.weight": "attn_q", "k.weight": "attn_k", "v.weight": "attn_v", "o.weight": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm", "gate.weight": "ffn_gate", "up.weight": "ffn_up", "down.weight": "ffn_down",
}  # fmt: skip


def text(value: str) -> bytes:
    """A string as GGUF has it."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def metadata(shape: tuple[int, ...], n_layers: int, kind: str) -> list[bytes]:
    """Keys and values."""
    m, f, _, h, k, d, v = shape
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in visible] + [chr(256 + i) for i in range(256 - len(visible))]
    tokens = [*letters, *(f"t{i}" for i in range(256, v))]
    numbers = {
        "general.file_type": FILE_TYPES[kind], "general.quantization_version": 2, "qwen3.block_count": n_layers, "qwen3.context_length": 40960, "qwen3.embedding_length": m,
        "qwen3.feed_forward_length": f, "qwen3.attention.head_count": h, "qwen3.attention.head_count_kv": k, "qwen3.attention.key_length": d, "qwen3.attention.value_length": d,
        "qwen3.vocab_size": v, "tokenizer.ggml.bos_token_id": v - 1, "tokenizer.ggml.eos_token_id": v - 1,
    }  # fmt: skip
    words = {"general.architecture": "qwen3", "general.name": "random", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
    return [
        *(text(key) + struct.pack("<I", STRING) + text(word) for key, word in words.items()),
        *(text(key) + struct.pack("<II", U32, n) for key, n in numbers.items()),
        *(text(f"qwen3.{key}") + struct.pack("<If", F32, x) for key, x in (("rope.freq_base", 1e6), ("attention.layer_norm_rms_epsilon", 1e-6))),
        text("tokenizer.ggml.add_bos_token") + struct.pack("<I?", BOOL, False),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, v) + b"".join(map(text, tokens)),
        text("tokenizer.ggml.token_type") + struct.pack("<IIQ", ARRAY, I32, v) + struct.pack(f"<{v}i", *[1] * 256, *[4] * (v - 257), 3),
        text("tokenizer.ggml.merges") + struct.pack("<IIQ", ARRAY, STRING, 1) + text("a b"),
    ]


def tensors(shape: tuple[int, ...], n_layers: int, kind: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, format, shape) of every tensor."""
    m, f, _, h, k, d, v = shape
    sizes = [(m,), (h * d, m), (k * d, m), (k * d, m), (m, h * d), (d,), (d,), (m,), (f, m), (f, m), (m, f)]
    yield "token_embd.weight", format_of("embed.weight", kind, (v, m), -1, n_layers), (v, m)
    for layer in range(n_layers):
        for (ours, theirs), size in zip(PER_LAYER.items(), sizes, strict=True):
            yield f"blk.{layer}.{theirs}.weight", format_of(ours, kind, size, layer, n_layers), size
    yield "output_norm.weight", "f32", (m,)
    yield "output.weight", format_of("head.weight", kind, (v, m), -1, n_layers), (v, m)


def write(kind: str, path: Path, shape: tuple[int, ...], n_layers: int) -> int:
    """Writes the file; its bytes."""
    planned, infos, at = [], [], 0
    for name, form, size in tensors(shape, n_layers, kind):
        n_bytes = by_name(form).row_bytes(size[-1]) * math.prod(size[:-1])
        infos.append(text(name) + struct.pack("<I", len(size)) + struct.pack(f"<{len(size)}Q", *reversed(size)) + struct.pack("<IQ", GGML[form], at))
        planned.append((form, size, at, n_bytes))
        at += -(-n_bytes // ALIGN) * ALIGN
    pairs = metadata(shape, n_layers, kind)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    head += bytes(-len(head) % ALIGN)
    rng, blocks, jobs = np.random.default_rng(1), dict[tuple[str, int, int], memoryview](), []
    for form, size, start, n_bytes in planned:
        key = (form, min(BLOCK_ROWS, math.prod(size[:-1])), size[-1])
        if key not in blocks:
            one = np.ones(size[-1], np.float32).view(np.uint8) if len(size) == 1 else Weight(form, key[1], key[2]).fill(rng).data
            blocks[key] = memoryview(one.tobytes())
        jobs += [(blocks[key][: n_bytes - done], len(head) + start + done) for done in range(0, n_bytes, len(blocks[key]))]
    part = path.with_name(path.name + ".part")
    with part.open("wb", buffering=0) as file, ThreadPoolExecutor(8) as pool:
        file.truncate(len(head) + at)
        os.pwrite(file.fileno(), head, 0)
        wrote = sum(pool.map(lambda job: os.pwrite(file.fileno(), *job), jobs))
    if wrote != sum(n_bytes for *_, n_bytes in planned):
        raise SystemExit(f"{path}: {wrote} bytes written")
    part.rename(path)
    return len(head) + at


def main() -> None:
    """Writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(FILE_TYPES))
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int)
    a = parser.parse_args()
    n_bytes = write(a.kind, a.file, SHAPES[a.model], a.layers or SHAPES[a.model][2])
    sys.stdout.write(f"{a.file}: {n_bytes / 1e9:.2f} GB\n")


if __name__ == "__main__":
    main()
