"""NVIDIA's aiperf against a live runner: its chat, completions and embeddings paths run through, and its token counts equal the server's.

Slow, and only where an `aiperf` program is on the PATH (`pip install aiperf` in an environment of its own).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from paddock_runner.manifest import pack_folders

from tests.conformance.test_runner_process import Runner, running
from tests.conftest import OUTSIDE

AIPERF = shutil.which("aiperf", path=OUTSIDE.get("PATH"))
pytestmark = [
    pytest.mark.models, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(AIPERF is None, reason="there is no aiperf on the PATH"),
    pytest.mark.skipif(not any((f / "libpaddock_cpu.so").exists() for f in pack_folders()), reason="the CPU pack is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="the runner is a Linux program"),
]  # fmt: skip
N_REQUESTS, N_IN, N_OUT = 12, 64, 24


@contextmanager
def served(models_dir: Path, folder: Path, *flags: str) -> Iterator[Runner]:
    with running(folder, models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf", "--name", "smol", "--max-batch", "4", "--max-ctx", "1024", "--no-auth", *flags) as found:
        yield found


@pytest.fixture(scope="module")
def runner(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with served(models_dir, tmp_path_factory.mktemp("aiperf")) as found:
        yield found


def counters(url: str) -> dict[str, int]:
    found: dict[str, int] = httpx.get(url + "/v1/paddock/state").json()["engine"]["counters"]
    return found


def profile(url: str, models_dir: Path, folder: Path, kind: str, *flags: str) -> list[dict[str, Any]]:
    """What aiperf measured of each request."""
    assert AIPERF is not None
    command = [
        AIPERF, "profile", "-m", "smol", "--url", url, "--endpoint-type", kind, "--tokenizer", str(models_dir / "smollm2-135m-instruct-bf16"),
        "--request-count", str(N_REQUESTS), "--concurrency", "4", "--isl", str(N_IN), "--ui", "none", "--artifact-dir", str(folder), *flags,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return [json.loads(line)["metrics"] for line in (folder / "profile_export.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_counts_the_tokens_that_the_server_counts(runner: Runner, models_dir: Path, tmp_path: Path, kind: str, streams: bool) -> None:
    before = counters(runner.url)["output_tokens"]
    flags = ["--osl", str(N_OUT), "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--use-server-token-count"]
    rows = profile(runner.url, models_dir, tmp_path, kind, *flags, *(["--streaming"] if streams else []))
    counted = [row["output_token_count"]["value"] for row in rows]
    assert counted == [N_OUT] * N_REQUESTS == [row["usage_completion_tokens"]["value"] for row in rows]
    assert counters(runner.url)["output_tokens"] - before == sum(counted)
    if kind == "completions":
        assert {row["usage_prompt_tokens"]["value"] for row in rows} == {N_IN}


def test_aiperf_runs_its_embeddings_path_and_counts_the_same_inputs(models_dir: Path, tmp_path: Path) -> None:
    with served(models_dir, tmp_path, "--task", "embed") as found:
        rows = profile(found.url, models_dir, tmp_path / "aiperf", "embeddings")
        assert len(rows) == N_REQUESTS and {row["input_sequence_length"]["value"] for row in rows} == {N_IN}
        assert counters(found.url)["prompt_tokens"] == N_REQUESTS * N_IN
