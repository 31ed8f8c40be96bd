"""Finds, checks and opens a kernel pack: the door to C++. Refuses loudly, before anything is bound."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

from ..errors import PackError, UnsupportedError
from ..manifest import PACKS, Manifest, pack_folders, verify
from . import abi


class Pack:
    """A loaded library whose header is ours. `description` is pk_describe(); `manifest` is what lay beside it, verified."""

    def __init__(self, path: Path, library: ctypes.CDLL, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self._library = library
        self.description: dict[str, Any] = json.loads(library.pk_describe())

    def last_error(self) -> str:
        """The sentence of the last call that failed in this thread."""
        return (self._library.pk_last_error() or b"").decode(errors="replace")

    def function(self, name: str) -> Any:
        """The bound C function (returns a pk_status; see `check`)."""
        return getattr(self._library, name)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function and raises what its status means. Raises: UnsupportedError, PackError."""
        status = getattr(self._library, name)(*arguments)
        if status != abi.PK_OK:
            raise self.failure(name, status)

    def failure(self, name: str, status: int) -> Exception:
        """The exception for a status that is not PK_OK."""
        sentence = self.last_error() or f"{name} failed with status {status}"
        if status == abi.PK_UNSUPPORTED:
            return UnsupportedError(sentence, f"kernel pack {self.path.name}")
        return PackError(sentence, f"kernel pack {self.path.name}, {name}, status {status}")


def find_pack(kind: str) -> Path:
    """The library file of a pack ("cpu", "cuda_sm90a", ...). Raises: PackError naming the folders searched."""
    file = f"libpaddock_{kind}.so"
    for folder in pack_folders():
        if (folder / file).exists():
            return folder / file
    where = ", ".join(str(f) for f in pack_folders()) or str(PACKS)
    raise PackError(
        f"kernel pack {file} is not installed (looked in {where})",
        "install paddock again, or name a pack with --kernel-pack",
    )


def load_pack(path: Path | str) -> Pack:
    """Opens the library and compares digests before binding anything.

    Raises: PackError when the file is missing, is not what its manifest says, is no library for this machine, is no pack, or
    was built from another header.
    """
    path = Path(path)
    if not path.exists():
        raise PackError(f"kernel pack {path} does not exist", "check --kernel-pack")
    manifest = verify(path)
    if manifest is not None:
        _compare(path, manifest.abi, f"pip install --force-reinstall {manifest.wheel}")
    try:
        library = ctypes.CDLL(str(path.resolve()))
    except OSError as error:
        raise PackError(f"kernel pack {path} cannot be loaded: {error}", "is it built for this machine?") from None
    try:
        digest_of = library.pk_abi_digest
    except AttributeError:
        raise PackError(f"{path} is no kernel pack: it has no pk_abi_digest", "name a libpaddock_*.so") from None
    digest_of.restype = ctypes.c_char_p
    digest = (digest_of() or b"").decode()
    _compare(path, digest, "build the pack again: make pack")
    for name, (result, arguments) in abi.PROTOTYPES.items():
        function = getattr(library, name, None)
        if function is None:
            raise PackError(f"kernel pack {path.name} lacks {name}", "build the pack again: make pack")
        function.restype, function.argtypes = result, arguments
    return Pack(path, library, manifest)


def _compare(path: Path, digest: str, hint: str) -> None:
    if digest != abi.DIGEST:
        raise PackError(
            f"kernel pack {path.name} was built from another pack.h (pack {digest}, this runner {abi.DIGEST})", hint
        )
