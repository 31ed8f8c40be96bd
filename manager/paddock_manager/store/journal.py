"""The journal of an unfinished file: which parts are here, each with its hash; survives kill -9 and power loss.

Line 1 says what is being downloaded; each further line one finished part, or how many of the parts listed so far were synced. A line
counts only when its newline is there. After a power cut, parts that were not synced must be checked against their hashes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Identity:
    """What the parts are parts of. A journal of another identity is void."""

    size_bytes: int
    sha256: str
    git_sha1: str
    commit: str
    part_bytes: int

    @property
    def n_parts(self) -> int:
        """How many parts the file has (one for an empty file)."""
        return max(1, -(-self.size_bytes // self.part_bytes))

    def part(self, index: int) -> tuple[int, int]:
        """First byte and byte count of a part."""
        start = index * self.part_bytes
        return start, min(self.part_bytes, self.size_bytes - start)


@dataclass(slots=True)
class Journal:
    """Finished parts of one file."""

    path: Path
    identity: Identity
    parts: dict[int, str] = field(default_factory=dict)
    n_synced: int = 0
    _fd: int = -1

    @property
    def done_bytes(self) -> int:
        """Bytes of the finished parts."""
        return sum(self.identity.part(i)[1] for i in self.parts)

    def start(self) -> None:
        """Write a fresh first line; forget all parts."""
        self.close()
        self.parts.clear()
        self.n_synced = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._append(asdict(self.identity))
        os.fdatasync(self._fd)

    def resume(self, found: Found) -> None:
        """Go on after what was read; a torn last line is closed off."""
        self.parts, self.n_synced = found.parts, len(found.parts) - len(found.unsynced)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(self._fd, b"\n")

    def finish(self, index: int, digest: str) -> None:
        """A part's bytes were written."""
        self.parts[index] = digest
        self._append({"part": index, "sum64": digest})

    def synced(self, n_parts: int) -> None:
        """The first n_parts that were listed are on disk."""
        self.n_synced = n_parts
        self._append({"synced": n_parts})
        os.fdatasync(self._fd)

    def drop(self, indexes: list[int]) -> None:
        """Parts that must be fetched again: the journal is rewritten without them."""
        kept = {i: h for i, h in self.parts.items() if i not in set(indexes)}
        self.start()
        for index, digest in kept.items():
            self.finish(index, digest)

    def close(self) -> None:
        """Release the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, body: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(body).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Found:
    """What a journal says. unsynced: parts that a power cut may have spoilt."""

    identity: Identity
    parts: dict[int, str]
    unsynced: list[int]

    @property
    def done_bytes(self) -> int:
        """Bytes of the finished parts."""
        return sum(self.identity.part(i)[1] for i in self.parts)


def journal_path(part: Path) -> Path:
    """Beside the part file."""
    return part.with_suffix(".journal")


def load(part: Path) -> Found | None:
    """What a part file's journal says, or None when there is none that can be used."""
    try:
        lines = journal_path(part).read_bytes().split(b"\n")[:-1]
        head = json.loads(lines[0])
        identity = Identity(
            int(head["size_bytes"]), head["sha256"], head["git_sha1"], head["commit"], int(head["part_bytes"])
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    if identity.part_bytes <= 0 or identity.size_bytes < 0:
        return None
    parts: dict[int, str] = {}
    n_synced = 0
    for line in lines[1:]:
        try:
            body = json.loads(line)
            if "synced" in body:
                n_synced = int(body["synced"])
                continue
            index, digest = int(body["part"]), str(body["sum64"])
        except (ValueError, KeyError, TypeError):
            continue
        if 0 <= index < identity.n_parts:
            parts[index] = digest
    return Found(identity, parts, list(parts)[n_synced:])


def done_bytes(part: Path) -> int | None:
    """Finished bytes of a part file; None when there is no part file."""
    if not part.exists():
        return None
    found = load(part)
    return found.done_bytes if found else 0
