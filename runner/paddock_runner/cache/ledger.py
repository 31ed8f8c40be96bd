"""Who may use which pages: joins the pool and the prefix tree into what a request needs, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .pages import PagePool
from .prefix import Node, PrefixTree
from .states import StatePool
from .tiers import Tiers, page_keys, root_key, state_key
from .windows import WindowPool, deepest


class Holding:
    """One request's pages. pages: in table order; the first n_settled are in the tree, the others are the request's.

    doubles: pages among the first n_settled that are the request's own, because the tree had others with the same tokens already.
    windows: its pages of layers with a window, in table order, as far as it needed them yet; 0 behind the window, and n_behind such at the start.
    prompt_pages: how much of the prompt, in whole pages, one finds that asks it again.
    known_pages: how far the tree knew the prompt at the start, be it without a state to go on from. n_known: pages that need not be computed.
    """

    __slots__ = ("arrives", "below", "cached_pages", "doubles", "is_apart", "known_pages", "n_behind", "n_known", "n_settled", "node", "pages", "prompt_pages", "state_key", "windows")

    def __init__(self, node: Node, pages: list[int]) -> None:
        self.node = node
        self.pages = pages
        self.n_settled = self.cached_pages = self.known_pages = self.n_known = len(pages)
        self.doubles: list[int] = []
        self.windows: list[int] = []
        self.n_behind = self.prompt_pages = 0
        self.state_key = b""
        """Of the recurrent states to start from, where they are in host memory."""
        self.below: list[bytes] = []
        """Keys of the pages after the settled ones that are in host memory and have still to be brought, the next one last."""
        self.arrives = -1
        """Of the copies that bring such pages, the last one that was asked for; -1: all have come, or a step may wait for them."""
        self.is_apart = False
        """What it computes is not to be shared: the tree has cut off the node that it stands on."""

    @property
    def private(self) -> list[int]:
        """The pages that only this request uses and that follow the settled ones."""
        return self.pages[self.n_settled :]

    @property
    def state(self) -> int:
        """Place of the recurrent states to start from, -1: none."""
        return self.node.state


class Ledger:
    """All page accounting of one engine. `grow` puts memory behind at least n pages, as far as the device has it, and says how many have it now.

    is_shared: computed prefixes are kept and shared. states: where snapshots of recurrent states go, for models that have such; windows: likewise
    the pages of layers with a window.
    """

    __slots__ = ("_grow", "is_shared", "page_tokens", "pool", "states", "tree", "windows")

    def __init__(
        self,
        pool: PagePool,
        page_tokens: int,
        grow: Callable[[int], int],
        is_shared: bool = True,
        states: StatePool | None = None,
        windows: WindowPool | None = None,
    ) -> None:
        self.pool = pool
        self.states, self.windows = states, windows
        self.tree = PrefixTree(page_tokens, pool, states, windows)
        self.page_tokens = page_tokens
        self._grow = grow
        self.is_shared = is_shared

    def use_tiers(self, tiers: Tiers, others: Tiers | None = None) -> None:
        """Pages that are forgotten go to these tiers, and prompts look for their pages there; the others are for states or pages of layers with a window."""
        self.tree.tiers = tiers
        if self.states is not None:
            self.states.tiers = others
        if self.windows is not None:
            self.windows.tiers = others

    @property
    def beside_tiers(self) -> Tiers | None:
        """Where states, or pages of layers with a window, go."""
        beside = self.states if self.states is not None else self.windows
        return beside.tiers if beside is not None else None

    @property
    def tier_version(self) -> int:
        """Grows with what file threads have done, for pages and for what lies beside them."""
        return sum(tiers.version for tiers in (self.tree.tiers, self.beside_tiers) if tiers is not None)

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

    def known(self, tokens: bytes, salt: int) -> tuple[int, bool]:
        """Tokens of this prompt up to which something known goes on as it does, and whether that goes on otherwise there."""
        return self.tree.meets(tokens, salt)

    def open(self, tokens: bytes, salt: int, n_reserve: int) -> Holding | None:
        """Pages for all of `tokens`, the known prefix shared; None when they and n_reserve more are not there (nothing changed)."""
        n_tokens = len(tokens) // 4
        most, n_known, windows = (n_tokens - 1) // self.page_tokens, 0, list[int]()
        if self.states is not None:
            node, pages, n_known = self.tree.match_state(tokens, salt, most)
        elif self.windows is not None:
            node, pages, windows, n_known = self.tree.match_window(tokens, salt, most)
        else:
            node, pages = self.tree.match(tokens, salt, most)
        deeper = self.deeper(tokens, salt, len(pages), most) or self.deeper_window(tokens, salt, len(pages), most)
        if deeper:
            if self.windows is not None:
                self.windows.let_go(filter(None, windows), True)
                windows = []
            self.tree.unlock(node)
            node, pages = self.tree.match(tokens, salt, len(deeper))
        need = self.pages_for(n_tokens) - len(pages)
        if need + n_reserve <= self.n_available:
            self._attach(need - self.pool.n_free)
        if need + n_reserve > self.n_available:
            if self.windows is not None:
                self.windows.let_go(filter(None, windows), True)
            self.tree.unlock(node)
            return None
        holding = Holding(node, pages)
        holding.windows, holding.n_behind = windows, windows.count(0)
        holding.known_pages, holding.prompt_pages = max(n_known, holding.known_pages), most
        if deeper:
            self._pin(holding, deeper[len(pages) :], state_key(deeper[-1]))
            self._bring_windows(holding, tokens, salt, deeper)
        self._make_room(need)
        if not deeper:
            self._pin(holding, self.below(node, tokens, len(pages), most), b"")
        pages += self.pool.take(need)
        return holding

    # ---- layers with a window ----

    def deeper_window(self, tokens: bytes, salt: int, n_have: int, most: int, is_disk: bool = False) -> list[bytes]:
        """Keys of the pages up to the deepest place, beyond n_have pages, where these and all that windows see from there are on the device or in host memory.

        is_disk: or on disk.
        """
        tiers, windows = self.tree.tiers, self.windows.tiers if self.windows is not None else None
        if tiers is None or windows is None or self.windows is None or n_have >= most or (tiers.is_empty and windows.is_empty):
            return []
        size = 4 * self.page_tokens
        keys, known = page_keys(root_key(salt), tokens[: most * size], size), self.tree.known_windows(tokens, salt, most)
        n = len(known) + tiers.find(keys[len(known) :])[is_disk]
        n = deepest(n, self.windows.n_back, lambda i: (i < len(known) and known[i]) or windows.find([keys[i]])[is_disk])
        return keys[:n] if n > n_have else []

    def _bring_windows(self, holding: Holding, tokens: bytes, salt: int, keys: list[bytes]) -> None:
        """What windows see from the end of the pages with these keys is held, or copied from host memory, in order with the steps."""
        if self.windows is None or self.windows.tiers is None:
            return
        known, first = self.tree.known_windows(tokens, salt, len(keys)), max(0, len(keys) - self.windows.n_back)
        seen = [known[i] if i < len(known) else 0 for i in range(first, len(keys))]
        missing = [i for i, page in enumerate(seen) if not page]
        wanted = [keys[first + i] for i in missing]
        self.windows.hold(filter(None, seen))
        self.windows.tiers.pin(wanted)
        for i, page in zip(missing, pages := self.windows.take(len(missing)), strict=True):
            seen[i] = page
        self.windows.tiers.bring(wanted, pages)
        holding.windows, holding.n_behind = [0] * first + seen, first

    def reach(self, holding: Holding, n_tokens: int) -> int:
        """Pages of layers with a window for the first n_tokens, the last of holding.windows; how many are new."""
        n = self.pages_for(n_tokens) - len(holding.windows) if self.windows is not None else 0
        if n > 0 and self.windows is not None:
            holding.windows += self.windows.take(n)
        return max(0, n)

    def pass_by(self, holding: Holding, n_tokens: int) -> None:
        """The next token to be computed is at n_tokens: what no window sees from there is given back, and may be used from the next step on.

        Where the prompt left what was known others are likely to leave it, too, and its last page is where one goes on that asks it again: what
        they would see there is kept longer.
        """
        if self.windows is None:
            return
        first, end = holding.n_behind, min(self.windows.behind(n_tokens), len(holding.windows))
        if end <= first:
            return
        n_back = self.windows.n_back
        for i in range(first, end):
            self.windows.let_go([holding.windows[i]], any(at - n_back <= i < at for at in (holding.known_pages, holding.prompt_pages)))
            holding.windows[i] = 0
        holding.n_behind = end

    def _pin(self, holding: Holding, below: list[bytes], key: bytes) -> None:
        """These pages and states in host memory are what the request begins with."""
        if below and self.tree.tiers is not None:
            self.tree.tiers.pin(below)
            holding.below = below[::-1]
            holding.arrives = 0
            holding.n_known += len(below)
        if key and self.states is not None and self.states.tiers is not None:
            self.states.tiers.pin([key])
            holding.state_key = key

    def deeper(self, tokens: bytes, salt: int, n_have: int, most: int, is_disk: bool = False) -> list[bytes]:
        """Keys of the pages up to the deepest states, beyond n_have pages, that are in host memory with what of these pages is not on the device.

        is_disk: or on disk. For models with recurrent layers.
        """
        tiers = self.tree.tiers
        states = self.states.tiers if self.states is not None else None
        if tiers is None or states is None or states.is_empty or n_have >= most:
            return []
        size = 4 * self.page_tokens
        keys = page_keys(root_key(salt), tokens[: most * size], size)
        n_device = self.tree.peek(tokens, salt, most, False)
        for n in range(n_device + tiers.find(keys[n_device:])[is_disk], n_have, -1):
            if states.find([state_key(keys[n - 1])])[is_disk]:
                return keys[:n]
        return []

    def bring_state(self, holding: Holding, slot: int) -> bool:
        """Copies the states that a request begins with from host memory to its slot. False: they are not there, but on the device or nowhere."""
        if not holding.state_key or self.states is None or self.states.tiers is None:
            return False
        self.states.tiers.bring([holding.state_key], [slot])
        holding.state_key = b""
        return True

    def bring(self, holding: Holding, tokens: bytes, n_most: int) -> int:
        """Copies at most n_most of a request's pages from host memory, in order with the steps; how many. tokens: of the whole prompt."""
        tiers, n = self.tree.tiers, min(n_most, len(holding.below))
        if tiers is None or not n:
            return 0
        keys, first, size = holding.below[: -n - 1 : -1], holding.n_known - len(holding.below), 4 * self.page_tokens
        del holding.below[-n:]
        tiers.bring(keys, holding.pages[first : first + n])
        self.settle(holding, tokens[first * size : (first + n) * size])
        holding.cached_pages += n
        return n

    def below(self, node: Node, tokens: bytes, first: int, most: int) -> list[bytes]:
        """Keys of the pages after the first ones that are in host memory now."""
        tiers = self.tree.tiers
        if tiers is None or self.states is not None or self.windows is not None or first >= most:
            return []
        size = 4 * self.page_tokens
        keys = page_keys(self.tree.before(node), tokens[first * size : most * size], size)
        return keys[: tiers.find(keys)[0]]

    def settle(self, holding: Holding, tokens: bytes) -> None:
        """Shares what is computed: `tokens` are those of whole pages after the settled ones."""
        if holding.is_apart or not self.is_shared:
            return
        if holding.node.is_dead:
            holding.is_apart = True
            return
        first = holding.n_settled
        pages = holding.pages[first : first + len(tokens) // 4 // self.page_tokens]
        windows = holding.windows[first : first + len(pages)] if self.windows is not None else None
        holding.node, n_known = self.tree.extend(holding.node, tokens, pages, windows)
        holding.doubles += pages[:n_known]
        holding.n_settled = first + len(pages)

    def _undouble(self, holding: Holding) -> None:
        """Gives back one of two pages with the same tokens, where nobody else uses the tree's: its own takes that place."""
        if not holding.doubles:
            return
        own, end, node = set(holding.doubles), holding.n_settled, holding.node
        while node.parent is not None and node.locks == 1 and not node.is_dead:
            first = end - len(node.pages)
            for i, page in enumerate(holding.pages[first:end]):
                if page in own:
                    self.pool.give([node.pages[i]])
                    node.pages[i] = page
                    own.remove(page)
            node, end = node.parent, first
        holding.doubles = sorted(own)

    def keep_state(self, holding: Holding, place: int) -> None:
        """The states after the settled pages were copied to this place: they hang on the tree from now on."""
        assert self.states is not None
        if holding.is_apart:
            self.states.give(place)
        else:
            self.states.attach(holding.node, place)

    def add_pages(self, holding: Holding, n: int) -> int:
        """n more pages at the end of the table while there are plenty, else one, or none. Returns how many."""
        pool = self.pool
        if n > 1 and self.n_available * 4 < pool.n_pages:
            n = 1
        if pool.n_free < n and not self._make_room(n):
            self._undouble(holding)
            if pool.n_free < n:
                return 0
        holding.pages += pool.take(n)
        return n

    def close(self, holding: Holding, tokens: bytes = b"", kept: Sequence[tuple[int, int]] = ()) -> None:
        """Gives everything back; pages of `tokens`, computed but not yet settled, are left to the tree.

        kept: (pages, place) of the states that the request has saved on its way, shortest first; they hang on the tree afterwards.
        The caller has made sure that no step in flight can touch the pages.
        """
        if holding.below and self.tree.tiers is not None:
            self.tree.tiers.unpin(holding.below)
            holding.below = []
        if holding.state_key and self.states is not None and self.states.tiers is not None:
            self.states.tiers.unpin([holding.state_key])
            holding.state_key = b""
        n_tokens = len(tokens) // 4
        for n_pages, place in kept:
            assert self.states is not None
            n = (n_pages - holding.n_settled) * self.page_tokens
            if not 0 <= n <= n_tokens:
                self.states.give(place)
                continue
            if n:
                self.settle(holding, tokens[: 4 * n])
                tokens, n_tokens = tokens[4 * n :], n_tokens - n
            self.keep_state(holding, place)
        if n_tokens >= self.page_tokens:
            self.settle(holding, tokens)
        if self.windows is not None:
            self.windows.let_go(holding.windows[holding.n_behind :], True)
            holding.windows = []
        self.pool.give(holding.private)
        self.pool.give(holding.doubles)
        self.tree.unlock(holding.node)
        self.pool.is_short = False  # whoever needs a page next asks the device again

    def distrust(self, holding: Holding) -> None:
        """Forgets what this holding has put into the tree: its pages may hold NaN."""
        self.tree.cut(holding.node, holding.cached_pages)

    def free_ahead(self, n_low: int, n_more: int) -> None:
        """When fewer than n_low pages are free, makes up to n_more more free: by memory first, then by forgetting. Off the step path."""
        pool = self.pool
        if pool.n_free >= n_low:
            return
        if pool.n_unattached:
            self._attach(n_more)
        else:
            self.tree.evict(n_more)

    def gather(self, limit: int, n_most: int, copy: Callable[[int, int], None]) -> int:
        """Moves at most n_most cached pages from `limit` on to free ones below it; how many. copy: of one page to another, in order with the steps.

        Nothing runs: pages that requests hold do not move.
        """
        n_moved = 0
        for node in self.tree.nodes():
            high = [] if node.locks else [i for i, page in enumerate(node.pages) if page >= limit][: n_most - n_moved]
            for i, page in zip(high, self.pool.take_below(limit, len(high)) if high else (), strict=False):
                copy(node.pages[i], page)
                self.pool.give([node.pages[i]])
                node.pages[i] = page
                n_moved += 1
            if n_moved >= n_most:
                break
        return n_moved

    def take(self, n: int) -> list[int]:
        """n pages. The caller has made sure that they are available."""
        self._make_room(n)
        return self.pool.take(n)

    def _make_room(self, n: int) -> bool:
        """Makes at least n pages free: by memory first, then by forgetting. False when that is not possible."""
        pool = self.pool
        self._attach(n - pool.n_free)
        if pool.n_free < n:
            self.tree.evict(n - pool.n_free)
        return pool.n_free >= n

    def _attach(self, n: int) -> None:
        """Memory for n more pages, as far as there are such and the device has it."""
        pool = self.pool
        n = min(n, pool.n_unattached)
        if n > 0:
            wanted = pool.n_attached + n
            pool.grow(self._grow(wanted))
            pool.is_short = pool.n_attached < wanted

    def check(self, holdings: Iterable[Holding]) -> None:
        """No page is lost or has two owners. Raises: PageFault."""
        holdings = list(holdings)
        self.tree.check()
        if self.windows is not None:
            self.windows.check(self.tree.nodes(), [holding.windows for holding in holdings])
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
                *(holding.doubles for holding in holdings),
            ]
        )
