"""A runner whose experts lie in host memory says what one says that has them all on the device, and tells what it had to copy."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests import tiny_gguf
from tests.conformance.test_runner_process import pytestmark as needs_pack
from tests.conformance.test_runner_process import running

pytestmark = needs_pack
BODY = {"prompt": "Once upon a time there was", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def said(folder: Path, model: Path, *flags: str) -> tuple[str, dict[str, float], str]:
    """The answer, what the engine tells of experts, and the metrics."""
    folder.mkdir()
    with running(folder, model, "--no-auth", "--device", "cpu", *flags) as runner, httpx.Client(base_url=runner.url, timeout=60) as client:
        text = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        return text, client.get("/v1/paddock/state").json()["engine"]["experts"], client.get("/metrics").text


def test_experts_in_host_memory_change_no_answer_and_are_accounted_for(tmp_path):
    model = tiny_gguf.write(tmp_path / "mixture.gguf", n_experts=8, n_layers=6)
    whole, nothing, _ = said(tmp_path / "a", model)
    split, told, metrics = said(tmp_path / "b", model, "--expert-vram-gib", "0.001")
    assert split == whole and nothing == {}
    assert told["of"] == 8 and 0 < told["slots"] < 8 and 0 < told["found_share"] < 1
    assert told["copied_bytes_total"] > 0 and told["ahead_total"] > 0
    assert told["computed_total"] == told["threads"] == 0  # the CPU pack has no threads for what a device lacks
    assert "paddock_engine_experts_copied_bytes_total" in metrics
