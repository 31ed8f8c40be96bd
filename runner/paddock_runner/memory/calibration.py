"""What was measured of a GPU on this machine, in place of the plan's table: one small file under Paddock's home.

`paddock-runner calibrate` writes it; the runner's plan and `paddock fit` both read it, so that they go on agreeing.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .plan import DeviceFacts

FILE = "calibration.json"
MEASURED = "measured"
SANE_BYTES = range(32 << 20, 4 << 30)
"""A process that takes less or more than this before it has a model was not measured, but something else was."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """One GPU model under one driver. process_bytes: of a process before it has a model, with the pack's code.

    memory_bytes_per_s: of the device's memory, read and written; host_bytes_per_s: from pinned host memory. pack: its build. at: seconds
    since 1970.
    """

    gpu: str
    driver: str
    process_bytes: int
    memory_bytes_per_s: float
    host_bytes_per_s: float
    pack: str
    at: float

    @property
    def is_sane(self) -> bool:
        """Can the figure be what it says?"""
        return self.process_bytes in SANE_BYTES and self.memory_bytes_per_s > 0 and self.host_bytes_per_s > 0


def read(home: Path, gpu: str, driver: str) -> Calibration | None:
    """What was measured of that GPU under that driver; None when nothing was, or it makes no sense."""
    for found in _all(home):
        if (found.gpu, found.driver) == (gpu, driver):
            return found if found.is_sane else None
    return None


def write(home: Path, found: Calibration) -> None:
    """Keep it, in place of an older one of the same GPU. Raises: OSError."""
    home.mkdir(parents=True, exist_ok=True)
    rows = [x for x in _all(home) if x.gpu != found.gpu]
    part = home / f".{FILE}.{os.getpid()}"
    part.write_text(json.dumps({"layout": 1, "gpus": [asdict(x) for x in (*rows, found)]}, indent=1) + "\n", encoding="utf-8")
    os.replace(part, home / FILE)


def applied(facts: DeviceFacts, found: Calibration | None) -> DeviceFacts:
    """The device's facts with what was measured."""
    return facts if found is None else replace(facts, process_bytes=found.process_bytes, process_source=MEASURED)


def _all(home: Path) -> list[Calibration]:
    """Every row that can be read: a damaged file is as good as none."""
    try:
        body = json.loads((home / FILE).read_bytes())
        return [Calibration(**row) for row in body["gpus"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
