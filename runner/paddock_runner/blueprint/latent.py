"""Tensors of latent attention: their names and shapes, and the two matrices per head that lead into the latent's space and out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..files.view import Pick, TensorView
from .blueprint import Attention, Latent
from .quantised import FLOATS, rows_of

HF_LAYER = {
    "self_attn.q_a_proj": "q_a", "self_attn.q_a_layernorm": "q_a_norm", "self_attn.q_b_proj": "q_b", "self_attn.kv_a_proj_with_mqa": "kv_a",
    "self_attn.kv_a_layernorm": "kv_a_norm", "self_attn.kv_b_proj": "kv_b",
}  # fmt: skip

GGUF_LAYER = {
    "attn_q_a": "q_a", "attn_q_a_norm": "q_a_norm", "attn_q_b": "q_b", "attn_kv_a_mqa": "kv_a", "attn_kv_a_norm": "kv_a_norm",
    "attn_kv_b": "kv_b", "attn_k_b": "k_b", "attn_v_b": "v_b",
}  # fmt: skip
"""k_b and v_b: kv_b taken apart, one matrix per head: [rank, nope_width] and [v_width, rank]."""


def latent_shapes(a: Attention, x: Latent, model_width: int) -> dict[str, tuple[int, ...]]:
    """Our name within the layer -> shape."""
    q = (a.n_heads * x.q_width, x.q_rank or model_width)
    want: dict[str, tuple[int, ...]] = {"q_b.weight" if x.q_rank else "q.weight": q}
    if x.q_rank:
        want |= {"q_a.weight": (x.q_rank, model_width), "q_a_norm.weight": (x.q_rank,)}
    want |= {"kv_a.weight": (x.rank + x.rope_width, model_width), "kv_a_norm.weight": (x.rank,), "o.weight": (model_width, a.out_width)}
    for h in range(a.n_heads):
        want |= {f"latent_k.{h}.weight": (x.rank, x.nope_width), f"latent_v.{h}.weight": (x.v_width, x.rank)}
    return want


def split_latent(ours: Mapping[str, TensorView], i: int, a: Attention, x: Latent) -> dict[str, TensorView]:
    """The tensors, kv_b of layer i (head after head: rows that make keys, rows that make values) taken apart.

    Rows that make keys are transposed: they bring queries into the latent's space. A quantised one is stored as f16 for that.
    """
    out, at = dict(ours), f"layers.{i}."
    for name, part, n, cols in (("k_b", "latent_k", x.rank, x.nope_width), ("v_b", "latent_v", x.v_width, x.rank)):
        stack = out.get(f"{at}{name}.weight")
        if stack is not None and stack.shape == (a.n_heads, n, cols):
            del out[f"{at}{name}.weight"]
            flat = replace(stack, shape=(a.n_heads * n, cols))
            out.update({f"{at}{part}.{h}.weight": rows_of(flat, h * n, n) for h in range(a.n_heads)})
    view = out.get(at + "kv_b.weight")
    each = x.nope_width + x.v_width
    if view is None or view.shape != (a.n_heads * each, x.rank):
        return out
    del out[at + "kv_b.weight"]
    for h in range(a.n_heads):
        rows = rows_of(view, h * each, x.nope_width)
        if rows.format in FLOATS and rows.scales is None:
            out[f"{at}latent_k.{h}.weight"] = replace(rows, shape=(x.rank, x.nope_width), pick=Pick(is_transposed=True))
        else:
            out[f"{at}latent_k.{h}.weight"] = TensorView(
                rows.name, (x.rank, x.nope_width), "f16", rows.path, rows.offset, 2 * x.rank * x.nope_width, transposed_of=rows
            )
        out[f"{at}latent_v.{h}.weight"] = rows_of(view, h * each + x.nope_width, x.v_width)
    return out
