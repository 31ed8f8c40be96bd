"""What was measured of a GPU stands in the plan, is said to be measured, and what makes no sense is as good as nothing."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from paddock_runner.app.calibrate import measured_apart
from paddock_runner.app.opening import Place
from paddock_runner.config import Config
from paddock_runner.engine import calibrate
from paddock_runner.engine.calibrate import Measured, measure, steady
from paddock_runner.errors import PackError
from paddock_runner.memory import calibration
from paddock_runner.memory.calibration import Calibration, applied
from paddock_runner.memory.plan import cpu_facts, cuda_facts
from paddock_runner.pack.library import find_pack

FOUND = Calibration("NVIDIA H200", "580.65", 512 << 20, 4.1e12, 5.2e10, "abc", 1.0)


def test_measurement_is_read_for_its_gpu_and_driver_only(tmp_path: Path) -> None:
    calibration.write(tmp_path, FOUND)
    calibration.write(tmp_path, replace(FOUND, gpu="NVIDIA A10"))
    calibration.write(tmp_path, replace(FOUND, at=2.0))
    assert calibration.read(tmp_path, "NVIDIA H200", "580.65") == replace(FOUND, at=2.0)
    assert calibration.read(tmp_path, "NVIDIA A10", "580.65") is not None
    assert calibration.read(tmp_path, "NVIDIA H200", "590.1") is None and calibration.read(tmp_path / "no", "NVIDIA H200", "580.65") is None


@pytest.mark.parametrize("text", ["", "[]", '{"gpus": [1]}', '{"gpus": [{"gpu": "NVIDIA H200"}]}'])
def test_damaged_file_is_as_good_as_none_and_can_be_written_over(tmp_path: Path, text: str) -> None:
    (tmp_path / calibration.FILE).write_text(text)
    assert calibration.read(tmp_path, "NVIDIA H200", "580.65") is None
    calibration.write(tmp_path, FOUND)
    assert calibration.read(tmp_path, "NVIDIA H200", "580.65") == FOUND


@pytest.mark.parametrize("n_bytes", [-1, 0, 1 << 20, 5 << 30])
def test_figure_that_cannot_be_is_not_used(tmp_path: Path, n_bytes: int) -> None:
    calibration.write(tmp_path, replace(FOUND, process_bytes=n_bytes))
    assert calibration.read(tmp_path, "NVIDIA H200", "580.65") is None
    rows = json.loads((tmp_path / calibration.FILE).read_text())["gpus"]
    assert rows[0]["process_bytes"] == n_bytes


def test_plan_says_where_the_figure_comes_from() -> None:
    facts = cuda_facts(132, 140 << 30, 139 << 30, "NVIDIA H200")
    assert applied(facts, None) == facts and facts.process_source == "table"
    found = applied(facts, FOUND)
    assert (found.process_bytes, found.process_source) == (512 << 20, "measured")


def test_made_up_model_is_built_measured_and_let_go() -> None:
    def used() -> int:
        words = Path("/proc/self/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")

    begun = time.monotonic()
    found = measure(find_pack("cpu"), cpu_facts(2, 0, 256 << 20), used)
    assert found.memory_bytes_per_s > 1e8 and found.host_bytes_per_s > 1e8 and 0 <= found.process_bytes < 1 << 30 and found.pack
    assert time.monotonic() - begun < 60


def test_measurement_beside_programs_that_come_and_go_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LOOK_S", 0.0)
    found = [Measured(n << 20, 1.0, 1.0, "p") for n in (2500, 540)]
    in_use = {"bytes": 1 << 30}

    def once() -> Measured:
        result = found.pop(0)
        in_use["bytes"] += (2 << 30) if found else 0
        return result

    assert steady(lambda: in_use["bytes"], once).process_bytes == 540 << 20 and not found

    def restless() -> Measured:
        in_use["bytes"] += 64 << 20
        return Measured(0, 1.0, 1.0, "p")

    with pytest.raises(PackError, match="other programs take or free memory"):
        steady(lambda: in_use["bytes"], restless)


def test_measuring_process_that_cannot_says_why(tmp_path: Path) -> None:
    place = Place(tmp_path / "libpaddock_none.so", cpu_facts(1, 0, 1 << 28), "CPU")
    with pytest.raises(PackError):
        measured_apart(place, Config())
