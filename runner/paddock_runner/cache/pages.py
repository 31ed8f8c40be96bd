"""The page pool: which KV pages are free. Who holds the others is known to their holders (prefix tree, requests)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import PaddockError

SCRATCH_PAGE = 0
"""Dead rows and padding write here; it is never handed out."""


class PageFault(PaddockError):
    """A page was given back twice, lost, or is held by two (facts: pages)."""

    code = "page_fault"


class PagePool:
    """A stack of free pages out of [1, n_pages). Each page out of the pool has exactly one owner, who gives it back once.

    n_pages counts the scratch page, as pk_state does. n_attached: pages that have memory already; the rest join by `grow`.
    """

    __slots__ = ("_free", "_is_out", "is_short", "n_attached", "n_pages")

    def __init__(self, n_pages: int, n_attached: int | None = None) -> None:
        self.n_pages = n_pages
        self._is_out = bytearray(n_pages)
        self._free: list[int] = []
        self.is_short = False
        """The device has no memory for more pages, as far as is known: others have it."""
        self.n_attached = 1
        self.grow(n_pages if n_attached is None else n_attached)

    @property
    def n_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def n_usable(self) -> int:
        """Pages in all, without the scratch page, grown to the full."""
        return self.n_pages - 1

    @property
    def n_unattached(self) -> int:
        """Pages that `grow` could still add."""
        return 0 if self.is_short else self.n_pages - self.n_attached

    def grow(self, n_attached: int) -> None:
        """The first n_attached pages have memory now."""
        n_attached = min(n_attached, self.n_pages)
        if n_attached > self.n_attached:
            self._free[:0] = range(n_attached - 1, self.n_attached - 1, -1)
            self.n_attached = n_attached

    def shrink(self, n_attached: int) -> None:
        """The pages from n_attached on are about to lose their memory; from now on the lowest free pages go first. Raises: PageFault when one is in use."""
        used = [page for page in range(n_attached, self.n_attached) if self._is_out[page]]
        if used:
            raise PageFault(f"page {used[0]} is in use and was to lose its memory", pages=used)
        self._free = sorted((page for page in self._free if page < n_attached), reverse=True)
        self.n_attached = min(self.n_attached, n_attached)
        self.is_short = False

    def take_below(self, limit: int, n: int) -> list[int]:
        """At most n free pages below `limit`, the lowest ones."""
        pages = sorted(page for page in self._free if page < limit)[:n]
        chosen = set(pages)
        self._free = [page for page in self._free if page not in chosen]
        for page in pages:
            self._is_out[page] = 1
        return pages

    def take(self, n: int) -> list[int]:
        """n pages, consecutive where the pool is fresh. The caller has made sure that n <= n_free. Raises: PageFault."""
        free = self._free
        if n > len(free):
            raise PageFault(f"{n} pages wanted, {len(free)} are free", pages=n)
        if n == 0:
            return []
        pages = free[: -n - 1 : -1]
        del free[-n:]
        is_out = self._is_out
        for page in pages:
            is_out[page] = 1
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Takes pages back. Raises: PageFault for one that is not out (nothing was taken back then)."""
        is_out = self._is_out
        for i, page in enumerate(pages):
            if not is_out[page]:
                for done in pages[:i]:
                    is_out[done] = 1
                raise PageFault(f"page {page} was given back but is not out", pages=[page])
            is_out[page] = 0
        self._free.extend(reversed(pages))

    def check(self, owners: Iterable[Iterable[int]]) -> None:
        """Every page is free or has exactly one owner, and the scratch page neither. Raises: PageFault naming the pages."""
        seen = bytearray(self.n_pages)
        seen[SCRATCH_PAGE] = 1
        for kind, group in [("free", self._free), *(("owned", owner) for owner in owners)]:
            for page in group:
                if seen[page]:
                    raise PageFault(f"page {page} is held twice", pages=[page])
                if self._is_out[page] != (kind == "owned"):
                    raise PageFault(f"page {page} is {kind} but marked otherwise", pages=[page])
                seen[page] = 1
        lost = [page for page in range(self.n_attached) if not seen[page]]
        if lost:
            raise PageFault(f"{len(lost)} pages are lost, page {lost[0]} first", pages=lost)
