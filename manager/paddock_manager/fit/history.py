"""Planned against measured: what each runner was planned to take, and what it took when it was ready. One line of JSON a start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from paddock_manager.disk import alone, write_text
from paddock_manager.fit.gpus import gpus
from paddock_manager.paths import Places

KEPT_LINES = 500
SLACK_BYTES, SLACK_SHARE = 64 << 20, 0.01
"""A measurement over the plan by more than the larger of both is a fault of the plan."""


@dataclass(frozen=True, slots=True)
class Run:
    """One start of a runner. at: seconds since 1970."""

    model: str
    device: str
    max_ctx_tokens: int
    max_batch: int
    planned_bytes: int
    measured_bytes: int
    at: float

    @property
    def is_over(self) -> bool:
        """Did it take more than was planned?"""
        return self.measured_bytes - self.planned_bytes > max(SLACK_BYTES, SLACK_SHARE * self.planned_bytes)


def measure(pid: int, device: str, root: Path = Path("/proc")) -> int:
    """Bytes that a runner's processes hold now: on its GPU by NVML, else in memory. 0 when that cannot be told.

    Memory: anonymous pages of all its processes, and once what they share.
    """
    pids = _tree(pid, root)
    if device == "cuda":
        return sum(h.used_bytes for gpu in gpus()[0] for h in gpu.holders if h.pid in pids)
    facts = [_status(root / str(p) / "status") for p in pids]
    own = sum(f.get("RssAnon", 0) for f in facts)
    shared = (max((f.get(k, 0) for f in facts), default=0) for k in ("RssFile", "RssShmem"))
    return own + sum(shared)


def note(places: Places, run: Run) -> None:
    """Add one run; the oldest lines go. Nothing is said where it cannot be written: no start fails for that."""
    path = _path(places)
    try:
        with alone(path.parent):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-KEPT_LINES + 1 :] if path.exists() else []
            write_text(path, "\n".join([*lines, json.dumps(asdict(run))]) + "\n")
    except OSError:
        return


def runs(places: Places) -> list[Run]:
    """What was noted, oldest first; lines that are damaged are passed over."""
    try:
        lines = _path(places).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    out = []
    for line in lines:
        try:
            out.append(Run(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return out


def _path(places: Places) -> Path:
    return places.home / "history.jsonl"


def _tree(pid: int, root: Path) -> set[int]:
    """A process and all that it started."""
    children: dict[int, list[int]] = {}
    for folder in root.iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, queue = set(), [pid]
    while queue:
        one = queue.pop()
        found.add(one)
        queue += [c for c in children.get(one, []) if c not in found]
    return found


def _status(path: Path) -> dict[str, int]:
    """The sizes in a status file, in bytes."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {k: int(v.split()[0]) * 1024 for k, _, v in (x.partition(":") for x in lines) if v.strip().endswith("kB")}
