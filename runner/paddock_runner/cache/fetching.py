"""A prompt's pages on their way from disk: asked for as far as there is room in host memory, kept there until the prompt starts, and moved on to the device where there is
room for a part of them only. Worth it as long as the rest is there before it could be computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .ledger import Ledger
from .tiers import Tiers, page_keys, state_key

MOVES = 64
"""Pages that are moved on to the device between two steps."""

Price = Callable[[int, int], float]
"""Microseconds of computing n tokens from a position on."""


class Wanted(NamedTuple):
    """What of a prompt is on disk. keys: of its pages after the first ones, which are on the device. n_have: pages that it could start behind now.
    beside: states or pages of layers with a window, without which these are of no use."""

    first: int
    keys: list[bytes]
    n_have: int
    beside: list[bytes]


class Fetch:
    """What one prompt waits for. Every key that was asked for is pinned, until it is on the device or `close` is called."""

    __slots__ = ("_beside", "_beside_tiers", "_first", "_keys", "_ledger", "_n_asked", "_n_have", "_n_moved", "_salt", "_tiers", "_tokens", "given", "n_there")

    def __init__(self, ledger: Ledger, tiers: Tiers, beside_tiers: Tiers, tokens: bytes, salt: int, wanted: Wanted) -> None:
        self._ledger, self._tiers, self._beside_tiers = ledger, tiers, beside_tiers
        self._tokens, self._salt = tokens, salt
        self._first, self._keys, self._n_have, self._beside = wanted
        self._n_asked = self._n_moved = self.n_there = 0
        """Leading keys that were asked for, that are on the device, and that are at least in host memory."""
        self.given = -1
        """Number of the last copy to the device; -1: none."""

    @property
    def left_us(self) -> float:
        """What is left to be read takes so long, with what others have asked for."""
        left = max(len(self._keys) - self.n_there, self._tiers.n_reading + len(self._keys) - self._n_asked)
        return self._tiers.us("disk", left) + self._beside_tiers.us("disk", sum(not self._beside_tiers.is_here(key) for key in self._beside))

    def go_on(self, price: Price) -> bool:
        """Asks for more. True while it is worth waiting for what has not come."""
        keys, tiers = self._keys, self._tiers
        while self.n_there < self._n_asked and tiers.is_here(keys[self.n_there]):
            self.n_there += 1
        self._ask()
        if self._n_asked < len(keys) and self.n_there > self._n_moved and self._move():
            self._ask()
        if self.n_there < self._n_asked and not tiers.is_reading(keys[self.n_there]):
            return False
        if not all(self._beside_tiers.is_here(key) or self._beside_tiers.is_reading(key) for key in self._beside):
            return False
        is_beside_here = all(map(self._beside_tiers.is_here, self._beside))
        if is_beside_here and (self.n_there == len(keys) or (self.n_there == self._n_asked and not tiers.n_reading)):
            return False
        n_have = self._n_have if self._beside else self._first + self.n_there
        size = self._ledger.page_tokens
        return self.left_us <= price((self._first + len(keys) - n_have) * size, n_have * size)

    def start(self) -> bool:
        """Asks for what lies beside the pages, which is all needed, and for the first of these. False: there is no room."""
        for i, key in enumerate(self._beside):
            if not self._beside_tiers.ask(key):
                self._beside_tiers.unpin(self._beside[:i])
                self._beside = []
                return False
        self._ask()
        return True

    def stop(self) -> None:
        """No more is waited for: what has come stays pinned."""
        self._tiers.unpin(self._keys[self.n_there : self._n_asked])
        self._n_asked = self.n_there

    def close(self) -> None:
        """Lets go of everything."""
        self._tiers.unpin(self._keys[self._n_moved : self._n_asked])
        self._beside_tiers.unpin(self._beside)
        self._keys, self._beside, self._n_asked, self._n_moved = [], [], 0, 0

    def _ask(self) -> None:
        while self._n_asked < len(self._keys) and self._tiers.ask(self._keys[self._n_asked]):
            self._n_asked += 1

    def _move(self) -> bool:
        """Moves what has come on to the device, where nobody holds it, but it is what was used last. False: there is no room, or what comes before it was forgotten."""
        ledger, tree = self._ledger, self._ledger.tree
        n, at, size = min(MOVES, self.n_there - self._n_moved), self._first + self._n_moved, 4 * self._ledger.page_tokens
        if ledger.n_available < n + ledger.pool.n_pages // 16:
            return False
        node, known = tree.match(self._tokens, self._salt, at)
        if len(known) == at:
            pages = ledger.take(n)
            self._tiers.bring(self._keys[self._n_moved : self._n_moved + n], pages)
            node, n_known = tree.extend(node, self._tokens[at * size : (at + n) * size], pages, [0] * n)
            ledger.pool.give(pages[:n_known])
            self._n_moved += n
            self.given = self._tiers.given
        tree.unlock(node)
        return len(known) == at


def fetch(ledger: Ledger, tokens: bytes, salt: int, price: Price) -> Fetch | None:
    """Asks for pages of this prompt that are on disk, when that is quicker than to compute them; None: there are none, or it is not."""
    tiers, beside = ledger.tree.tiers, ledger.beside_tiers
    if tiers is None:
        return None
    wanted = (_with_states if ledger.states is not None else _with_windows if ledger.windows is not None else _pages)(ledger, tiers, tokens, salt)
    if wanted is None:
        return None
    found = Fetch(ledger, tiers, beside or tiers, tokens, salt, wanted)
    if found.start() and found.go_on(price):
        return found
    found.close()
    return None


def _most(ledger: Ledger, tokens: bytes) -> int:
    """Pages of a prompt that could be known: the last token is computed."""
    return (len(tokens) // 4 - 1) // ledger.page_tokens


def _pages(ledger: Ledger, tiers: Tiers, tokens: bytes, salt: int) -> Wanted | None:
    size = 4 * ledger.page_tokens
    most = _most(ledger, tokens)
    node, pages = ledger.tree.match(tokens, salt, most)
    before, first = ledger.tree.before(node), len(pages)
    ledger.tree.unlock(node)
    keys = page_keys(before, tokens[first * size : most * size], size)
    n_host, n = tiers.find(keys)
    return Wanted(first, keys[:n], first + n_host, []) if n > n_host else None


def _with_states(ledger: Ledger, tiers: Tiers, tokens: bytes, salt: int) -> Wanted | None:
    """For a model with recurrent layers: the pages up to the deepest states, and these."""
    most = _most(ledger, tokens)
    n_have = ledger.tree.peek(tokens, salt, most)
    keys = ledger.deeper(tokens, salt, n_have, most, is_disk=True)
    if not keys:
        return None
    first = min(ledger.tree.peek(tokens, salt, most, False), len(keys))
    return _unless_here(ledger, tiers, Wanted(first, keys[first:], n_have, [state_key(keys[-1])]))


def _with_windows(ledger: Ledger, tiers: Tiers, tokens: bytes, salt: int) -> Wanted | None:
    """For a model with pages of windows: pages, and what windows see from their end."""
    assert ledger.windows is not None
    most = _most(ledger, tokens)
    n_have = ledger.tree.peek(tokens, salt, most)
    keys = ledger.deeper_window(tokens, salt, n_have, most, is_disk=True)
    if not keys:
        return None
    known = ledger.tree.known_windows(tokens, salt, len(keys))
    seen = [keys[i] for i in range(max(0, len(keys) - ledger.windows.n_back), len(keys)) if i >= len(known) or not known[i]]
    return _unless_here(ledger, tiers, Wanted(len(known), keys[len(known) :], n_have, seen))


def _unless_here(ledger: Ledger, tiers: Tiers, wanted: Wanted) -> Wanted | None:
    """None where all of it is in host memory."""
    beside = ledger.beside_tiers
    assert beside is not None
    return None if all(map(tiers.is_here, wanted.keys)) and all(map(beside.is_here, wanted.beside)) else wanted
