"""A runner that is killed under load and comes back with its pages from disk: bench.killed, small."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from paddock_runner.manifest import pack_folders

from bench import killed, served, synthetic


@pytest.mark.skipif(not any((f / "libpaddock_cpu.so").exists() for f in pack_folders()), reason="the CPU pack is not built")
def test_no_token_and_no_page_is_wrong_after_kills_at_random_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic.write("tiny", "bf16", tmp_path / "model")
    monkeypatch.setitem(os.environ, "PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    served.use_this_tree()
    monkeypatch.setattr(
        sys, "argv",
        ["killed", str(tmp_path / "model"), "--kills", "2", "--life", "0.5", "--streams", "4", "--prompts", "12", "--options", "--device", "cpu", "--threads", "1", "--max-ctx", "512", "--max-batch", "4"],
    )  # fmt: skip
    assert killed.main() == 0, capsys.readouterr().out
    assert "no wrong token, no wrong page" in capsys.readouterr().out
