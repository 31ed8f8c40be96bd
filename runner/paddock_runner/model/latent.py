"""Latent attention in the forward pass, absorbed: queries go into the latent's space, and what attention gives comes out of it, head by head.

Source: DeepSeek-V2, 2024, section 2.1 and appendix C.
"""

from __future__ import annotations

from dataclasses import replace

from ..blueprint.blueprint import Attention
from ..errors import UnsupportedError
from ..pack import abi
from ..pack.program import Heads, Program, View
from ..pack.tensor import Tensor
from .site import Site

NORM_EPS = 1e-6
"""Of the norms within latent attention. Source: transformers, DeepseekV3RMSNorm's default."""


def latent_attention(program: Program, a: Attention, i: int, site: Site) -> Tensor:
    """The layer's output before its last projection, [T, H*Dv]."""
    w, at, buffers, x = site.weights, f"layers.{i}.", site.buffers, a.latent
    if x is None or a.rope is None:
        raise UnsupportedError(f"layer {i} has no latent")
    qkv = replace(buffers["qkv"], cols=a.qkv_width)
    _queries(program, a, at, site, qkv)
    kv = replace(buffers["latent_kv"], cols=x.rank + x.rope_width)
    program.matmul(buffers["normed"], [w[at + "kv_a.weight"]], kv)
    key = a.n_heads * a.head_width
    program.norm(kv.columns(0, x.rank), w[at + "kv_a_norm.weight"], qkv.columns(key + x.rope_width, x.rank), NORM_EPS)
    program.copy(kv.columns(x.rank, x.rope_width), qkv.columns(key, x.rope_width))
    heads = Heads(a.n_heads, 1, a.head_width, x.rank, *site.kv_offsets[i], site.kv_formats[i], abi.PK_PARTS_LATENT, site.gains.get(i))
    q = qkv.columns(0, key)
    site.use_pool(program, i, True)
    program.qkv(qkv, q, heads, (None, None), site.rotations[a.rope], NORM_EPS)
    latent, out = replace(buffers["latent_out"], cols=a.n_heads * x.rank), replace(buffers["attention_out"], cols=a.out_width)
    program.attention(q, latent, heads, a.scale, View(a.window), a.softcap)
    site.use_pool(program, i, False)
    for h in range(a.n_heads):
        program.matmul(latent.columns(h * x.rank, x.rank), [w[f"{at}latent_v.{h}.weight"]], out.columns(h * x.v_width, x.v_width))
    return out


def _queries(program: Program, a: Attention, at: str, site: Site, qkv: Tensor) -> None:
    """Queries [rotated part, part in the latent's space] of every head, into qkv."""
    w, buffers, x = site.weights, site.buffers, a.latent
    if x is None:
        return
    read, name = buffers["normed"], "q"
    if x.q_rank:
        read, name = replace(buffers["latent_query"], cols=x.q_rank), "q_b"
        program.matmul(buffers["normed"], [w[at + "q_a.weight"]], read)
        program.norm(read, w[at + "q_a_norm.weight"], read, NORM_EPS)
    q = replace(buffers["latent_q"], cols=a.n_heads * x.q_width)
    program.matmul(read, [w[f"{at}{name}.weight"]], q)
    for h in range(a.n_heads):
        from_at, to = h * x.q_width, h * a.head_width
        program.copy(q.columns(from_at + x.nope_width, x.rope_width), qkv.columns(to, x.rope_width))
        program.matmul(q.columns(from_at, x.nope_width), [w[f"{at}latent_k.{h}.weight"]], qkv.columns(to + x.rope_width, x.rank))
