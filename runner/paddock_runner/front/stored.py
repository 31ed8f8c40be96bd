"""What was answered before and may be asked for again: a bounded store in memory, least recently used first to go.

The entries of one conversation hold the same items: these are counted once, and as long as one entry holds them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from .http import ENCODER

MAX_ENTRIES = 1024
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored answer. client: whose it is. items: the conversation up to and with it. n_bytes: of what is not items."""

    client: int
    answer: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    n_input: int
    n_bytes: int


class Stored:
    """Answers by id. One event loop, so no locks."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._items: dict[int, tuple[int, int]] = {}
        """By identity: entries that hold an item, and its bytes."""
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str, client: int) -> Entry | None:
        """The entry, if it is here and this client's own."""
        entry = self._entries.get(name)
        if entry is None or entry.client != client:
            return None
        self._entries.move_to_end(name)
        return entry

    def item(self, name: str, client: int) -> dict[str, Any] | None:
        """An output item of this client's stored answers, by its id."""
        for entry in reversed(self._entries.values()):
            if entry.client == client:
                for item in entry.answer["output"]:
                    if item["id"] == name:
                        found: dict[str, Any] = item
                        return found
        return None

    def put(self, name: str, entry: Entry) -> None:
        """Keeps an entry; older ones go when there are too many. One that alone is over the limit is not kept."""
        self.drop(name)
        self._entries[name] = entry
        self.used_bytes += entry.n_bytes
        n_whole = entry.n_bytes
        for item in entry.items:
            n_held, n_bytes = self._items.get(id(item)) or (0, len(ENCODER.encode(item)))
            self._items[id(item)] = n_held + 1, n_bytes
            self.used_bytes += n_bytes * (not n_held)
            n_whole += n_bytes
        if n_whole > self._max_bytes:
            self.drop(name)
        while len(self._entries) > self._max_entries or self.used_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, name: str) -> None:
        """Forgets an entry, if it is here."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self.used_bytes -= entry.n_bytes
        for item in entry.items:
            n_held, n_bytes = self._items.pop(id(item))
            if n_held > 1:
                self._items[id(item)] = n_held - 1, n_bytes
            else:
                self.used_bytes -= n_bytes
