"""Snapshots of recurrent states: a fixed number of places in device memory, held by nodes of the prefix tree or by running requests.

Pages alone cannot continue a sequence of a model with recurrent layers: what such a layer remembers after n tokens is one block of bytes
that every later token changes. A snapshot is a copy of it, taken after n tokens; it hangs on the tree's node that ends there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .pages import PageFault
from .tiers import Tiers, state_key

if TYPE_CHECKING:
    from .prefix import Node


class StatePool:
    """Places [0, n). Those that hang on nodes are forgotten least recently used first."""

    __slots__ = ("_free", "_nodes", "n_evicted", "n_places", "tiers")

    def __init__(self, n_places: int) -> None:
        self.n_places = n_places
        self._free = list(range(n_places - 1, -1, -1))
        self._nodes: dict[int, Node] = {}
        """Who has which place, least recently used first."""
        self.n_evicted = 0
        self.tiers: Tiers | None = None
        """Where states go that are forgotten here."""

    @property
    def n_free(self) -> int:
        """Places that nobody has."""
        return len(self._free)

    @property
    def n_kept(self) -> int:
        """Places that hang on nodes."""
        return len(self._nodes)

    def take(self) -> int:
        """A place: a free one, or that of the node that was used longest ago; -1 when running requests have them all."""
        if self._free:
            return self._free.pop()
        if not self._nodes:
            return -1
        place = next(iter(self._nodes))
        self.spill(self._nodes[place])
        self._nodes.pop(place).state = -1
        self.n_evicted += 1
        return place

    def give(self, place: int) -> None:
        """A place that no node has is free again."""
        self._free.append(place)

    def attach(self, node: Node, place: int) -> None:
        """The node owns the place from now on; one that has a state already keeps its own."""
        if node.state >= 0 or node.is_dead or node.parent is None:
            self._free.append(place)
            return
        node.state = place
        self._nodes[place] = node

    def spill(self, node: Node) -> None:
        """The node's state is about to be forgotten."""
        if self.tiers is not None and node.state >= 0 and node.keys:
            self.tiers.spill([state_key(node.keys[-1])], [node.state])

    def nodes(self) -> list[Node]:
        """Nodes with a state, least recently used first."""
        return list(self._nodes.values())

    def touch(self, node: Node) -> None:
        """The node's state was used."""
        self._nodes[node.state] = self._nodes.pop(node.state)

    def drop(self, node: Node) -> None:
        """The node no longer ends where its state was taken, or is not to be trusted."""
        if node.state >= 0:
            del self._nodes[node.state]
            self._free.append(node.state)
            node.state = -1

    def check(self, held: Iterable[int]) -> None:
        """Every place is free, on one node, or held by one request. Raises: PageFault."""
        places = [*self._free, *self._nodes, *held]
        if sorted(places) != list(range(self.n_places)):
            raise PageFault(f"state places {sorted(places)} are not 0 to {self.n_places - 1} once each", pages=places)
        for place, node in self._nodes.items():
            if node.state != place or node.is_dead:
                raise PageFault(f"state place {place} hangs on a node that does not know it", pages=[place])
