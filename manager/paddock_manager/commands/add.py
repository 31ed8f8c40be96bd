"""paddock add: use a checkpoint where it lies."""

from __future__ import annotations

import re
from pathlib import Path

from paddock_runner.errors import UsageError
from paddock_runner.files.checkpoint import open_checkpoint, require_model

from paddock_manager import paths
from paddock_manager.catalog import catalog
from paddock_manager.commands import target
from paddock_manager.disk import Lease
from paddock_manager.fit import fit
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.store import choose, headline, index
from paddock_manager.store.record import Model, StoredFile
from paddock_manager.ui import Ui, size

COMMAND = Command(
    "add",
    "Use a model file or folder where it lies: nothing is copied, moved or changed.",
    (Argument("path", "a GGUF file, a .safetensors file or a Hugging Face folder", kind="path"),),
    (Option("--name", "the name to give it (default: from the file name)", "text"),),
    "`paddock rm` forgets it again and leaves the files alone.",
    ("paddock add ~/models/model.Q4_K_M.gguf --name mine",),
)


def run(values: Values, ui: Ui) -> int:
    """Read its header, remember it."""
    places = paths.places()
    if not values.text("path"):
        raise UsageError("'' is no path", "a dot is the folder that you are in")
    found = target.of_path(paths.expanded(values.text("path")))
    given = values.found.get("name")
    name = str(given).lower() if given is not None else re.sub(r"[^A-Za-z0-9._-]+", "-", found.name).strip("-.").lower()
    check_name(places, name, given is not None)
    checkpoint = open_checkpoint(found.path)
    require_model(checkpoint)
    is_folder = found.path.is_dir() and checkpoint.path.is_dir()
    folder = found.path if is_folder else checkpoint.path.absolute().parent
    kept = sorted({*checkpoint.paths, *checkpoint.files.values()}) if is_folder else checkpoint.paths
    files = [StoredFile(str(Path(p).absolute().relative_to(folder)), Path(p).stat().st_size) for p in kept]
    if not is_folder:
        files.sort(key=lambda f: f.name)
    head = headline.of(checkpoint)
    quant = choose.quant_of(files[0].name) if checkpoint.kind == "gguf" else ""
    model = Model(
        name,
        quant,
        folder,
        files,
        source=f"added from {found.path}",
        licence=headline.licence(checkpoint) or "",
        pulled_at=index.now(),
        is_folder=is_folder,
        is_added=True,
        headline=head,
    )
    with Lease(places.added / f".{name}.lease", name):
        check_name(places, name, given is not None)  # again: reading took its time
        index.add(places, model)
    refused = fit.refusal(found.path)
    for warning in [*checkpoint.warnings[:8], *([f"Paddock cannot run it: {refused}"] if refused else [])]:
        ui.warn(warning)
    model.done_bytes = model.size_bytes
    ui.result(
        "add",
        {"model": model.facts()},
        lambda u: u.line(f"{name} is {model.path}, {size(model.size_bytes)}, used in place"),
    )
    return 0


def check_name(places: paths.Places, name: str, was_given: bool) -> None:
    """A name that nothing else has.

    Raises: UsageError.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,95}", name):
        raise UsageError(
            f"{name!r} cannot be a name", "letters, digits, dots, dashes and underscores; `--name` gives one"
        )
    hint = "take another --name" if was_given else "`--name` gives it another one"
    if catalog.find(name) is not None:
        raise UsageError(f"{name} is a name of the catalog", hint, name=name)
    if (places.added / f"{name}.json").exists():
        raise UsageError(f"there is a model {name} already", f"`paddock rm {name}` forgets it, or {hint}", name=name)
