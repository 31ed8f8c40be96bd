"""Who may use which pages: joins the pool and the prefix tree into what a request needs, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .pages import PagePool
from .prefix import Node, PrefixTree


class Holding:
    """One request's pages. pages: in table order; the first n_settled belong to the tree, the others to the request."""

    __slots__ = ("cached_pages", "is_apart", "n_settled", "node", "pages")

    def __init__(self, node: Node, pages: list[int]) -> None:
        self.node = node
        self.pages = pages
        self.n_settled = self.cached_pages = len(pages)
        self.is_apart = False
        """Another has put the same prefix into the tree first: this request keeps its own pages, unshared, to its end."""

    @property
    def private(self) -> list[int]:
        """The pages that are the request's own."""
        return self.pages[self.n_settled :]


class Ledger:
    """All page accounting of one engine. `grow` puts memory behind at least n pages and says how many have it now.

    is_shared: computed prefixes are kept and shared. False for models whose pages alone cannot continue a sequence (recurrent states).
    """

    __slots__ = ("_grow", "is_shared", "page_tokens", "pool", "tree")

    def __init__(self, pool: PagePool, page_tokens: int, grow: Callable[[int], int], is_shared: bool = True) -> None:
        self.pool = pool
        self.tree = PrefixTree(page_tokens, pool)
        self.page_tokens = page_tokens
        self._grow = grow
        self.is_shared = is_shared

    @property
    def n_available(self) -> int:
        """Pages that could be taken: free, without memory yet, or evictable."""
        return self.pool.n_free + self.pool.n_unattached + self.tree.n_evictable

    def pages_for(self, n_tokens: int) -> int:
        """Pages that hold n_tokens."""
        return -(-n_tokens // self.page_tokens)

    def cached(self, tokens: bytes, salt: int) -> int:
        """Tokens of this prompt that a start now would find computed (at least the last one is not counted)."""
        return self.tree.peek(tokens, salt, (len(tokens) // 4 - 1) // self.page_tokens) * self.page_tokens

    def open(self, tokens: bytes, salt: int, n_reserve: int) -> Holding | None:
        """Pages for all of `tokens`, the known prefix shared; None when they and n_reserve more are not there (nothing changed)."""
        n_tokens = len(tokens) // 4
        node, pages = self.tree.match(tokens, salt, (n_tokens - 1) // self.page_tokens)
        need = self.pages_for(n_tokens) - len(pages)
        if need + n_reserve > self.n_available:
            self.tree.unlock(node)
            return None
        self._make_room(need)
        holding = Holding(node, pages)
        pages += self.pool.take(need)
        return holding

    def settle(self, holding: Holding, tokens: bytes) -> None:
        """Shares what is computed: `tokens` are those of whole pages after the settled ones."""
        if holding.is_apart or not self.is_shared:
            return
        if holding.node.is_dead or self.tree.knows(holding.node, tokens):
            holding.is_apart = True
            return
        first = holding.n_settled
        n = len(tokens) // 4 // self.page_tokens
        holding.node, _ = self.tree.extend(holding.node, tokens, holding.pages[first : first + n])
        holding.n_settled = first + n

    def add_pages(self, holding: Holding, n: int) -> int:
        """n more pages at the end of the table while there are plenty, else one, or none. Returns how many."""
        pool = self.pool
        if n > 1 and self.n_available * 4 < pool.n_pages:
            n = 1
        if pool.n_free < n and not self._make_room(n):
            return 0
        holding.pages += pool.take(n)
        return n

    def close(self, holding: Holding, tokens: bytes = b"") -> None:
        """Gives everything back; pages of `tokens`, computed but not yet settled, are left to the tree.

        The caller has made sure that no step in flight can touch the pages.
        """
        private = holding.private
        n = len(tokens) // 4 // self.page_tokens if self.is_shared else 0
        if n:
            holding.node, n_known = self.tree.extend(holding.node, tokens, private[:n])
            del private[n_known:n]
        self.pool.give(private)
        self.tree.unlock(holding.node)

    def distrust(self, holding: Holding) -> None:
        """Forgets what this holding has put into the tree: its pages may hold NaN."""
        self.tree.cut(holding.node, holding.cached_pages)

    def free_ahead(self, n_low: int, n_more: int) -> None:
        """When fewer than n_low pages are free, makes up to n_more more free: by memory first, then by forgetting. Off the step path."""
        pool = self.pool
        if pool.n_free >= n_low:
            return
        if pool.n_unattached:
            pool.grow(self._grow(min(pool.n_pages, pool.n_attached + n_more)))
        else:
            self.tree.evict(n_more)

    def _make_room(self, n: int) -> bool:
        """Makes at least n pages free: by memory first, then by forgetting. False when that is not possible."""
        pool = self.pool
        if pool.n_free < n and pool.n_unattached:
            pool.grow(self._grow(min(pool.n_pages, pool.n_attached + n - pool.n_free)))
        if pool.n_free < n:
            self.tree.evict(n - pool.n_free)
        return pool.n_free >= n

    def check(self, holdings: Iterable[Holding]) -> None:
        """No page is lost or has two owners. Raises: PageFault."""
        holdings = list(holdings)
        self.tree.check()
        dead: dict[int, Node] = {}
        for holding in holdings:
            node: Node | None = holding.node
            while node is not None and node.is_dead:
                dead[id(node)] = node
                node = node.parent
        self.pool.check(
            [
                *(node.pages for node in self.tree.nodes()),
                *(node.pages for node in dead.values()),
                *(holding.private for holding in holdings),
            ]
        )
