"""The layer that guesses the token after the next (MTP), in the forward pass: after the draw, from what the model made of every token and the token that follows."""

from __future__ import annotations

from collections.abc import Callable

from ..blueprint.blueprint import Blueprint, Layer
from ..pack import abi
from ..pack.program import Epilogue, Program
from .site import Site, norm

Attend = Callable[[Program, Blueprint, Layer, int, Site], None]
Feed = Callable[[Program, Blueprint, Layer, str, Site], None]


def draft_token(program: Program, blueprint: Blueprint, draft: Layer, site: Site, parts: tuple[Attend, Feed]) -> None:
    """A guess into the text of every slot that drew a token. parts: the decoder's attention and feed-forward."""
    w, buffers, m = site.weights, site.buffers, blueprint.model_width
    residual, normed, pair, at = buffers["residual"], buffers["normed"], buffers["draft_pair"], f"layers.{blueprint.n_layers}."
    norm(program, blueprint, site, "out_norm", residual, normed)
    norm(program, blueprint, site, "draft_hidden_norm", normed, pair.columns(m, m))
    program.shift()
    program.embed(w["embed.weight"], normed, blueprint.embed_scale)
    norm(program, blueprint, site, "draft_embed_norm", normed, pair.columns(0, m))
    program.matmul(pair, [w["draft_fc.weight"]], residual)
    norm(program, blueprint, site, at + "attn_norm", residual, normed)
    parts[0](program, blueprint, draft, blueprint.n_layers, site)
    last = max(i for i, record in enumerate(program.records) if record.op in (abi.PK_OP_ATTENTION, abi.PK_OP_SPARSE))
    norm(program, blueprint, site, at + "ffn_norm", residual, normed)
    parts[1](program, blueprint, draft, at, site)
    program.gather(residual, buffers["last"])
    norm(program, blueprint, site, "draft_norm", buffers["last"], buffers["last_normed"])
    head = w["embed.weight"] if blueprint.tied_head else w["head.weight"]
    program.matmul(buffers["last_normed"], [head], buffers["logits"], (), Epilogue(scale=blueprint.logit_scale, softcap=blueprint.logit_softcap))
    program.guess(buffers["logits"], 1 + last)
