"""What is here: every model in the readable tree and every one added in place; found by reading small records only.

Never opens a checkpoint, so listing costs a few file reads per model.
"""

from __future__ import annotations

import functools
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from paddock_runner.errors import AmbiguousModel, FileError, Locked, PaddockError, UnknownModel, UsageError

from paddock_manager.catalog import catalog, names
from paddock_manager.disk import LAYOUT, Lease, read_json, write_json
from paddock_manager.paths import Places
from paddock_manager.store import record
from paddock_manager.store.record import HIDDEN, Model, StoredFile

PARTS, LEASE = "parts", "lease"
Found = TypeVar("Found")


def models(places: Places, problems: list[PaddockError] | None = None) -> list[Model]:
    """All models, sorted by name. A damaged record is put into `problems` and the rest goes on."""
    found: list[Model] = []
    for folder in _folders(places.models, problems):
        found += _guarded(functools.partial(in_folder, places, folder), problems)
    for root in places.more_roots:
        found += _in_root(places, root, problems)
    if places.added.is_dir():
        for path in sorted(places.added.glob("*.json")):
            found += _guarded(functools.partial(_added, path), problems)
    return sorted(found, key=lambda m: m.name.lower())


def _in_root(places: Places, root: Path, problems: list[PaddockError] | None) -> list[Model]:
    """The models of a further root; as they were when it was last there, and "offline", while it is away."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", str(root))[-80:] + f"-{zlib.crc32(str(root).encode()):08x}.json"
    path = places.remembered / name
    if not root.is_dir():
        return _guarded(functools.partial(_remembered, path), problems)
    found: list[Model] = []
    for folder in _folders(root, problems):
        found += _guarded(functools.partial(in_folder, places, folder), problems)
    rows = [m.to_record() | {"repo": m.repo, "quant": m.quant, "folder": str(m.folder)} for m in found]
    body = {"layout": LAYOUT, "root": str(root), "models": rows}
    with suppress(OSError):  # a store that is closed to us is listed all the same
        if not _is_told(path, body):
            write_json(path, body)
    return found


def _is_told(path: Path, body: dict[str, object]) -> bool:
    try:
        return read_json(path) == body
    except FileError:
        return False


def _remembered(path: Path) -> list[Model]:
    """The models of a root that is away."""
    body = read_json(path) or {"models": []}
    try:
        found = [record.from_record(m["repo"], m["quant"], Path(m["folder"]), m) for m in body["models"]]
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: damaged record ({error})", "remove it", path=str(path)) from None
    for model in found:
        model.state = "offline"
    return found


def _guarded(read: Callable[[], list[Found]], problems: list[PaddockError] | None) -> list[Found]:
    try:
        return read()
    except PaddockError as error:
        if problems is None:
            raise
        problems.append(error)
        return []


def _folders(root: Path, problems: list[PaddockError] | None) -> Iterator[Path]:
    """Every ORG/REPO below the tree."""
    for org in _guarded(functools.partial(_below, root), problems):
        yield from _guarded(functools.partial(_below, org), problems)


def _below(folder: Path) -> list[Path]:
    """The folders in a folder, sorted; none where it is not there. Raises: FileError when it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            found = [(Path(e.path), _stat(e)) for e in entries]
            return sorted(path for path, s in found if s is not None and stat.S_ISDIR(s.st_mode))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FileError(f"{folder} cannot be read: {error.strerror}", f"chown or chmod {folder}", path=str(folder)) from None


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What an entry is; None for a link to nothing, to itself or to what is closed to us."""
    try:
        return entry.stat()
    except OSError:
        return None


def in_folder(places: Places, folder: Path) -> list[Model]:
    """The variants of one repository folder: the recorded ones, and GGUF files that somebody put there by hand."""
    repo = f"{folder.parent.name}/{folder.name}"
    body = read_json(record.record_path(folder))
    out: list[Model] = []
    if body is not None:
        try:
            out = [record.from_record(repo, quant, folder, v) for quant, v in body["variants"].items()]
            for file in (f for m in out for f in m.files):
                names.safe_file(file.name)  # disks come from elsewhere, and `paddock rm` deletes what is named here
        except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
            path = record.record_path(folder)
            raise FileError(
                f"{path}: damaged record ({error})", "remove it; `paddock pull` writes it anew", path=str(path)
            ) from None
    known = {f.name for m in out for f in m.files}
    for model in out:
        _set_state(model)
    if body is None:
        out += [m for m in _by_hand(repo, folder) if m.files[0].name not in known]
    return out


def _by_hand(repo: str, folder: Path) -> list[Model]:
    """Checkpoints without a record."""
    try:
        with os.scandir(folder) as entries:
            stats = [(e.name, _stat(e)) for e in entries]
    except FileNotFoundError:  # removed while we looked
        return []
    files = sorted((name, s.st_size, s.st_mtime) for name, s in stats if s is not None and stat.S_ISREG(s.st_mode))
    if any(name == "config.json" for name, _, _ in files) and any(
        name.endswith(".safetensors") for name, _, _ in files
    ):
        kept = [StoredFile(name, size) for name, size, _ in files]
        return [
            Model(repo, "", folder, kept, is_folder=True, state="unverified", pulled_at=max(t for _, _, t in files))
        ]
    from paddock_manager.store import choose

    out = []
    for quant, group in choose.gguf_variants([(n, s) for n, s, _ in files]).items():
        out.append(Model(repo, quant, folder, [StoredFile(n, s) for n, s in group], state="unverified"))
        out[-1].pulled_at = max(t for n, _, t in files if n in {g[0] for g in group})
    return out


def _added(path: Path) -> list[Model]:
    """The record of a model used in place."""
    body = read_json(path) or {}
    try:
        model = record.from_record(path.stem, body.get("quant", ""), Path(body["folder"]), body, is_added=True)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"{path}: damaged record ({error})", "remove it and add the model again", path=str(path)
        ) from None
    _set_state(model)
    return [model]


def _set_state(model: Model) -> None:
    """ok, partial (with done_bytes), offline (its folder is away), missing or changed, from file sizes alone; damaged, as the last verify found."""
    if not model.folder.is_dir():
        model.state = "offline"
        return
    done, states = 0, set()
    for file in model.files:
        try:
            facts = os.stat(model.folder / file.name) if not file.is_awaited else None
        except OSError:
            facts = None
        if facts is None:
            part = part_path(model.folder, file.name)
            have = part_done(part)
            states.add("missing" if have is None else "partial")
            done += have or 0
            continue
        done += facts.st_size
        states.add("ok" if facts.st_size == file.size_bytes else "changed")
    model.done_bytes = done
    if "partial" in states or ("missing" in states and not model.is_added and not model.headline):
        model.state = "partial"
    else:
        model.state = next((s for s in ("missing", "changed") if s in states), "damaged" if model.is_damaged else "ok")


def part_path(folder: Path, name: str) -> Path:
    """Where an unfinished file grows."""
    return folder / HIDDEN / PARTS / f"{name}.part"


def part_done(part: Path) -> int | None:
    """Finished bytes of a part file, as its journal says; None when there is none."""
    from paddock_manager.store import journal

    return journal.done_bytes(part)


def find(places: Places, ref: names.Ref) -> Model:
    """The one model of that name.

    Raises: UnknownModel with names that look alike; AmbiguousModel with the choices; FileError when it is its record that is damaged.
    """
    hits = matches(places, ref)
    if len(hits) == 1:
        return hits[0]
    if hits:
        choices = [m.ref for m in hits]
        raise AmbiguousModel(
            f"{ref.text!r} is the name of {len(hits)} models",
            "say which: " + ", ".join(choices),
            name=ref.text,
            choices=choices,
        )
    raise unknown(places, ref)


def unknown(places: Places, ref: names.Ref) -> PaddockError:
    """The error for a name that nothing has: what is wrong with the record of that name, where there is one."""
    problems: list[PaddockError] = []
    everything = models(places, problems)
    if ref.short:
        record_path = str(places.added / f"{ref.short.lower()}.json")
        damaged = next((p for p in problems if p.facts.get("path") == record_path), None)
        if damaged is not None:
            return damaged
    return UnknownModel(f"no model {ref.text!r} is here", _hint(ref, everything), name=ref.text, known=[m.name for m in everything])


def _hint(ref: names.Ref, everything: list[Model]) -> str:
    import difflib

    spelt = {m.name.lower(): m.name for m in everything}
    near = difflib.get_close_matches(ref.text.lower(), spelt, 1, 0.6)
    if near:
        return f"did you mean {spelt[near[0]]}?"
    if ref.repo or (ref.short and catalog.find(ref.short)):
        return f"`paddock pull {ref.text}` fetches it"
    alike = catalog.near(ref.short) if ref.short else []
    return f"the catalog has {', '.join(alike)}" if alike else "`paddock ls` lists what is here"


def matches(places: Places, ref: names.Ref) -> list[Model]:
    """All models that a name could mean."""
    if ref.repo:
        folders = [root.joinpath(*ref.repo.split("/")) for root in places.roots]
        pool = [m for folder in folders if folder.is_dir() for m in in_folder(places, folder)]
        if not pool:
            pool = [m for m in models(places, []) if m.repo.lower() == ref.repo.lower()]
    elif ref.short:
        everything = models(places, [])
        short = ref.short.lower()
        pool = [m for m in everything if short == m.alias.lower() or (m.is_added and m.repo.lower() == short)]
        pool = pool or [m for m in everything if m.repo.split("/")[-1].lower() == short]
    else:
        return []
    if ref.quant:
        pool = [m for m in pool if m.quant.lower() == ref.quant.lower()]
    if ref.file:
        pool = [m for m in pool if any(f.name == ref.file for f in m.files)]
    if ref.rev:
        pool = [m for m in pool if m.commit.startswith(ref.rev)]
    return pool


def add(places: Places, model: Model) -> None:
    """Remember a model where it lies."""
    body = model.to_record() | {"layout": LAYOUT, "folder": str(model.folder), "quant": model.quant}
    write_json(places.added / f"{model.repo}.json", body)


def mark(places: Places, model: Model, is_damaged: bool) -> None:
    """Keep in a model's record whether its bytes were found to be wrong."""
    if model.is_damaged == is_damaged or model.state in ("unverified", "partial"):
        return
    if model.is_added:
        model.is_damaged = is_damaged
        add(places, model)
        return
    with held(model.folder, model.ref):
        now = unchanged(places, model)
        now.is_damaged = is_damaged
        record.save(now)


