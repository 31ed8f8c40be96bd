"""Checks stored files against published hashes, finds the parts that are wrong, and fetches only those again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from paddock_runner.errors import FileError, HubError

from paddock_manager.disk import read_json
from paddock_manager.store import hub, index, journal, record
from paddock_manager.store.download import Download, Remote
from paddock_manager.store.journal import Identity, Journal
from paddock_manager.store.part import PartHash
from paddock_manager.store.pull import Order, Shop
from paddock_manager.store.record import HIDDEN, Model, StoredFile

CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class Verdict:
    """One file. state: ok, wrong, missing, unknown (nothing was published). bad_parts: where per-part hashes are kept."""

    file: StoredFile
    state: str
    expected: str = ""
    actual: str = ""
    bad_parts: list[int] = field(default_factory=list)


def verify(model: Model, moved: Callable[[int], None]) -> list[Verdict]:
    """Read every file. Raises: FileError when one cannot be read."""
    return [_one(model, file, moved) for file in model.files]


def _one(model: Model, file: StoredFile, moved: Callable[[int], None]) -> Verdict:
    path = model.folder / file.name
    if not path.is_file():
        return Verdict(file, "missing", file.sha256 or file.git_sha1)
    part_bytes, known = part_hashes(model.folder, file)
    sha256 = hashlib.sha256()
    sha1 = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    part, index_, filled, bad = PartHash(), 0, 0, []
    try:
        with path.open("rb") as f:
            while chunk := f.read(min(CHUNK_BYTES, part_bytes - filled if known else CHUNK_BYTES)):
                sha256.update(chunk)
                if file.git_sha1 and not file.sha256:
                    sha1.update(chunk)
                moved(len(chunk))
                if known:
                    part.update(chunk)
                    filled += len(chunk)
                    if filled == part_bytes:
                        bad += [index_] if index_ >= len(known) or part.hexdigest() != known[index_] else []
                        part, index_, filled = PartHash(), index_ + 1, 0
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}", "the disk may be failing", path=str(path)) from None
    if known and filled:
        bad += [index_] if index_ >= len(known) or part.hexdigest() != known[index_] else []
    if file.sha256:
        good = sha256.hexdigest() == file.sha256
        return Verdict(file, "ok" if good else "wrong", file.sha256, sha256.hexdigest(), [] if good else bad)
    if file.git_sha1:
        return Verdict(file, "ok" if sha1.hexdigest() == file.git_sha1 else "wrong", file.git_sha1, sha1.hexdigest())
    return Verdict(file, "unknown", "", sha256.hexdigest())


def part_hashes(folder: Path, file: StoredFile) -> tuple[int, list[str]]:
    """(part size, one hash per part) as recorded at the pull, or (0, [])."""
    body = read_json(folder / HIDDEN / "hashes" / f"{file.name}.json")
    if body is None:
        return 0, []
    hashes, part_bytes = body.get("sum64"), body.get("part_bytes")
    if not isinstance(part_bytes, int) or part_bytes <= 0 or not isinstance(hashes, list):
        return 0, []
    return part_bytes, [str(h) for h in hashes]


def repair(shop: Shop, model: Model, bad: list[Verdict]) -> int:
    """Fetch wrong files again, by parts where their hashes are known. Returns the bytes fetched.

    Raises: HubError (no commit is recorded: a package, or a model added in place), and what a download raises; Locked when
    another command has changed the model since.
    """
    if model.is_added:
        raise HubError(f"{model.name} was added in place: there is nowhere to fetch it from", name=model.name)
    if not model.commit:
        return _repair_whole(shop, model, {verdict.file.name for verdict in bad})
    fetched = [0]

    def moved(n_bytes: int) -> None:
        fetched[0] += n_bytes

    with index.held(model.folder, model.ref), shop.web() as web:
        index.unchanged(shop.places, model)
        for verdict in bad:
            file = verdict.file
            part = index.part_path(model.folder, file.name)
            kept = _prepare(model, verdict, part)
            url = hub.file_url(web, model.repo, model.commit, file.name)
            remote = Remote(url, f"{model.repo}/{file.name}", file.size_bytes, file.sha256, file.git_sha1, model.commit)
            Download(web, remote, part, shop.limits, moved).run(model.folder / file.name)
            fetched[0] -= kept
            if file.is_awaited:
                model.files = [replace(f, is_awaited=False) if f.name == file.name else f for f in model.files]
                record.save(model)
    return fetched[0]


def _repair_whole(shop: Shop, model: Model, bad: set[str]) -> int:
    """A model that came from a package: its entry of the catalog says where it comes from."""
    from paddock_manager.catalog import catalog, names
    from paddock_manager.store.pull import Wish

    if catalog.find(model.alias) is None:
        raise HubError(f"it is not known where {model.name} came from", "remove it and pull it again", name=model.name)
    orders: list[Order] = shop.resolve(names.parse(model.alias), Wish())
    shop.execute(orders[0], lambda n: None, bad)
    return model.size_bytes


def _prepare(model: Model, verdict: Verdict, part: Path) -> int:
    """Turn the file into a part file whose journal lists the good parts. Returns the bytes that are kept."""
    path = model.folder / verdict.file.name
    part_bytes, known = part_hashes(model.folder, verdict.file)
    if not path.is_file() or not known or not verdict.bad_parts:
        return 0
    part.parent.mkdir(parents=True, exist_ok=True)
    identity = Identity(verdict.file.size_bytes, verdict.file.sha256, verdict.file.git_sha1, model.commit, part_bytes)
    writing = Journal(journal.journal_path(part), identity)
    os.replace(path, part)
    writing.start()
    for number in range(identity.n_parts):
        if number not in verdict.bad_parts and number < len(known):
            writing.finish(number, known[number])
    writing.close()
    return writing.done_bytes
