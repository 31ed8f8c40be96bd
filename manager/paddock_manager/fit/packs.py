"""Kernel packs beside the runner: hashed and compared with their manifests, never loaded; and which GPU lacks its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paddock_runner import hardware
from paddock_runner.errors import PaddockError
from paddock_runner.manifest import pack_folders, verify, wheel_name

from paddock_manager.fit.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack's file; `doubt`: its tests have never run on its architecture; `fault`: why it cannot be used, with `fix`."""

    name: str
    doubt: str = ""
    fault: str = ""
    fix: str = ""


def packs() -> list[Pack]:
    """All packs that are installed here."""
    return [_look(p) for folder in pack_folders() for p in sorted(folder.glob("libpaddock_*.so"))]


def _look(path: Path) -> Pack:
    try:
        manifest = verify(path)
    except PaddockError as error:
        return Pack(path.name, fault=error.message, fix=error.hint)
    return Pack(path.name, manifest.doubt if manifest else "")


def trouble(gpu: Gpu, installed: list[Pack]) -> tuple[str, str]:
    """Why a GPU cannot serve, and what to do; two empty texts when it can."""
    if hardware.is_old(gpu.driver):
        return f"this driver is too old, kernel packs need {hardware.OLDEST_DRIVER} or newer", "update the driver"
    number = gpu.arch.removeprefix("sm_")
    capability = (int(number[:-1]), int(number[-1]))
    names = {p.name for p in installed}
    if any(f"libpaddock_{name}.so" in names for name in hardware.pack_names(capability)):
        return "", ""
    made = hardware.pack_arch(capability)
    if not made:
        return "no kernel pack is made for it, they begin at sm_80", "--device cpu serves on the CPU"
    return "its kernel pack is not installed", f"pip install {wheel_name(made)}"
