"""Mixture of experts in the forward pass: router, choice, experts, and the weight of a shared expert."""

from __future__ import annotations

from dataclasses import replace

from ..blueprint.blueprint import Layer
from ..errors import UnsupportedError
from ..pack.program import Choice, Epilogue, Program, Stacks
from ..pack.tensor import Tensor
from .site import Site


def experts(program: Program, layer: Layer, at: str, site: Site, residual_scale: float) -> None:
    """The chosen experts' feed-forward of the normed residual, onto the residual or (with post norms) into the branch buffer."""
    x, w, buffers = layer.experts, site.weights, site.buffers
    if x is None:
        raise UnsupportedError(f"{at}experts is no layer with experts")
    logits, ids, weights = (buffers[n] for n in ("router", "expert_ids", "expert_weights"))
    logits = replace(logits, cols=x.n_experts)
    ids, weights = replace(ids, cols=x.n_used), replace(weights, cols=x.n_used)
    program.matmul(buffers["normed"], [w[at + "router.weight"]], logits, [w.get(at + "router.bias")], Epilogue(softcap=x.router_softcap))
    choice = Choice(x.score, x.is_normalised, x.scale, x.n_groups, x.n_groups_used, x.n_group_best)
    program.route(logits, w.get(at + "router_choice.bias"), ids, weights, choice)
    up, down = (w[f"{at}experts.{name}.weight"] for name in ("up", "down"))
    gate = w[at + "experts.gate.weight"] if x.is_gated else None
    biases = (w.get(at + "experts.gate.bias"), w.get(at + "experts.up.bias"), w.get(at + "experts.down.bias"))
    stacks = Stacks(gate, up, down, x.n_experts, biases, x.activation, x.limit, x.alpha)
    if layer.post_norms:
        program.experts(buffers["normed"], (ids, weights), stacks, buffers["branch"])
    else:
        residual = buffers["residual"]
        program.experts(buffers["normed"], (ids, weights), stacks, residual, Epilogue(add=residual, scale=residual_scale))


def weigh_shared(program: Program, hidden: Tensor, at: str, site: Site) -> None:
    """The shared expert's hidden values times the sigmoid of its own gate."""
    gate = replace(site.buffers["shared_gate"], cols=1)
    program.matmul(site.buffers["normed"], [site.weights[at + "shared_gate.weight"]], gate)
    program.sigmoid(hidden, gate, hidden)
