"""llama: Llama 1 to 3, Mistral, SmolLM and everything that shares their graph.

GGUF stores q and k with rows permuted for interleaved rope; Hugging Face folders store them for neox rope.
"""

from __future__ import annotations

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Attention, Blueprint, FeedForward, Layer
from ..mixture import from_gguf as mixture_from_gguf
from ..sizes import Sizes, gguf_sizes, hf_sizes


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "llama.*" keys. Raises: FileError, UnsupportedError."""
    if checkpoint.fields.integer(f"{arch}.expert_count", 0) > 0:
        return mixture_from_gguf(checkpoint, arch)
    s = gguf_sizes(checkpoint, arch)
    window = s.fields.integer(f"{arch}.attention.sliding_window", 0)
    has = checkpoint.tensors.__contains__
    return dense(
        s, "interleaved", window, has("blk.0.attn_q.bias"), has("blk.0.attn_output.bias"), has("blk.0.ffn_gate.bias")
    )


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type llama or mistral. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    s = hf_sizes(checkpoint, config)
    window = config.integer("sliding_window", 0)
    bias = config.flag("attention_bias", False)
    return dense(s, "neox", window, bias, bias, config.flag("mlp_bias", False))


def dense(s: Sizes, layout: str, window: int, qkv_bias: bool, out_bias: bool, ff_bias: bool) -> Blueprint:
    """A blueprint whose layers differ in nothing but their widths."""
    rope = s.rope(layout)
    layers = tuple(
        Layer(
            Attention(
                s.n_heads,
                n_kv,
                s.head_width,
                s.head_width**-0.5,
                rope,
                s.v_width,
                window,
                qkv_bias=qkv_bias,
                out_bias=out_bias,
            ),
            FeedForward(width, "silu", ff_bias),
        )
        for n_kv, width in zip(s.n_kv_heads, s.ff_widths, strict=True)
    )
    return Blueprint(
        "llama", s.n_vocab, s.model_width, s.max_ctx_tokens, layers, s.norm_eps, s.tied_head, name=s.name, notes=s.notes
    )
