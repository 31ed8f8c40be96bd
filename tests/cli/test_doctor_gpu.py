"""`paddock doctor --gpu`: what is measured, kept, used by fit, and said where nothing can be measured."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paddock_manager.fit import calibrate, fit, gpus, nvml, packs
from paddock_manager.fleet import spawn
from paddock_manager.paths import places
from paddock_runner.memory import calibration
from paddock_runner.memory.calibration import Calibration

from tests.unit.app.test_device_choice import DRIVER

MORE = """
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetMaxClockInfo(void *d, int kind, unsigned *mhz) { *mhz = 3201; return kind != 2; }
int nvmlDeviceGetMemoryBusWidth(void *d, unsigned *bits) { *bits = 6144; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, unsigned *n) { *n = 5; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *n) { *n = 16; return 0; }
"""
FOUND = Calibration("Test GPU", "580.65.06", 520 << 20, 4.2e12, 5.3e10, "abc", 1.0)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver library of our own: one GPU of 8 GiB, sm_90."""
    source, target = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(DRIVER + MORE)
    subprocess.run(["cc", "-shared", "-fPIC", "-DMAJOR=9", "-DMINOR=0", '-DVERSION="580.65.06"', str(source), "-o", str(target)], check=True)
    monkeypatch.setattr(gpus.hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(nvml, "Nvml", functools.partial(nvml.Nvml, library=str(target)))


def runner_that_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: Any, code: int = 0) -> None:
    """A runner whose `calibrate` prints this, and keeps it under its home as the real one does."""
    script = tmp_path / "runner.py"
    script.write_text(
        "import json, sys\nfrom pathlib import Path\nfrom paddock_runner.memory import calibration\n"
        f"body, code = json.loads({json.dumps(json.dumps(body))}), {code}\n"
        "if code: sys.exit(sys.stderr.write('paddock-runner: error: ' + body + '\\n') and code)\n"
        "assert sys.argv[1:6] == ['calibrate', '--device', 'cuda', '--gpu', 'GPU-5c'] and sys.argv[6] == '--home'\n"
        "calibration.write(Path(sys.argv[7]), calibration.Calibration(**body))\nprint(json.dumps(body))\n"
    )
    monkeypatch.setattr(spawn, "RUNNER", (sys.executable, str(script)))
    monkeypatch.setattr(packs, "packs", lambda: [packs.Pack("libpaddock_cuda_sm90a.so")])


def row(done: Any, check: str = "calibration 0") -> Any:
    return next(f for f in done.json["findings"] if f["check"] == check)


def test_machine_without_a_gpu_is_told_so_in_one_sentence(paddock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.hardware, "has_gpu", lambda: False)
    found = row(paddock("doctor", "--gpu", "--json"), "calibration")
    assert found == {"check": "calibration", "state": "ok", "says": "there is no GPU to measure: no NVIDIA driver is loaded", "fix": ""}


@pytest.mark.usefixtures("driver")
def test_gpu_without_its_pack_shows_what_the_driver_says(paddock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "packs", list)
    found = row(paddock("doctor", "--gpu", "--json"))
    assert found["state"] == "warn" and found["fix"] == "pip install paddock-cuda-sm90"
    assert found["says"] == "not measured: its kernel pack is not installed (by its driver: memory 4917 GB/s, link to the host 63.0 GB/s)"


@pytest.mark.usefixtures("driver")
def test_measurement_is_kept_and_fit_uses_it_and_says_so(paddock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models_dir: Path) -> None:
    body = {name: getattr(FOUND, name) for name in FOUND.__slots__}
    runner_that_says(tmp_path, monkeypatch, body)
    model = str(models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf")
    before = paddock("fit", model, "--device", "cuda", "--json").json["reports"][0]
    assert [x["source"] for x in before["plan"]["lines"] if x["name"] == "CUDA context"] == ["table"] and before["device"]["calibration"] is None
    says = row(paddock("doctor", "--gpu", "--json"))["says"]
    assert says.startswith("Test GPU: a process takes 520 MiB before it has a model; memory moves 4200 GB/s, weights come from the host at up to 53.0 GB/s")
    after = paddock("fit", model, "--device", "cuda", "--json").json["reports"][0]
    lines = {x["name"]: x for x in after["plan"]["lines"]}
    assert lines["CUDA context"] == {"name": "CUDA context", "bytes": 520 << 20, "source": "measured", "group": "process"}
    assert after["device"]["calibration"] == body and any("53.0 GB/s as measured" in note for note in after["notes"])
    assert fit.find_where("cuda", None, "", None)[0].facts.process_source == "measured"


@pytest.mark.usefixtures("driver")
def test_kept_figure_that_is_wrong_is_reported_and_replaced(paddock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = places().home
    calibration.write(home, Calibration("Test GPU", "580.65.06", 720 << 20, 4.2e12, 5.3e10, "abc", 0.5))
    runner_that_says(tmp_path, monkeypatch, {name: getattr(FOUND, name) for name in FOUND.__slots__})
    found = row(paddock("doctor", "--gpu", "--json"))
    assert found["state"] == "warn" and found["says"].endswith("(720 MiB was kept until now, and is replaced)")
    assert calibration.read(home, "Test GPU", "580.65.06") == FOUND
    assert row(paddock("doctor", "--gpu", "--json"))["state"] == "ok"


@pytest.mark.usefixtures("driver")
def test_runner_that_cannot_measure_is_quoted(paddock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner_that_says(tmp_path, monkeypatch, "out of memory", 10)
    done = paddock("doctor", "--gpu", "--json")
    assert done.code == 1 and row(done)["says"] == "the runner cannot measure it: out of memory"
    assert next(iter(calibrate.outcomes(places(), (sys.executable, "-c", "print('no json')")))).says.startswith("the runner gave no measurement")


def test_runner_measures_gpus_only(capfd: pytest.CaptureFixture[str]) -> None:
    from paddock_runner import cli

    assert cli.main(["calibrate", "--device", "cpu", "--json"]) == 2
    assert "only a GPU is measured, this is CPU" in capfd.readouterr().err
