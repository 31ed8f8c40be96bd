"""A kernel that fails: whoever waits for its step in short waits, as the engine does, is told soon, in a sentence, and the process ends."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
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

V, NOBODYS = 40, 1 << 12
"""Columns, and an address that no memory has."""


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
