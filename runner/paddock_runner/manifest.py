"""The manifest beside a CUDA pack: what the file must hash to, what it runs on, and whether its tests have ever run there.

Written by packs/cuda/build.py; read before the library is opened, so that nothing of a damaged file is executed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from .errors import PackError

PACKS = Path(__file__).resolve().parent / "_packs"


class Manifest(msgspec.Struct, frozen=True):
    """What is known of a pack's file without opening it. arch: "sm_90a"; abi: the digest of its pack.h."""

    file: str
    sha256: str
    arch: str
    build: str
    abi: str
    is_validated: bool
    formats: tuple[str, ...] = ()

    @property
    def wheel(self) -> str:
        """The package that brings this pack."""
        return wheel_name(self.arch)

    @property
    def doubt(self) -> str:
        """Why the pack is to be used with care; empty when its tests have passed on this architecture."""
        return "" if self.is_validated else f"UNVALIDATED: its tests have never run on {self.arch}"


def pack_folders() -> list[Path]:
    """Where packs lie: beside the package (wheel and editable install) and in installed pack wheels."""
    import paddock_runner

    # An editable install has the sources in one folder and what was built in another.
    folders = [PACKS, *(Path(p) / "_packs" for p in paddock_runner.__path__)]
    return [f for f in dict.fromkeys(folders) if f.is_dir()]


def wheel_name(arch: str) -> str:
    """The package of an architecture's pack: sm_90a is paddock-cuda-sm90."""
    return f"paddock-cuda-{arch.replace('_', '').rstrip('af')}"


def read_manifest(library: Path) -> Manifest | None:
    """The manifest beside a pack, or None (packs built on the spot may have none). Raises: PackError when it is unreadable."""
    path = library.with_suffix(".json")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise PackError(f"{path} is no manifest of a kernel pack: {error}", "install the pack again") from None


def verify(library: Path) -> Manifest | None:
    """Reads the manifest and compares the file with it. Raises: PackError when the file is another one."""
    manifest = read_manifest(library)
    if manifest is None:
        return None
    again = f"pip install --force-reinstall {manifest.wheel}"
    digest = hashlib.sha256()
    try:
        with library.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise PackError(f"kernel pack {library} cannot be read: {error}", again) from None
    if digest.hexdigest() != manifest.sha256:
        raise PackError(
            f"kernel pack {library.name} is damaged: its sha256 is {digest.hexdigest()[:16]}…, the manifest says {manifest.sha256[:16]}…",
            again,
        )
    return manifest
