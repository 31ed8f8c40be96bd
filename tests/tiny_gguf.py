"""A whole llama, or mixture, in a GGUF of a few hundred kilobytes: random weights, the byte-level tokenizer of the text tests, a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.text.small import byte_level_metadata

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH, HEADS, KV_HEADS, HEAD, FF, LAYERS, CTX = 64, 4, 2, 16, 128, 2, 512


def write(path: Path, template: str | None = CHATML, arch: str = "llama", n_experts: int = 0, n_layers: int = LAYERS) -> Path:
    """Writes the model, whose layers have so many experts of which a token takes two, or none; returns its path."""
    import gguf

    metadata: dict[str, Any] = byte_level_metadata()
    n_vocab = len(metadata["tokenizer.ggml.tokens"])
    out = gguf.GGUFWriter(path, arch)
    out.add_name("tiny")
    for key, value in (("context_length", CTX), ("embedding_length", WIDTH), ("block_count", n_layers), ("feed_forward_length", FF), ("attention.head_count", HEADS), ("attention.head_count_kv", KV_HEADS)):
        out.add_uint32(f"{arch}.{key}", value)
    if n_experts:
        out.add_uint32(f"{arch}.expert_count", n_experts)
        out.add_uint32(f"{arch}.expert_used_count", 2)
    out.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    out.add_float32(f"{arch}.rope.freq_base", 10000.0)
    out.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    out.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    out.add_token_list(metadata["tokenizer.ggml.tokens"])
    out.add_token_types(metadata["tokenizer.ggml.token_type"])
    out.add_token_merges(metadata["tokenizer.ggml.merges"])
    out.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    if template is not None:
        out.add_chat_template(template)
    random = np.random.default_rng(3)

    def matrix(name: str, rows: int, cols: int, *stack: int) -> None:
        out.add_tensor(name, (random.standard_normal((*stack, rows, cols)) / np.sqrt(cols)).astype(np.float16))

    matrix("token_embd.weight", n_vocab, WIDTH)
    matrix("output.weight", n_vocab, WIDTH)
    out.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for i in range(n_layers):
        at = f"blk.{i}."
        matrix(at + "attn_q.weight", HEADS * HEAD, WIDTH)
        matrix(at + "attn_k.weight", KV_HEADS * HEAD, WIDTH)
        matrix(at + "attn_v.weight", KV_HEADS * HEAD, WIDTH)
        matrix(at + "attn_output.weight", WIDTH, HEADS * HEAD)
        if n_experts:
            matrix(at + "ffn_gate_inp.weight", n_experts, WIDTH)
        of, stack = ("_exps", (n_experts,)) if n_experts else ("", ())
        matrix(f"{at}ffn_gate{of}.weight", FF, WIDTH, *stack)
        matrix(f"{at}ffn_up{of}.weight", FF, WIDTH, *stack)
        matrix(f"{at}ffn_down{of}.weight", WIDTH, FF, *stack)
        for norm in ("attn_norm", "ffn_norm"):
            out.add_tensor(at + norm + ".weight", np.ones(WIDTH, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