def unchanged(places: Places, model: Model) -> Model:
    """A model as it is recorded now. The caller holds the lease. Raises: Locked when others have replaced or removed it since it was read."""
    now = next((m for m in in_folder(places, model.folder) if m.quant == model.quant), None)
    if now is None or (now.files, now.commit) != (model.files, model.commit):
        raise Locked(f"{model.name} was changed by another command meanwhile", "`paddock verify` reads it again", path=str(model.path))
    return now


def is_empty(model: Model) -> bool:
    """Is nothing of a pulled model here but its record?"""
    return not model.is_added and model.state in ("partial", "missing") and not model.done_bytes


def forget_empty(places: Places, model: Model) -> None:
    """Forget a model if nothing of it is here, also now that nobody pulls it. Raises: Locked."""
    with held(model.folder, model.ref):
        if any(m.quant == model.quant and is_empty(m) for m in in_folder(places, model.folder)):
            record.forget(model)


def remove(places: Places, model: Model, with_files: bool) -> int:
    """Forget a model; delete its files unless it was added in place and with_files is not set. Returns the bytes freed.

    Raises: Locked when a pull holds it.
    """
    freed = 0
    if model.is_added:
        (places.added / f"{model.repo}.json").unlink(missing_ok=True)
        return _delete(model, set()) if with_files else 0
    with held(model.folder, model.ref):
        shared = {f.name for m in in_folder(places, model.folder) if m.quant != model.quant for f in m.files}
        freed = _delete(model, shared)
        record.forget(model)
    return freed


