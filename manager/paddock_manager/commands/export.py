"""paddock export: a model's files, in a folder of yours."""

from __future__ import annotations

from paddock_runner.errors import UsageError

from paddock_manager import paths
from paddock_manager.catalog import names
from paddock_manager.commands import target
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.store import export, index
from paddock_manager.ui import Ui, size

COMMAND = Command(
    "export",
    "Copy a model's files out of the store, under their own names and with their hashes.",
    (
        Argument("model", "a model that is here", kind="model"),
        Argument("folder", "where to put them; made when it is not there", kind="path"),
    ),
    (Option("--link", "hard links instead of copies: no bytes move, but a change shows on both sides"),),
    "Every byte that is copied is compared with the published hash. File systems that can clone files take no room for it.",
    ("paddock export smollm2-135m /media/stick",),
)


def run(values: Values, ui: Ui) -> int:
    """Copy, say where."""
    model = index.find(paths.places(), names.parse(values.text("model")))
    target.of_model(model)
    if not values.text("folder"):
        raise UsageError("'' is no folder", "a dot is the one you are in")
    folder = paths.expanded(values.text("folder")).absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder", "name one; it is made when it is not there", path=str(folder))
    with ui.progress(model.name, model.size_bytes) as bar:
        how, found = export.export(model, folder, values.flag("link"), bar.move_by)
    rows = [
        {"name": f.name, "path": str(path), "size_bytes": f.size_bytes, "sha256": sha256}
        for f, (path, sha256) in zip(model.files, found, strict=True)
    ]
    body = {"name": model.name, "ref": model.ref, "folder": str(folder), "how": how, "files": rows}
    ui.result(
        "export",
        body,
        lambda u: u.line(f"{model.name}: {len(rows)} file(s), {size(model.size_bytes)}, as {how} in {folder}"),
    )
    return 0
