"""The prefix tree: which computed token prefixes lie in which pages, shared by reference, forgotten leaf by leaf, oldest first.

A radix tree at page granularity. An edge is the int32 tokens of whole pages as bytes, so that comparing is memcmp; a node owns
its edge's pages. Requests lock the path that they use; unlocked leaves can be evicted. Each salt has its own root. For models with
recurrent layers a prefix can be continued only where a node has a state (see states.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

import numpy as np

from .pages import PageFault, PagePool
from .states import StatePool
from .tiers import Tiers, page_keys, root_key
from .windows import WindowPool, deepest

MAX_LOOKS = 4
"""Edges, the newest, that are compared when it is asked where a prompt leaves what is known."""


class Node:
    """The pages of one edge. locks: requests whose path goes through here. used: the clock when it was last let go.

    windows: its pages of layers with a window, 0 where they are not known (any more), where such layers have pages of their own.
    keys: of its pages in the tiers, where there are tiers. state: place of the recurrent states after the edge's last token, or -1.
    """

    __slots__ = ("children", "edge", "is_dead", "keys", "locks", "pages", "parent", "salt", "state", "used", "windows")

    def __init__(self, parent: Node | None, edge: bytes, pages: list[int], salt: int) -> None:
        self.parent = parent
        self.edge = edge
        self.pages = pages
        self.salt = salt
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.used = 0
        self.keys: list[bytes] = []
        self.windows: list[int] = []
        self.state = -1
        self.is_dead = False
        """Cut off because its pages are not to be trusted; its pages go when its last lock goes."""


class PrefixTree:
    """Prefixes in pages. Tokens are int32 as bytes; all lengths are in pages of `page_tokens` tokens.

    states: where the snapshots are, when a prefix needs one to be of use; windows: likewise the pages of layers with a window.
    """

    __slots__ = (
        "_clock",
        "_heap",
        "_n_offers",
        "_page_bytes",
        "_pool",
        "_roots",
        "n_evictable",
        "n_evicted",
        "n_nodes",
        "n_pages",
        "states",
        "tiers",
        "windows",
    )

    def __init__(self, page_tokens: int, pool: PagePool, states: StatePool | None = None, windows: WindowPool | None = None) -> None:
        self.states, self.windows = states, windows
        self.tiers: Tiers | None = None
        """Where pages go that are forgotten here."""
        self._page_bytes = 4 * page_tokens
        self._pool = pool
        self._roots: dict[int, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._n_offers = 0
        self.n_nodes = 0
        self.n_pages = 0
        """Pages that the tree owns."""
        self.n_evictable = 0
        """Those of them under no lock."""
        self.n_evicted = 0

    # ---- finding ----

    def peek(self, tokens: bytes, salt: int, max_pages: int, to_states: bool = True) -> int:
        """Pages of the longest prefix that could be continued, at most max_pages; not to_states: that are here, states or not. Changes nothing."""
        if self.states is not None and to_states:
            return self._find_state(tokens, salt, max_pages)[1]
        if self.windows is not None and to_states:
            return self._find_window(tokens, salt, max_pages)[0]
        node = self._roots.get(salt)
        step = self._page_bytes
        at, end = 0, max_pages * step
        while node is not None and at < end:
            node = node.children.get(tokens[at : at + step])
            if node is not None:
                if not tokens.startswith(node.edge, at) or at + len(node.edge) > end:
                    return (at + self._common(node.edge, tokens, at, end)) // step
                at += len(node.edge)
        return at // step

    def match(self, tokens: bytes, salt: int, max_pages: int) -> tuple[Node, list[int]]:
        """The longest known prefix, at most max_pages: its end node, locked for the caller, and its pages.

        Splits a node where the prefix ends inside its edge. Undo with `unlock`.
        """
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, b"", [], salt)
        node, pages = root, list[int]()
        step = self._page_bytes
        at, end = 0, max_pages * step
        while at < end:
            child = node.children.get(tokens[at : at + step])
            if child is None:
                break
            edge = child.edge
            if not tokens.startswith(edge, at) or at + len(edge) > end:
                common = self._common(edge, tokens, at, end) // step
                if common:
                    node = self._split(child, common)
                    pages += node.pages
                break
            node = child
            pages += node.pages
            at += len(edge)
        self._lock(node, None)
        return node, pages

    def match_state(self, tokens: bytes, salt: int, max_pages: int) -> tuple[Node, list[int], int]:
        """As `match`, but ends at the deepest node with a state. Also how many pages of the prompt are known, states or not."""
        assert self.states is not None
        node, n_pages, n_known = self._find_state(tokens, salt, max_pages)
        if node is None:
            node = self._roots.get(salt)
            if node is None:
                node = self._roots[salt] = Node(None, b"", [], salt)
        else:
            self.states.touch(node)
        path, pages = node, list[int]()
        while path.parent is not None:
            pages[:0] = path.pages
            path = path.parent
        assert len(pages) == n_pages
        self._lock(node, None)
        return node, pages, n_known

    def _find_state(self, tokens: bytes, salt: int, max_pages: int) -> tuple[Node | None, int, int]:
        """The deepest node with a state on the prompt's path, the pages to its end, and the pages that are known in all."""
        node, best, n_best = self._roots.get(salt), None, 0
        step = self._page_bytes
        at, end = 0, max_pages * step
        while node is not None and at < end:
            node = node.children.get(tokens[at : at + step])
            if node is None:
                break
            if not tokens.startswith(node.edge, at) or at + len(node.edge) > end:
                at += self._common(node.edge, tokens, at, end)
                break
            at += len(node.edge)
            if node.state >= 0:
                best, n_best = node, at // step
        return best, n_best, at // step

    def match_window(self, tokens: bytes, salt: int, max_pages: int) -> tuple[Node, list[int], list[int], int]:
        """As `match`, but ends where the windows before it are known: those pages, 0 for those further ahead, come third; they are held for the caller.
        Also how many pages of the prompt are known in all."""
        assert self.windows is not None
        n, n_known = self._find_window(tokens, salt, max_pages)
        node, pages = self.match(tokens, salt, n)
        seen, walker, n_back = list[int](), node, self.windows.n_back
        while walker.parent is not None and len(seen) < n_back:
            seen[:0] = walker.windows
            walker = walker.parent
        seen = seen[max(0, len(seen) - n_back) :]
        self.windows.hold(seen)
        return node, pages, [0] * (n - len(seen)) + seen, n_known

    def _find_window(self, tokens: bytes, salt: int, max_pages: int) -> tuple[int, int]:
        """Pages to the deepest place on the prompt's path from which all that windows see is known, and the pages that are known in all."""
        assert self.windows is not None
        known = self.known_windows(tokens, salt, max_pages)
        return deepest(len(known), self.windows.n_back, known.__getitem__), len(known)

    def known_windows(self, tokens: bytes, salt: int, max_pages: int) -> list[int]:
        """For each page of the prompt that is known: its page of layers with a window, or 0."""
        node, step, found = self._roots.get(salt), self._page_bytes, list[int]()
        at, end = 0, max_pages * step
        while node is not None and at < end:
            node = node.children.get(tokens[at : at + step])
            if node is None:
                break
            is_whole = tokens.startswith(node.edge, at) and at + len(node.edge) <= end
            n_bytes = len(node.edge) if is_whole else self._common(node.edge, tokens, at, end)
            found += node.windows[: n_bytes // step]
            at += n_bytes
            if not is_whole:
                break
        return found

    def _common(self, edge: bytes, tokens: bytes, at: int, end: int) -> int:
        """Bytes, in whole pages, that `edge` and tokens[at:end] have in common."""
        step = self._page_bytes
        n = min(len(edge), end - at, len(tokens) - at) // step * step
        return first_difference(edge, tokens, at, n) // step * step

    def meets(self, tokens: bytes, salt: int) -> tuple[int, bool]:
        """Tokens up to which something known under this salt goes on as `tokens` do, and whether it goes on otherwise there.

        Changes nothing.
        """
        node, at = self._roots.get(salt), 0
        while node is not None and at < len(tokens):
            found = node.children.get(tokens[at : at + self._page_bytes])
            edges = [found.edge] if found is not None else [c.edge for c in islice(reversed(node.children.values()), MAX_LOOKS)]
            n = max((first_difference(edge, tokens, at, min(len(edge), len(tokens) - at)) for edge in edges), default=0)
            at += n
            if found is None or n < len(found.edge):
                return at // 4, bool(edges) and at < len(tokens)
            node = found
        return at // 4, False

    # ---- locks ----

    def _lock(self, node: Node | None, above: Node | None) -> None:
        """One more lock on every node from `node` up to, not including, `above`."""
        while node is not above:
            assert node is not None
            if not node.locks and not node.is_dead:
                self.n_evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Takes back the lock of one `match` (or of the `extend` that moved it)."""
        self._clock += 1
        clock = self._clock
        walker: Node | None = node
        while walker is not None:
            walker.locks -= 1
            walker.used = clock
            parent = walker.parent
            if not walker.locks:
                if walker.is_dead:
                    self._bury(walker)
                else:
                    self.n_evictable += len(walker.pages)
                    self._offer(walker)
            walker = parent

    def _offer(self, node: Node) -> None:
        """Puts an unlocked leaf in line for eviction; a root without children goes at once."""
        if node.children or node.locks or node.is_dead:
            return
        if node.parent is None:
            self._roots.pop(node.salt, None)
            return
        heap = self._heap
        if len(heap) > 64 + 4 * self.n_nodes:
            heap = self._heap = [entry for entry in heap if self._is_due(entry)]
            heapq.heapify(heap)
        self._n_offers += 1
        heapq.heappush(heap, (node.used, self._n_offers, node))

    @staticmethod
    def _is_due(entry: tuple[int, int, Node]) -> bool:
        used, _, node = entry
        return node.used == used and not node.locks and not node.children and not node.is_dead

    # ---- growing ----

    def extend(self, node: Node, tokens: bytes, pages: list[int], windows: list[int] | None = None) -> tuple[Node, int]:
        """Adds pages computed by the holder of a lock on `node`, which moves to the returned node. windows: the same tokens' pages of layers with a window.

        tokens: those of `pages`, whole pages, following `node`. Returns the node at their end and how many of the leading pages
        were known already: those stay the caller's, the others are the tree's from now on. On a dead node all stay the caller's.
        """
        if node.is_dead:
            return node, len(pages)
        step = self._page_bytes
        start, at, known = node, 0, 0
        while at < len(tokens):
            child = node.children.get(tokens[at : at + step])
            if child is None:
                break
            if tokens.startswith(child.edge, at):
                node = child
            else:
                node = self._split(child, self._common(child.edge, tokens, at, len(tokens)) // step)
            if windows and self.windows is not None:
                self.windows.adopt(node, 0, windows[known : known + len(node.pages)])
            at += len(node.edge)
            known = at // step
        self._lock(node, start)
        fresh = pages[known:]
        if not fresh:
            return node, known
        self.n_pages += len(fresh)
        if not node.children and node.locks == 1 and node.parent is not None and node.state < 0:
            node.keys += self._keys(node, tokens[at:])
            node.edge += tokens[at:]
            node.pages += fresh
            self._adopt(node, windows, known)
            return node, known
        leaf = Node(node, tokens[at:], fresh, node.salt)
        leaf.keys = self._keys(node, tokens[at:])
        self._adopt(leaf, windows, known)
        leaf.locks = 1
        leaf.used = self._clock
        node.children[tokens[at : at + step]] = leaf
        self.n_nodes += 1
        return leaf, known

    def _adopt(self, node: Node, windows: list[int] | None, n_known: int) -> None:
        """A node has grown by the pages after the first n_known."""
        if windows and self.windows is not None:
            first = len(node.windows)
            node.windows += [0] * (len(windows) - n_known)
            self.windows.adopt(node, first, windows[n_known:])

    def before(self, node: Node) -> bytes:
        """The key at a node's end."""
        return node.keys[-1] if node.keys else root_key(node.salt)

    def _keys(self, node: Node, tokens: bytes) -> list[bytes]:
        """Keys of pages that follow a node."""
        return page_keys(self.before(node), tokens, self._page_bytes) if self.tiers is not None else []

    def _split(self, node: Node, n_pages: int) -> Node:
        """Cuts an edge after n_pages; returns the new upper node. `node` stays the lower one, so that locks on it stay right."""
        at = n_pages * self._page_bytes
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.edge[:at], node.pages[:n_pages], node.salt)
        upper.keys, node.keys = node.keys[:n_pages], node.keys[n_pages:]
        upper.windows, node.windows = node.windows[:n_pages], node.windows[n_pages:]
        if self.windows is not None:
            self.windows.move(upper.windows, upper)
        upper.locks, upper.used, upper.is_dead = node.locks, node.used, node.is_dead
        parent.children[upper.edge[: self._page_bytes]] = upper
        node.edge, node.pages, node.parent = node.edge[at:], node.pages[n_pages:], upper
        upper.children[node.edge[: self._page_bytes]] = node
        self.n_nodes += 1
        return upper

    # ---- shrinking ----

    def evict(self, n_pages: int) -> int:
        """Gives up to n_pages unlocked pages back to the pool, least recently used leaves first, from their ends. Returns how many."""
        freed = 0
        heap = self._heap
        while freed < n_pages and heap:
            entry = heap[0]
            if not self._is_due(entry):
                heapq.heappop(heap)
                continue
            node = entry[2]
            n = min(len(node.pages), n_pages - freed)
            freed += n
            self.n_evictable -= n
            if self.states is not None:
                self.states.spill(node)
            if self.windows is not None:
                self.windows.spill(node, len(node.windows) - n)
            if self.tiers is not None:
                self.tiers.spill(node.keys[-n:], node.pages[-n:])
                del node.keys[-n:]
            self._give(node.pages[-n:])
            self._forget_state(node)
            self._forget_windows(node, n)
            if n < len(node.pages):
                del node.pages[-n:]
                node.edge = node.edge[: -n * self._page_bytes]
                break
            heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            self._remove(node)
            self._offer(parent)
        self.n_evicted += freed
        return freed

    def cut(self, node: Node, keep_pages: int) -> None:
        """Forgets the path to `node` beyond its first keep_pages pages, with all that hangs on it: those pages are not to be trusted.

        Pages under a lock go when the last lock goes.
        """
        path = [node]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        depth = 0
        for walker in reversed(path):
            if depth + len(walker.pages) > keep_pages:
                if walker.is_dead:
                    return
                if keep_pages > depth:
                    self._split(walker, keep_pages - depth)
                self._kill(walker)
                return
            depth += len(walker.pages)

    def _kill(self, top: Node) -> None:
        parent = top.parent
        assert parent is not None
        parent.children.pop(top.edge[: self._page_bytes])
        stack, order = [top], list[Node]()
        while stack:
            node = stack.pop()
            order.append(node)
            self._forget_state(node)
            self._forget_windows(node, len(node.pages))
            node.is_dead = True
            stack.extend(node.children.values())
        for node in reversed(order):
            if not node.locks:
                self.n_evictable -= len(node.pages)
                self._bury(node)
        self._offer(parent)

    def _bury(self, node: Node) -> None:
        self._give(node.pages)
        node.pages = []
        self.n_nodes -= 1

    def _forget_state(self, node: Node) -> None:
        if self.states is not None:
            self.states.drop(node)

    def _forget_windows(self, node: Node, n_pages: int) -> None:
        """The node's last n_pages are no longer known."""
        if self.windows is not None:
            first = len(node.windows) - n_pages
            self.windows.disown(node.windows[first:])
            del node.windows[first:]

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children.pop(node.edge[: self._page_bytes])
        node.is_dead = True
        node.pages = []
        self.n_nodes -= 1

    def _give(self, pages: list[int]) -> None:
        self._pool.give(pages)
        self.n_pages -= len(pages)

    # ---- checking ----

    def nodes(self) -> Iterator[Node]:
        """Every live node, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Counts, keys, parents and edges agree. Raises: PageFault. Dead nodes are not seen (their holders' pages are)."""
        n_pages = n_evictable = 0
        for node in self.nodes():
            if len(node.edge) != len(node.pages) * self._page_bytes or (node.parent is not None and not node.pages):
                raise PageFault(
                    f"a node has {len(node.edge)} bytes of tokens for {len(node.pages)} pages", pages=node.pages
                )
            if self.windows is not None and len(node.windows) != len(node.pages):
                raise PageFault(f"a node has {len(node.windows)} windows for {len(node.pages)} pages", pages=node.pages)
            for key, child in node.children.items():
                if child.parent is not node or not child.edge.startswith(key) or len(key) != self._page_bytes:
                    raise PageFault("a node hangs under the wrong key or parent", pages=child.pages)
                if child.locks > node.locks:
                    raise PageFault("a locked node has an ancestor with fewer locks", pages=child.pages)
            n_pages += len(node.pages)
            n_evictable += 0 if node.locks else len(node.pages)
        if n_pages > self.n_pages or n_evictable != self.n_evictable:
            raise PageFault(
                f"{n_pages} pages counted as {self.n_pages}, {n_evictable} evictable as {self.n_evictable}",
                pages=n_pages,
            )


def first_difference(edge: bytes, tokens: bytes, at: int, n: int) -> int:
    """Bytes, in whole tokens, of edge[:n] and tokens[at : at + n] before the first token that differs."""
    if n < 4 or edge[:4] != tokens[at : at + 4]:  # most differ at once, and arrays take a while to make
        return 0
    a = np.frombuffer(edge, np.int32, n // 4)
    b = np.frombuffer(tokens, np.int32, n // 4, at)
    differs = a != b
    first = int(differs.argmax())
    return first * 4 if differs[first] else n // 4 * 4
