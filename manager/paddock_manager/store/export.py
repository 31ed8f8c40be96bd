"""Takes a model's files out of the store under their own names: cloned where the file system can, else copied; or hard links."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from paddock_runner.errors import FileError, Locked, UsageError

from paddock_manager.disk import alone, is_at, lock, write_text
from paddock_manager.store.part import CHUNK_BYTES, disk_errors, sync_folder
from paddock_manager.store.record import Model, StoredFile

FICLONE = 0x40049409
"""Source: linux/fs.h, _IOW(0x94, 9, int)."""
SUMS = "SHA256SUMS"


def export(model: Model, folder: Path, link: bool, moved: Callable[[int], None]) -> tuple[str, list[tuple[Path, str]]]:
    """Put the files, and SHA256SUMS where hashes are known, into a folder. Returns (how, [(path, sha256)]).

    Raises: UsageError when a file is there already, or links cannot reach; FileError when bytes on disk are not the recorded ones.
    """
    targets = [(f, folder / f.name) for f in model.files]
    for _, target in targets:
        if target.exists():
            raise UsageError(f"{target} is there already", "name another folder, or remove it", path=str(target))
    ways, out = set(), []
    for file, target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        if link:
            _link(model.folder / file.name, target)
            way, sha256 = "links", file.sha256
            moved(file.size_bytes)
        else:
            way, sha256 = _copy(model.folder / file.name, file, target, moved)
        ways.add(way)
        out.append((target, sha256))
    sync_folder(folder)
    _note(folder, {str(p.relative_to(folder)): sha for p, sha in out if sha})
    return "copies" if "copies" in ways else ways.pop(), out


def _note(folder: Path, fresh: dict[str, str]) -> None:
    """Add sums to the folder's, beside those of models that were exported there before."""
    with alone(folder):
        try:
            lines = (folder / SUMS).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        except FileNotFoundError:
            lines = []
        kept = [line for line in lines if line[66:] not in fresh]
        if fresh:
            write_text(folder / SUMS, "".join(f"{line}\n" for line in [*kept, *(f"{sha}  {name}" for name, sha in fresh.items())]))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise UsageError(
                f"{target.parent} cannot hold links to {source}: {error.strerror}",
                "export without --link",
                path=str(target),
            ) from None
        raise


def _copy(source: Path, file: StoredFile, target: Path, moved: Callable[[int], None]) -> tuple[str, str]:
    """Clone or copy one file, and hash what was read. Nothing wrong gets the final name; what a killed export left is written over.

    Raises: Locked while another export writes it.
    """
    fresh = target.with_name(f".{target.name}.part")
    with source.open("rb") as reader, os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as writer:
        if lock(writer.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB) is False or not is_at(writer.fileno(), fresh):
            raise Locked(f"{target} is being written by another export", "wait for it, or name another folder", path=str(target))
        writer.truncate(0)
        try:
            return _fill(reader, writer, file, target, moved)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


def _fill(reader: BinaryIO, writer: BinaryIO, file: StoredFile, target: Path, moved: Callable[[int], None]) -> tuple[str, str]:
    digest, way = hashlib.sha256(), "copies"
    fresh = target.with_name(f".{target.name}.part")
    with disk_errors(fresh, file.size_bytes):
        try:
            fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
            way = "clones"
        except OSError:
            pass
        while chunk := reader.read(CHUNK_BYTES):
            digest.update(chunk)
            if way == "copies":
                writer.write(chunk)
            moved(len(chunk))
        writer.flush()
        os.fsync(writer.fileno())
    if file.sha256 and digest.hexdigest() != file.sha256:
        raise FileError(
            f"{reader.name}: the bytes on disk are not the published ones",
            "`paddock verify --repair` fetches what is wrong again",
            expected=file.sha256,
            actual=digest.hexdigest(),
        )
    os.replace(fresh, target)
    return way, digest.hexdigest()
