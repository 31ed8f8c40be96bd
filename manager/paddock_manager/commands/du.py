"""paddock du: what takes how much disk."""

from __future__ import annotations

import os
from pathlib import Path

from paddock_manager import paths
from paddock_manager.options import Command, Values
from paddock_manager.store import index
from paddock_manager.ui import Ui, size

COMMAND = Command(
    "du",
    "Say what takes how much disk.",
    (),
    (),
    "Models that were added in place are listed and not counted: their files are yours.",
)


def run(values: Values, ui: Ui) -> int:
    """Sum it up."""
    places = paths.places()
    rows = [
        {"name": m.name, "bytes": m.done_bytes, "state": m.state, "in_place": m.is_added}
        for m in index.models(places, [])
    ]
    rows.sort(key=lambda r: -int(str(r["bytes"])))
    held = _held(places.home)
    facts = os.statvfs(next(p for p in (places.home, *places.home.parents) if p.exists()))
    free = facts.f_bavail * facts.f_frsize

    def human(out: Ui) -> None:
        out.table(
            ("NAME", "ON DISK", "STATE"),
            [
                (str(r["name"]), size(int(str(r["bytes"]))), f"{r['state']}{', in place' if r['in_place'] else ''}")
                for r in rows
            ],
            right=(1,),
        )
        out.line(f"{places.home} holds {size(held)} in all; {size(free)} free")

    ui.result("du", {"models": rows, "home": str(places.home), "home_bytes": held, "free_bytes": free}, human)
    return 0


def _held(root: Path) -> int:
    """Blocks on disk of everything below a folder; links are not followed."""
    total, queue = 0, [str(root)]
    while queue:
        try:
            with os.scandir(queue.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return total
