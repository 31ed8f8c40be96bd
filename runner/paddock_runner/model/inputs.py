"""What every layer is told of the token once more (Gemma 4): a lookup and a projection of the embedding, then a small gated branch a layer.

Source: https://github.com/huggingface/transformers, models/gemma4/modeling_gemma4.py, Gemma4TextModel and Gemma4TextDecoderLayer.
"""

from __future__ import annotations

from dataclasses import replace

from ..blueprint.blueprint import Blueprint
from ..pack.program import Epilogue, Program
from .site import Site


def layer_inputs(program: Program, blueprint: Blueprint, site: Site) -> None:
    """(the token's row + norm of the projected embedding) / sqrt(2), for all layers side by side: [T, L*I]. The embedding is in `residual`."""
    w, buffers, width = site.weights, site.buffers, blueprint.input_width
    told, projected = buffers["layer_inputs"], buffers["input_projected"]
    program.embed(w["layer_inputs.weight"], told, (width / 2) ** 0.5)
    program.copy(buffers["residual"], buffers["normed"])
    program.matmul(buffers["normed"], [w["input_projection.weight"]], projected, (), Epilogue(scale=blueprint.model_width**-0.5))
    for i in range(blueprint.n_layers):
        part, to = projected.columns(i * width, width), told.columns(i * width, width)
        program.norm(part, None, None, blueprint.norm_eps, to, w["input_norm.weight"], 0.5**0.5)


def input_branch(program: Program, blueprint: Blueprint, i: int, site: Site) -> None:
    """branch = projection of activation(gate of `normed`, which is the residual as it is) * the layer's input."""
    w, at, width = site.weights, f"layers.{i}.", blueprint.input_width
    pair, hidden = site.buffers["input_pair"], replace(site.buffers["input_hidden"], cols=width)
    program.matmul(site.buffers["normed"], [w[at + "input_gate.weight"]], pair.columns(0, width))
    program.copy(site.buffers["layer_inputs"].columns(i * width, width), pair.columns(width, width))
    program.gate(pair, hidden, blueprint.layers[i].feed_forward.activation)
    program.matmul(hidden, [w[at + "input_out.weight"]], site.buffers["branch"])
