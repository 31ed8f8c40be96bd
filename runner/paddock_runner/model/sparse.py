"""Attention to the tokens that an index chooses, in the forward pass (Qwen 4)."""

from __future__ import annotations

from dataclasses import replace

from ..blueprint.blueprint import Attention, Blueprint, Index
from ..errors import UnsupportedError
from ..pack import abi
from ..pack.program import Heads, Program
from ..pack.tensor import Tensor
from .site import Site


def sparse_attention(
    program: Program, blueprint: Blueprint, a: Attention, x: Index, heads: Heads, operands: tuple[Tensor, Tensor], i: int, site: Site
) -> None:
    """operands: q and out. The index's keys are kept as they are projected: a block's key is a norm of their mean."""
    w, at = site.weights, f"layers.{i}."
    if a.rope is None:
        raise UnsupportedError(f"layer {i} has an index and no rope")
    both = replace(site.buffers["index"], cols=(x.n_heads + 1) * x.width)
    program.matmul(site.buffers["normed"], [w[at + "index_qk.weight"]], both)
    q = both.columns(0, x.n_heads * x.width)
    offset = site.index_offsets[i]
    keys = Heads(x.n_heads, 1, x.width, x.width, offset, offset, site.kv_formats[i], abi.PK_PARTS_LATENT)
    program.qkv(both, q, keys, (None, None), None, blueprint.norm_eps)
    rope = site.rotations[a.rope]
    program.qkv(q, q, replace(keys, parts=abi.PK_PARTS_Q), (w[at + "index_q_norm.weight"], None), rope, blueprint.norm_eps)
    index = (x.n_heads, x.width, x.block_tokens, x.n_blocks, offset)
    program.sparse(operands, heads, a.scale, (q, w[at + "index_k_norm.weight"]), index, rope, blueprint.norm_eps)