@contextmanager
def held(folder: Path, what: str = "") -> Iterator[None]:
    """A model's folder for us alone; one that holds nothing is gone when it is given back. Raises: Locked."""
    try:
        with Lease(folder / HIDDEN / LEASE, what):
            try:
                yield
            finally:
                _empty(folder)
    finally:
        for path in (folder / HIDDEN, folder, folder.parent):
            with suppress(OSError):  # it holds something: another's lease may be there by now
                path.rmdir()


def _empty(folder: Path) -> None:
    """Remove what was kept beside a model's files when none are left. The caller holds the lease."""
    files = [p for p in folder.rglob("*") if p.is_file() and HIDDEN not in p.parts]
    if files or record.record_path(folder).exists():
        return
    import shutil

    for path in (folder / HIDDEN).iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LEASE:
            path.unlink(missing_ok=True)
    for path in sorted((p for p in folder.rglob("*") if p.is_dir() and HIDDEN not in p.parts), reverse=True):
        with suppress(OSError):
            path.rmdir()


def _delete(model: Model, keep: set[str]) -> int:
    """Delete a model's files, parts and hashes, except those that another variant needs."""
    freed = 0
    for file in model.files:
        if file.name in keep:
            continue
        path, part = model.folder / file.name, part_path(model.folder, file.name)
        hashes = model.folder / HIDDEN / "hashes" / f"{file.name}.json"
        for victim in (path, part, part.with_suffix(".journal"), hashes):
            try:
                freed += victim.stat().st_blocks * 512
                victim.unlink()
            except FileNotFoundError:
                continue
    return freed


def now() -> float:
    """The time that goes into records."""
    return round(time.time(), 3)
