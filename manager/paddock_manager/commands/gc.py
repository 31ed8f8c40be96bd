"""paddock gc: remove what interrupted pulls and crashed runners left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddock_runner.errors import FileError, Locked

from paddock_manager import paths
from paddock_manager.disk import Lease, is_held, is_open, is_same_process, read_json, remove_unlocked
from paddock_manager.fleet import state
from paddock_manager.options import Command, Option, Values
from paddock_manager.store import index
from paddock_manager.store.record import HIDDEN
from paddock_manager.ui import Ui, size

COMMAND = Command(
    "gc",
    "Remove unfinished downloads, scratch files, and logs of servers that are gone.",
    (),
    (
        Option("--partials", "also unfinished downloads that `paddock pull` could continue"),
        Option("--older-than", "only what was not touched for so many days (default 0)", "float", value="DAYS", least=0),
        Option("--dry-run", "say what would go"),
    ),
    "Finished models are never touched; `paddock rm` removes those.",
)


@dataclass(frozen=True, slots=True)
class Leftover:
    """What can go. hidden: the record folder of the model whose it is, None for what is no model's."""

    path: Path
    what: str
    hidden: Path | None = None


def run(values: Values, ui: Ui) -> int:
    """Find, then remove."""
    places = paths.places()
    before = time.time() - 86400 * (values.number("older_than") or 0.0)
    rows: list[dict[str, Any]] = []
    for found in [*scratch(places), *(partials(places) if values.flag("partials") else [])]:
        path = found.path
        try:
            if path.stat().st_mtime > before:
                continue
            n_bytes = sum(p.lstat().st_blocks * 512 for p in ([path] if path.is_file() else path.rglob("*")))
            if not values.flag("dry_run"):
                remove(found)
        except (FileNotFoundError, Locked):  # somebody else was quicker, or works on it by now
            continue
        rows.append({"path": str(path), "what": found.what, "bytes": n_bytes})
    if values.flag("partials") and not values.flag("dry_run"):
        forget_empty(places)
    dry, total = values.flag("dry_run"), sum(r["bytes"] for r in rows)

    def human(out: Ui) -> None:
        for r in rows:
            out.line(f"{'would remove' if dry else 'removed'} {r['what']}, {size(r['bytes'])}: {r['path']}")
        out.say(f"{size(total)} {'could be freed' if dry else 'freed'}" if rows else "nothing to remove")

    ui.result("gc", {"dry_run": dry, "removed": rows, "freed_bytes": total}, human)
    return 0


def scratch(places: paths.Places) -> list[Leftover]:
    """What nobody can use any more."""
    wheels = [p for hidden in _hidden(places) for p in hidden.glob("wheel-*")]
    found = [Leftover(p, "scratch of a package download", p.parent) for p in wheels if not is_held(p.parent / index.LEASE)]
    found += [Leftover(p, "ready file of a runner that is gone") for p in places.fleet.glob("ready-*.json") if not _is_awaited(p)]
    found += [Leftover(p, "command line of a start that is over") for p in places.fleet.glob("ready-*.spec") if not _is_starting(p)]
    found += [Leftover(p, "lock of a start that is over") for p in places.fleet.glob("*.start") if not is_open(p)]
    used = {s.log for s in state.servers(places)}
    found += [
        Leftover(p, "log")
        for p in places.logs.glob("*.log*")
        if str(p) not in used and str(p).removesuffix(".1") not in used and not is_open(p)
    ]
    return sorted(found, key=lambda f: f.path)


def partials(places: paths.Places) -> list[Leftover]:
    """Unfinished files, with their journals; those of a pull that runs are left alone."""
    found = []
    for hidden in _hidden(places):
        parts = [p for p in sorted((hidden / index.PARTS).rglob("*")) if p.is_file()]
        if parts and not is_held(hidden / index.LEASE):
            found += [Leftover(p, "unfinished download" if p.suffix == ".part" else "its journal", hidden) for p in parts]
    return found


def _hidden(places: paths.Places) -> list[Path]:
    """The record folder of every model."""
    return sorted(p for root in places.roots for p in root.glob(f"*/*/{HIDDEN}"))


def _is_awaited(ready: Path) -> bool:
    """A ready file of a runner that lives is about to be read by who started it."""
    return _lives(ready, lambda told: told.get("pid"))


def _is_starting(spec: Path) -> bool:
    """What a watch is to start is read by it at once, if who started it lives."""
    return _lives(spec, lambda told: (told.get("starter") or [0])[0])


def _lives(path: Path, number: Callable[[dict[str, Any]], object]) -> bool:
    try:
        pid = number(read_json(path) or {})
    except FileError:
        return False
    return isinstance(pid, int) and is_same_process(pid, 0.0)


def remove(found: Leftover) -> None:
    """A file or a folder: of a model while nobody pulls it, of the fleet while nobody locks it. Raises: Locked, FileNotFoundError."""
    import shutil

    if found.hidden is None:
        remove_unlocked(found.path)
        return
    with Lease(found.hidden / index.LEASE):
        if found.path.is_dir():
            shutil.rmtree(found.path, ignore_errors=True)
        else:
            found.path.unlink(missing_ok=True)


def forget_empty(places: paths.Places) -> None:
    """Records of models of which nothing is left."""
    for model in index.models(places, []):
        if index.is_empty(model):
            with suppress(Locked):  # it is being pulled
                index.forget_empty(places, model)
