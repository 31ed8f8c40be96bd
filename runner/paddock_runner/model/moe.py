"""Mixture of experts in the forward pass: router, choice, experts, and the weight of a shared expert."""

from __future__ import annotations

from dataclasses import replace

from ..blueprint.blueprint import Experts, Layer
from ..errors import UnsupportedError
from ..pack.fetched import Ahead
from ..pack.program import Choice, Epilogue, Program, Stacks
from ..pack.tensor import Tensor
from .site import Site

AHEAD_BYTES = 5 << 20
"""What PCIe brings about while a GPU computes a layer of a few rows: so much is copied on a guess, and not more."""


def experts(program: Program, layer: Layer, at: str, site: Site, residual_scale: float, later: tuple[str, Experts] | None = None) -> None:
    """The chosen experts' feed-forward of the normed residual, onto the residual or (with post norms) into the branch buffer.

    later: the next layer with experts, where both lie in host memory.
    """
    x, buffers = layer.experts, site.buffers
    if x is None:
        raise UnsupportedError(f"{at}experts is no layer with experts")
    chosen, stacks = _chosen(program, x, at, site), _stacks(x, at, site)
    if later is not None:
        stacks = replace(stacks, ahead=_ahead(program, *later, site))
    if layer.joins_later:
        program.experts(buffers["normed"], chosen, stacks, buffers["branch"])
    else:
        residual = buffers["residual"]
        program.experts(buffers["normed"], chosen, stacks, residual, Epilogue(add=residual, scale=residual_scale))


def experts_beside(program: Program, x: Experts, at: str, site: Site, eps: float) -> None:
    """The branch buffer, which holds a feed-forward's output, becomes norm of it + norm of what the experts make of the residual (Gemma 4)."""
    w, buffers = site.weights, site.buffers
    residual, normed, branch, out = (buffers[n] for n in ("residual", "normed", "branch", "experts_out"))
    program.norm(branch, w[at + "dense_post_norm.weight"], branch, eps)
    program.norm(residual, w[at + "router_norm.weight"], normed, eps)
    chosen = _chosen(program, x, at, site)
    program.norm(residual, w[at + "experts_norm.weight"], normed, eps)
    program.experts(normed, chosen, _stacks(x, at, site), out)
    program.norm(out, None, None, eps, branch, w[at + "experts_post_norm.weight"])


def _ahead(program: Program, at: str, x: Experts, site: Site) -> Ahead:
    """What the next layer may choose: its router's answer to this layer's input, which a layer changes little."""
    cache = site.caches[at + "experts."]
    n_most = min(AHEAD_BYTES // cache.n_bytes, x.n_used)
    return Ahead(cache, _chosen(program, x, at, site, "expected")[0] if n_most else None, n_most)


def _chosen(program: Program, x: Experts, at: str, site: Site, where: str = "expert") -> tuple[Tensor, Tensor]:
    """Ids and weights of the experts that the router picks for what is in `normed`, in the buffers of that name."""
    w, buffers = site.weights, site.buffers
    logits, ids, weights = (buffers[n] for n in ("router", where + "_ids", where + "_weights"))
    logits = replace(logits, cols=x.n_experts)
    ids, weights = replace(ids, cols=x.n_used), replace(weights, cols=x.n_used)
    program.matmul(buffers["normed"], [w[at + "router.weight"]], logits, [w.get(at + "router.bias")], Epilogue(scale=x.router_scale, softcap=x.router_softcap))
    choice = Choice("chosen" if x.choice_by_logit else x.score, x.is_normalised, x.scale, x.n_groups, x.n_groups_used, x.n_group_best)
    program.route(logits, w.get(at + "router_choice.bias"), ids, weights, choice)
    if x.choice_by_logit or x.has_scales:
        program.weigh((ids, weights), logits if x.choice_by_logit else None, w.get(at + "expert_scales.weight"), x.is_normalised)
    return ids, weights


def _stacks(x: Experts, at: str, site: Site) -> Stacks:
    w = site.weights
    up, down = (w[f"{at}experts.{name}.weight"] for name in ("up", "down"))
    gate = w[at + "experts.gate.weight"] if x.is_gated else None
    biases = (w.get(at + "experts.gate.bias"), w.get(at + "experts.up.bias"), w.get(at + "experts.down.bias"))
    return Stacks(gate, up, down, x.n_experts, biases, x.activation, x.limit, x.alpha, site.caches.get(at + "experts."))


def weigh_shared(program: Program, hidden: Tensor, at: str, site: Site) -> None:
    """The shared expert's hidden values times the sigmoid of its own gate."""
    gate = replace(site.buffers["shared_gate"], cols=1)
    program.matmul(site.buffers["normed"], [site.weights[at + "shared_gate.weight"]], gate)
    program.sigmoid(hidden, gate, hidden)
