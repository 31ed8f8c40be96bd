"""paddock rm: remove a model, finished or not."""

from __future__ import annotations

from paddock_runner.errors import Locked

from paddock_manager import paths
from paddock_manager.catalog import names
from paddock_manager.fleet import state
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.store import index
from paddock_manager.ui import Ui, size

COMMAND = Command(
    "rm",
    "Remove a model and free its disk space.",
    (Argument("models", "models that are here", many=True, kind="model"),),
    (
        Option("--files", "delete the files of a model that was added in place, too"),
        Option("--dry-run", "say what would go"),
    ),
    "A model that was added in place is only forgotten: its files stay where they are, unless --files is given.",
)


def run(values: Values, ui: Ui) -> int:
    """Remove what was named; all names are looked up before anything goes."""
    places = paths.places()
    found = [index.find(places, names.parse(word)) for word in dict.fromkeys(values.many("models"))]
    running = state.servers(places)
    for model in found:
        server = next((s for s in running if model.name in s.asked.get("models", ()) or s.path == str(model.path)), None)
        if server is not None:
            raise Locked(f"{model.name} is being served", f"`paddock stop {server.name}` first", path=str(model.path))
        if starting := state.loading(places, model.name, model.path):
            raise Locked(f"{model.name} is being loaded by {starting}", "wait until it is ready, and `paddock stop` it", path=str(model.path))
    rows = []
    for model in found:
        kept = model.is_added and not values.flag("files")
        if values.flag("dry_run"):
            freed = 0 if kept else model.done_bytes
        else:
            freed = index.remove(places, model, values.flag("files"))
        rows.append(
            {"name": model.name, "ref": model.ref, "freed_bytes": freed, "files_kept": kept, "path": str(model.path)}
        )
    dry = values.flag("dry_run")

    def human(out: Ui) -> None:
        for r in rows:
            if r["files_kept"]:
                out.line(f"{'would forget' if dry else 'forgot'} {r['name']}; {r['path']} stays")
            else:
                out.line(f"{'would remove' if dry else 'removed'} {r['name']}, {size(int(str(r['freed_bytes'])))}")

    ui.result("rm", {"dry_run": dry, "removed": rows}, human)
    return 0
