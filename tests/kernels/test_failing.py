"""A kernel that fails: whoever waits for its step in short waits, as the engine does, is told soon, in a sentence; and a runner ends, with that sentence in its log."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

import numpy as np
import pytest
from harness import Bench
from paddock_runner.errors import PackError
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.library import Pack, load_pack
from paddock_runner.pack.program import Program
from paddock_runner.pack.tensor import S, T, Tensor
from test_sample import sampling
from test_step import Input

from bench.served import runner
from tests import tiny_gguf
from tests.conftest import CHECKOUT

V, NOBODYS = 40, 1 << 12
"""Columns, and an address that no memory has."""

PATCH = """
import runpy
from os.path import exists
runpy.run_path({own!r})
from paddock_runner.pack.device import Device
step, n = Device.step, 0
def failing(self, address):
    global n
    n += exists({now!r})
    if n == 3:
        self.fill(self.state.page_table, 0x3F, 4 * self.state.n_slots * self.state.slot_pages)
    step(self, address)
Device.step = failing
"""
"""In every process of a runner: the third step after a file is there finds pages that are nobody's."""


def run_into_it(path: str) -> None:
    """In a process of its own, whose context is lost: gives two steps that read nobody's memory, waits, and tells when the wait ended and how."""
    b = Bench(load_pack(Path(path)), sizes=StateSizes(4, 32, 8, 20, V, 16, 4, 4, 3, 3))
    hidden, gathered, logits = b.output(16, V, T), b.output(4, V, S), b.output(4, V, S, format=abi.PK_F32)
    program = Program()
    program.prepare()
    program.embed(b.upload(np.zeros((V, V)), abi.PK_F32), hidden)
    program.copy(Tensor(NOBODYS, T, V, b.activation, 2 * V), hidden)
    program.gather(hidden, gathered)
    program.copy(gathered, logits)
    program.sample(logits)
    program.commit()
    b.load(program, (1, 2, 4, 16))
    first = Input(1, [(0, 1, 1)], [(0, 0, sampling(temperature=0.0, prompt_length=1, max_length=30), [])], [(0, i, 1 + i) for i in range(4)], [(0, 0, [1])])
    began = time.monotonic()
    try:
        for step in (first, Input(2, [(0, 1, 1)])):
            b.device.step(ctypes.addressof(step.block()))
        while not b.device.wait(1, 50):
            pass
    except PackError as error:
        print(f"{time.monotonic() - began:.4f} {error}", flush=True)
    b.device.close()


def test_a_step_that_fails_is_told_soon(pack: Pack, level: int) -> None:
    if pack.description["pack"] == "cpu":
        pytest.skip("the host has no memory that is nobody's without ending the process")
    if level > 1:
        pytest.skip("levels differ in products")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    ended = subprocess.run(
        [sys.executable, "-c", f"import test_failing; test_failing.run_into_it({str(pack.path)!r})"], env=env, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    print(ended.stdout, ended.stderr)
    after, _, told = ended.stdout.partition(" ")
    assert "illegal memory access" in told and float(after) < 1.0


def test_a_runner_whose_kernel_fails_ends_soon_and_says_so(pack: Pack, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if pack.description["pack"] == "cpu" or level > 1:
        pytest.skip("of a GPU, once")
    now = tmp_path / "now"
    (tmp_path / "sitecustomize.py").write_text(PATCH.format(now=str(now), own=str(CHECKOUT / "tests/checkout/sitecustomize.py")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *(each for each in sys.path if each)]))
    model = tiny_gguf.write(tmp_path / "tiny.gguf")
    with runner(model, "--device", "cuda", "--kernel-pack", str(pack.path), "--name", "m", limit_s=60) as (url, process):

        def ask() -> int:
            body = json.dumps({"model": "m", "prompt": "a b", "max_tokens": 16, "temperature": 0}).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"}), timeout=30) as answer:
                return len(json.load(answer)["choices"])

        assert ask() == 1
        now.touch()
        began = time.monotonic()
        with pytest.raises((OSError, HTTPException)):
            ask()
        told, code = time.monotonic() - began, process.wait(30)
        ended, words = time.monotonic() - began, Path(process.args[process.args.index("--state-file") + 1]).with_name("log").read_text()
    print(f"told after {told:.2f} s, ended after {ended:.2f} s with {code}\n{words[-2000:]}")
    assert "illegal memory access" in words and code == PackError.exit_code and ended < 10
