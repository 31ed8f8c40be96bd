"""What was answered before and may be asked for again: a bounded store in memory, least recently used first to go."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_ENTRIES = 1024
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored answer. client: whose it is. items: the conversation up to and with it. n_bytes: what it alone adds."""

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
        if entry.n_bytes > self._max_bytes:
            return
        self._entries[name] = entry
        self.used_bytes += entry.n_bytes
        while len(self._entries) > self._max_entries or self.used_bytes > self._max_bytes:
            _, gone = self._entries.popitem(last=False)
            self.used_bytes -= gone.n_bytes

    def drop(self, name: str) -> None:
        """Forgets an entry, if it is here."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.used_bytes -= entry.n_bytes
