"""The journal of an unfinished file: which parts are on disk, each with its hash; survives kill -9 and power loss.

Line 1 says what is being downloaded; each further line one finished part. A line counts only when its newline is there, and it
is written after the part's bytes were synced.
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
    _fd: int = -1

    @property
    def done_bytes(self) -> int:
        """Bytes of the finished parts."""
        return sum(self.identity.part(i)[1] for i in self.parts)

    def start(self) -> None:
        """Write a fresh first line; forget all parts."""
        self.close()
        self.parts.clear()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._append(asdict(self.identity))

    def resume(self) -> None:
        """Open for appending after what was read; a torn last line is closed off."""
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(self._fd, b"\n")

    def finish(self, index: int, digest: str) -> None:
        """A part's bytes are on disk and synced."""
        self.parts[index] = digest
        self._append({"part": index, "crc32": digest})

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
        os.fdatasync(self._fd)


def journal_path(part: Path) -> Path:
    """Beside the part file."""
    return part.with_suffix(".journal")


def load(part: Path) -> tuple[Identity, dict[int, str]] | None:
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
    for line in lines[1:]:
        try:
            body = json.loads(line)
            index, digest = int(body["part"]), str(body["crc32"])
        except (ValueError, KeyError, TypeError):
            continue
        if 0 <= index < identity.n_parts:
            parts[index] = digest
    return identity, parts


def done_bytes(part: Path) -> int | None:
    """Finished bytes of a part file; None when there is no part file."""
    if not part.exists():
        return None
    found = load(part)
    return sum(found[0].part(i)[1] for i in found[1]) if found else 0
