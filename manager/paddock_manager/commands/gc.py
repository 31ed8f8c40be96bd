"""paddock gc: remove what interrupted pulls and crashed runners left behind."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from paddock_runner.errors import FileError, Locked

from paddock_manager import paths
from paddock_manager.disk import Lease, is_held, is_open, is_same_process, read_json
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


def run(values: Values, ui: Ui) -> int:
    """Find, then remove."""
    places = paths.places()
    before = time.time() - 86400 * (values.number("older_than") or 0.0)
    rows: list[dict[str, Any]] = []
    for path, what in [*scratch(places), *(partials(places) if values.flag("partials") else [])]:
        try:
            if path.stat().st_mtime > before:
                continue
            n_bytes = sum(p.lstat().st_blocks * 512 for p in ([path] if path.is_file() else path.rglob("*")))
            if not values.flag("dry_run"):
                remove(path)
        except (FileNotFoundError, Locked):  # somebody else was quicker, or works on it by now
            continue
        rows.append({"path": str(path), "what": what, "bytes": n_bytes})
    if values.flag("partials") and not values.flag("dry_run"):
        forget_empty(places)
    dry, total = values.flag("dry_run"), sum(r["bytes"] for r in rows)

    def human(out: Ui) -> None:
        for r in rows:
            out.line(f"{'would remove' if dry else 'removed'} {r['what']}, {size(r['bytes'])}: {r['path']}")
        out.say(f"{size(total)} {'could be freed' if dry else 'freed'}" if rows else "nothing to remove")

    ui.result("gc", {"dry_run": dry, "removed": rows, "freed_bytes": total}, human)
    return 0


def scratch(places: paths.Places) -> list[tuple[Path, str]]:
    """What nobody can use any more."""
    wheels = [p for root in places.roots for p in root.glob(f"*/*/{HIDDEN}/wheel-*")]
    found = [(p, "scratch of a package download") for p in wheels if not is_held(p.parent / index.LEASE)]
    found += [(p, "ready file of a runner that is gone") for p in places.fleet.glob("ready-*.json") if not _is_awaited(p)]
    found += [(p, "lock of a start that is over") for p in places.fleet.glob("*.start") if not is_open(p)]
    used = {s.log for s in state.servers(places)}
    found += [
        (p, "log") for p in places.logs.glob("*.log*") if str(p) not in used and str(p).removesuffix(".1") not in used and not is_open(p)
    ]
    return sorted(found)


def partials(places: paths.Places) -> list[tuple[Path, str]]:
    """Unfinished files, with their journals; those of a pull that runs are left alone."""
    found = []
    for part in sorted(p for root in places.roots for p in root.glob(f"*/*/{HIDDEN}/{index.PARTS}/**/*")):
        folder = Path(str(part).partition(f"/{HIDDEN}/")[0])
        if part.is_file() and not is_held(folder / HIDDEN / index.LEASE):
            found.append((part, "unfinished download" if part.suffix == ".part" else "its journal"))
    return found


def _is_awaited(ready: Path) -> bool:
    """A ready file of a runner that lives is about to be read by who started it."""
    try:
        told = read_json(ready) or {}
    except FileError:
        return False
    pid = told.get("pid")
    return isinstance(pid, int) and is_same_process(pid, 0.0)


def remove(path: Path) -> None:
    """A file or a folder; those of a model while nobody pulls it. Raises: Locked."""
    import shutil

    above, inside, _ = str(path).partition(f"/{HIDDEN}/")
    with Lease(Path(above) / HIDDEN / index.LEASE) if inside else nullcontext():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def forget_empty(places: paths.Places) -> None:
    """Records of models of which nothing is left."""
    for model in index.models(places, []):
        if not model.is_added and model.state in ("partial", "missing") and not model.done_bytes:
            with suppress(Locked):  # it is being pulled
                index.remove(places, model, False)
