"""paddock.lock: what names stood for when they were resolved, so that another machine, or a later day, gets the same bytes.

One JSON file, meant to be committed beside a project: for each name the repository, its commit, and each file's size and hash.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from paddock_runner.errors import FileError, UnknownModel

from paddock_manager.catalog import names
from paddock_manager.catalog.catalog import Source
from paddock_manager.disk import LAYOUT, alone, read_json, write_json
from paddock_manager.store.hub import RemoteFile
from paddock_manager.store.pull import Order

NAME = "paddock.lock"


def remember(path: Path, text: str, order: Order) -> None:
    """Add or replace what a name stands for."""
    entry = {
        "repo": order.repo,
        "commit": order.commit,
        "quant": order.quant,
        "alias": order.alias,
        "licence": order.licence,
        "is_folder": order.is_folder,
        "source": {k: v for k, v in asdict(order.source).items() if v},
        "files": [{k: v for k, v in asdict(f).items() if v != ""} for f in order.files],
    }
    with alone(path.absolute().parent):
        body = read_json(path) or {"layout": LAYOUT, "models": {}}
        body["models"] = dict(sorted({**body["models"], text: entry}.items()))
        write_json(path, body)


def orders(path: Path, text: str, endpoint: str) -> list[tuple[str, Order]]:
    """(name, what was locked for it): of one name, or of all ("").

    Raises: UnknownModel when the file or the name is not there; FileError when the file was damaged or edited into nonsense.
    """
    body = read_json(path)
    if body is None:
        raise UnknownModel(f"there is no {path}", "`paddock pull REF --lock` writes it", path=str(path))
    try:
        locked = {name: _order(entry, endpoint) for name, entry in body["models"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(
            f"{path}: damaged ({error!r})", "`paddock pull REF --lock` writes it anew", path=str(path)
        ) from None
    if not text:
        return list(locked.items())
    if text not in locked:
        hint = "it has " + ", ".join(locked) if locked else "it is empty"
        raise UnknownModel(f"{path} does not lock {text}", hint, name=text, known=list(locked))
    return [(text, locked[text])]


def _order(entry: dict[str, Any], endpoint: str) -> Order:
    """One entry. Names and repositories are checked as if they came from the network: a lock file may, too."""
    files = [
        RemoteFile(names.safe_file(f["name"]), int(f["size_bytes"]), f.get("sha256", ""), f.get("git_sha1", ""))
        for f in entry["files"]
    ]
    if not files or not all(f.sha256 or f.git_sha1 for f in files):
        raise ValueError("a file without a hash")
    source = Source(**entry["source"])
    repo = names.check_repo(entry["repo"])
    shown = source.shown if source.package else f"{endpoint}/{repo}"
    return Order(
        repo,
        entry["commit"],
        entry["quant"],
        files,
        source,
        shown,
        entry["alias"],
        entry["licence"],
        entry["is_folder"],
    )
