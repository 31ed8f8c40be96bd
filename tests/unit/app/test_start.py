"""The start of a runner: the engine is told early, and what that takes is imported alone; the stages are counted from the birth."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paddock_runner import log
from paddock_runner.engine.order import Opening, send
from paddock_runner.engine.spawn import spawn
from paddock_runner.wire.channel import Channel

GOLDEN = Path(__file__).parents[2] / "golden/tiny/qwen3"
LATE = {"numpy", "asyncio", "uvicorn", "uvloop", "ssl", "jinja2", "tokenizers", "llguidance", "mcp", "httpx"}


@pytest.mark.parametrize("module", ["app.start", "app.order", "engine.child"])
def test_what_the_engine_waits_for_is_imported_without_the_front_and_numpy(module: str) -> None:
    code = f"import sys, paddock_runner.{module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert LATE.isdisjoint(done.stdout.split())


def test_the_front_of_a_model_that_writes_text_starts_without_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", "import sys, paddock_runner.app.runner; print(*sys.modules)"], capture_output=True, text=True, check=True)
    assert {"numpy", "llguidance", "mcp", "httpx"}.isdisjoint(done.stdout.split())


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, tmp_path)
    words = [sys.executable, "-m", "paddock_runner", "--model", str(tmp_path), "--device", "cpu", "--port", "0", "--no-auth"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 12 and f"error: {tmp_path} has no tokenizer.json (take a conversion" in done.stderr
    assert "stage=weights" not in done.stdout + done.stderr


def test_an_engine_that_gets_no_order_ends_quietly_though_its_device_cannot_be_opened(capfd: pytest.CaptureFixture[str]) -> None:
    channel = Channel.create()
    process = spawn(channel)
    send(process, Opening("/nowhere/libpaddock_none.so", "", 1, "info", os.getpid()))
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0
    channel.close()
    assert "error" not in capfd.readouterr().err


def test_stages_count_from_the_birth_of_a_process() -> None:
    born = log.birth(os.getpid())
    assert 0 <= time.monotonic() - born < 86_400
    stages = log.Stages(os.getpid(), "test")
    stages.end("first")
    stages.end("second", bytes=3)
    first, second = stages.rows
    assert first["at"] == pytest.approx(first["seconds"], abs=0.02) and first["at"] <= second["at"]
    assert second["bytes"] == 3 and second["seconds"] < first["seconds"]


def test_a_process_that_is_not_there_is_as_if_born_now() -> None:
    assert time.monotonic() - log.birth(1 << 30) < 5
