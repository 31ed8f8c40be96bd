"""Pages of layers with a window: a pool of their own, because such a layer never sees again what lies behind its window.

A page is in use by requests (counted), known to the prefix tree (one node has it), or both; it is free when neither. What only the tree has is
forgotten when pages run short: first what lay in the middle of prompts, then the windows at the ends of what was computed, from which somebody
is likely to go on; each in the order in which it was let go. A prefix can be gone on with wherever the pages that are seen from there are still known.

A page that is given back may be written by the next step already: steps run in order, and no row of the next one sees behind its window.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .pages import PageFault, PagePool
from .tiers import Tiers

if TYPE_CHECKING:
    from .prefix import Node


def deepest(n: int, n_back: int, is_there: Callable[[int], object]) -> int:
    """The largest number of pages up to n whose last n_back (or all of them) are there."""
    while n > 0:
        gap = next((i for i in range(n - 1, max(0, n - n_back) - 1, -1) if not is_there(i)), -1)
        if gap < 0:
            return n
        n = gap
    return 0


class WindowPool:
    """n_back: pages before a page's first token that are seen from there. n_pages counts the scratch page."""

    __slots__ = ("_ends", "_middles", "_owner", "_pool", "_uses", "n_back", "n_evicted", "n_pages", "page_tokens", "tiers", "window")

    def __init__(self, n_pages: int, window: int, page_tokens: int, n_back: int) -> None:
        self.n_pages, self.window, self.page_tokens, self.n_back = n_pages, window, page_tokens, n_back
        self._pool = PagePool(n_pages)
        self._uses = [0] * n_pages
        self._owner: dict[int, Node] = {}
        self._middles: OrderedDict[int, None] = OrderedDict()
        self._ends: OrderedDict[int, None] = OrderedDict()
        self.n_evicted = 0
        self.tiers: Tiers | None = None
        """Where pages go from which somebody is likely to go on, when they are forgotten here: under the keys of the tree's pages."""

    @property
    def n_free(self) -> int:
        """Pages that nobody has."""
        return self._pool.n_free

    @property
    def n_kept(self) -> int:
        """Pages that only the tree has."""
        return len(self._middles) + len(self._ends)

    def behind(self, n_tokens: int) -> int:
        """Pages at the start of a sequence that a token at n_tokens or later never sees."""
        return max(0, (n_tokens - self.window + 1) // self.page_tokens)

    # ---- requests ----

    def take(self, n: int) -> list[int]:
        """n pages for a request. Raises: PageFault when there are too few, which the plan's sizes rule out."""
        while self._pool.n_free < n and self.n_kept:
            self._forget(next(iter(self._middles or self._ends)))
        pages = self._pool.take(n)
        for page in pages:
            self._uses[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """A request uses pages that the tree has."""
        for page in pages:
            if not self._uses[page]:
                self._middles.pop(page, None)
                self._ends.pop(page, None)
            self._uses[page] += 1

    def let_go(self, pages: Iterable[int], is_end: bool) -> None:
        """A request no longer uses them. is_end: somebody may well go on from there."""
        for page in pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                if page in self._owner:
                    (self._ends if is_end else self._middles)[page] = None
                else:
                    self._pool.give([page])

    # ---- the tree ----

    def adopt(self, node: Node, first: int, pages: Sequence[int]) -> None:
        """Pages of a request, as node.windows[first:] from now on, where the node does not know any already."""
        known = node.windows
        for i, page in enumerate(pages, first):
            if page and not known[i]:
                if page in self._owner:
                    raise PageFault(f"window page {page} is known twice", pages=[page])
                known[i] = page
                self._owner[page] = node

    def move(self, pages: Iterable[int], node: Node) -> None:
        """Another node has them now."""
        for page in pages:
            if page:
                self._owner[page] = node

    def disown(self, pages: Iterable[int]) -> None:
        """The tree forgets them."""
        for page in pages:
            if page:
                del self._owner[page]
                if not self._uses[page]:
                    self._middles.pop(page, None)
                    self._ends.pop(page, None)
                    self._pool.give([page])

    def spill(self, node: Node, first: int) -> None:
        """The node's pages from `first` on are about to be forgotten."""
        if self.tiers is not None and node.keys:
            for key, page in zip(node.keys[first:], node.windows[first:], strict=True):
                if page in self._ends:
                    self.tiers.spill([key], [page])

    def ends(self) -> Iterator[tuple[bytes, int]]:
        """Keys and pages from which somebody is likely to go on, the newest first."""
        for page in reversed(list(self._ends)):
            node = self._owner[page]
            if node.keys:
                yield node.keys[node.windows.index(page)], page

    def _forget(self, page: int) -> None:
        node = self._owner[page]
        at = node.windows.index(page)
        if self.tiers is not None and node.keys and page in self._ends:
            self.tiers.spill([node.keys[at]], [page])
        node.windows[at] = 0
        self.disown([page])
        self.n_evicted += 1

    # ---- checking ----

    def check(self, nodes: Iterator[Node], held: Iterable[Iterable[int]]) -> None:
        """Every page is counted as often as it is used, and known where its node says. Raises: PageFault."""
        uses = [0] * self.n_pages
        for pages in held:
            for page in pages:
                uses[page] += page > 0
        owners = {page: node for node in nodes for page in node.windows if page}
        if uses != self._uses or owners != self._owner:
            raise PageFault("window pages are counted wrongly", pages=[i for i, n in enumerate(uses) if n != self._uses[i]])
        kept = {page for page in owners if not uses[page]}
        if kept != {*self._middles, *self._ends} or len(kept) != self.n_kept:
            raise PageFault("window pages that only the tree has are not all in line", pages=sorted(kept))
        self._pool.check([[page for page in range(1, self.n_pages) if uses[page] or page in owners]])
