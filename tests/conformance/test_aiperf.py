"""NVIDIA's aiperf against a live runner: its chat and completions paths run through, and its token counts equal the server's.

Slow, and only where an `aiperf` program is on the PATH (`pip install aiperf` in an environment of its own).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from paddock_runner.pack.library import pack_folders

from tests.conformance.test_runner_process import Runner, running
from tests.conftest import OUTSIDE

AIPERF = shutil.which("aiperf", path=OUTSIDE.get("PATH"))
pytestmark = [
    pytest.mark.models, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(AIPERF is None, reason="there is no aiperf on the PATH"),
    pytest.mark.skipif(not any((f / "libpaddock_cpu.so").exists() for f in pack_folders()), reason="the CPU pack is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="the runner is a Linux program"),
]  # fmt: skip
N_REQUESTS, N_IN, N_OUT = 12, 64, 24


@pytest.fixture(scope="module")
def runner(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("aiperf")
    with running(folder, models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf", "--name", "smol", "--max-batch", "4", "--max-ctx", "1024", "--no-auth") as found:
        yield found


def output_tokens(url: str) -> int:
    found: int = httpx.get(url + "/v1/paddock/state").json()["engine"]["counters"]["output_tokens"]
    return found


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_counts_the_tokens_that_the_server_counts(runner: Runner, models_dir: Path, tmp_path: Path, kind: str, streams: bool) -> None:
    assert AIPERF is not None
    before = output_tokens(runner.url)
    command = [
        AIPERF, "profile", "-m", "smol", "--url", runner.url, "--endpoint-type", kind, *(["--streaming"] if streams else []),
        "--tokenizer", str(models_dir / "smollm2-135m-instruct-bf16"), "--request-count", str(N_REQUESTS), "--concurrency", "4", "--isl", str(N_IN),
        "--osl", str(N_OUT), "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--use-server-token-count", "--ui", "none", "--artifact-dir", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    rows = [json.loads(line)["metrics"] for line in (tmp_path / "profile_export.jsonl").read_text().splitlines()]
    counted = [row["output_token_count"]["value"] for row in rows]
    assert counted == [N_OUT] * N_REQUESTS == [row["usage_completion_tokens"]["value"] for row in rows]
    assert output_tokens(runner.url) - before == sum(counted)
    if kind == "completions":
        assert {row["usage_prompt_tokens"]["value"] for row in rows} == {N_IN}
