"""The threads that compute experts on the host, without a GPU: cold_workers.cpp beside this file asks them as a device would."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program, with the address sanitizer where the compiler has it."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "building the CPU pack takes a C++ compiler, so there is one"
    target = tmp_path_factory.mktemp("cold") / "cold_workers"
    sources = [str(Path(__file__).with_name("cold_workers.cpp")), str(ROOT / "packs/cuda/src/cold/workers.cpp")]
    words = [compiler, "-std=c++20", "-O1", "-g", "-mavx2", f"-I{ROOT}", *sources, "-o", str(target), "-lpthread"]
    sanitized = subprocess.run([*words, "-fsanitize=address"], capture_output=True)
    if sanitized.returncode:
        subprocess.run(words, check=True)
    return target


@pytest.mark.parametrize("n_threads", [6])
def test_threads_give_one_threads_sums_and_leave_a_job_that_is_over(program, n_threads):
    told = subprocess.run([str(program), str(n_threads), "150", "2"], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr[-2000:] + told.stdout[-200:]
    assert "the same" in told.stdout
