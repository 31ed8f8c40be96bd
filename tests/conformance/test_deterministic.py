"""A runner with --deterministic: answers to the last bit the same alone, among others, from the cache, and gone on with."""

from __future__ import annotations

from pathlib import Path

from bench import served, synthetic
from bench.gpu_alone import compare
from tests.conformance.test_runner_process import pytestmark as needs_pack

pytestmark = needs_pack


def test_answers_do_not_know_their_company(tmp_path: Path) -> None:
    synthetic.write("tiny", "bf16", tmp_path)
    with served.runner(tmp_path, "--device", "cpu", "--name", "m", "--deterministic", "--max-ctx", "1024", "--max-batch", "16", limit_s=60.0) as (url, _):
        assert compare(url, 16, 12, synthetic.SHAPES["tiny"][6] - 8) == 0
