"""The end of a forward pass that gives vectors: pooling, then dense layers, or the logits of a few tokens."""

from __future__ import annotations

from dataclasses import replace

from ..blueprint.blueprint import Blueprint
from ..errors import UnsupportedError
from ..pack.program import PLAIN, Epilogue, Program
from ..pack.tensor import Tensor
from .site import Site, norm

TANH = Epilogue(softcap=1.0)
"""tanh x is a soft cap of 1."""


def pooled_rows(program: Program, blueprint: Blueprint, site: Site) -> None:
    """From the residual [T, M] to the buffer "vectors" [S, n] f32. Norms all tokens first: the mean of normed rows is not the normed mean."""
    p, buffers = blueprint.pooling, site.buffers
    if p is None:
        raise UnsupportedError(f"{blueprint.family} has no pooling")
    has_more = bool(p.layers) or p.answers is not None
    row = buffers["pooled"] if has_more else buffers["vectors"]
    hidden = buffers["residual"]
    if blueprint.has_out_norm and p.pool == "mean":
        norm(program, blueprint, site, "out_norm", hidden, buffers["normed"])
        hidden = buffers["normed"]
    if blueprint.has_out_norm and p.pool != "mean":
        program.gather(hidden, buffers["last"], p.pool)
        norm(program, blueprint, site, "out_norm", buffers["last"], row)
    else:
        program.gather(hidden, row, p.pool)
    for i, layer in enumerate(p.layers):
        is_end = i + 1 == len(p.layers)
        out = buffers["vectors"] if is_end else replace(buffers[f"dense_{i % 2}"], cols=layer.rows)
        _dense(program, site, row, f"dense.{i}", out, layer.activation)
        row = out
    if p.answers is not None:
        program.matmul(row, [site.weights[f"answers.{i}.weight"] for i in range(len(p.answers))], buffers["vectors"])
    program.commit()


def _dense(program: Program, site: Site, x: Tensor, name: str, out: Tensor, activation: str) -> None:
    after = TANH if activation == "tanh" else PLAIN
    program.matmul(x, [site.weights[name + ".weight"]], out, [site.weights.get(name + ".bias")], after)
    if activation not in ("none", "tanh"):
        program.gate(out, out, activation)
