"""What the parts of the forward pass share: where weights, buffers, pages and rotations lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..blueprint.blueprint import Blueprint, Rope
from ..pack.fetched import ExpertCache
from ..pack.program import Pages, Program, Rotation
from ..pack.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Site:
    """Where a program finds things: weights by our names, activation buffers by arena name, KV offsets and format (pk_format) per layer.

    state_offsets: of each recurrent layer: its state and its convolution's tail, in bytes from the start of a slot's. index_offsets: of a layer's
    index keys in a page. ngram_offsets: of the tail of its n-grams' convolution, in a slot's state. kept: of recurrent layers that take guesses back:
    where their state of before and their inputs since lie in a slot's, and the state's bytes. caches: of experts in host memory, by the prefix of
    their names. windows: pages of layers with a window, where those have
    their own, and which layers that are. gains: of layers whose keys and values need them, as in Heads.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    kv_offsets: tuple[tuple[int, int], ...]
    kv_formats: tuple[int, ...]
    rotations: Mapping[Rope, Rotation]
    state_offsets: tuple[tuple[int, int] | None, ...] = ()
    index_offsets: tuple[int, ...] = ()
    ngram_offsets: tuple[int, ...] = ()
    kept: tuple[tuple[int, int, int] | None, ...] = ()
    caches: Mapping[str, ExpertCache] = field(default_factory=dict)
    windows: Pages | None = None
    is_windowed: tuple[bool, ...] = ()
    gains: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def use_pool(self, program: Program, i: int, is_begun: bool) -> None:
        """Before layer i's keys are written, and (not is_begun) after they have been read: whose pages they are in."""
        if self.windows is not None and self.is_windowed[i]:
            program.pool(self.windows if is_begun else None)


def norm(program: Program, blueprint: Blueprint, site: Site, name: str, x: Tensor, out: Tensor) -> None:
    """out = x, normed as the model's norms are, with the weights of that name; out may be x."""
    weight = site.weights[name + ".weight"]
    if blueprint.norm == "layer":
        program.layer_norm(x, weight, site.weights.get(name + ".bias"), out, blueprint.norm_eps)
    else:
        program.norm(x, weight, out, blueprint.norm_eps)
