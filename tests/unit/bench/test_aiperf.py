"""bench.aiperf: what it makes of aiperf's figures, by a program that writes such files."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import aiperf, load

CELL: dict[str, Any] = {"name": "8-4-c2", "in": 8, "out": 4, "concurrency": 2, "requests": 6}
FAKE = """#!{python}
import json, sys
words = dict(zip(sys.argv[2:], sys.argv[3:]))
if "--fail" in {flags!r}:
    sys.exit("no server answers")
folder = words["--artifact-dir"]
found = {{"request_count": {{"avg": int(words["--request-count"])}}, "output_sequence_length": {{"avg": {n_out}}}, "output_token_throughput": {{"avg": 120.5}},
         "time_to_first_token": {{"p50": 7.25, "avg": 8.5}}, "inter_token_latency": {{"p50": 2.5}}}}
open(folder + "/profile_export_aiperf.json", "w").write(json.dumps(found))
lines = [{{"metadata": {{"benchmark_phase": phase, "request_start_ns": at}}}} for phase, at in (("warmup", 1), ("profiling", 3_000_000_000), ("profiling", 2_500_000_000))]
open(folder + "/profile_export.jsonl", "w").write("\\n".join(map(json.dumps, lines)))
"""


def program(folder: Path, n_out: float, *flags: str) -> str:
    path = folder / "aiperf"
    path.write_text(FAKE.format(python=sys.executable, n_out=n_out, flags=list(flags)))
    path.chmod(0o755)
    return str(path)


def test_figures_of_a_run_that_counted_the_cells_tokens(tmp_path: Path) -> None:
    found, starts = aiperf.theirs(program(tmp_path, 4.0), "http://127.0.0.1:1", "m", tmp_path, CELL)
    assert starts == [0.0, 0.5]
    assert found == {"out_tok_s": 120.5, "ttft_p50_ms": 7.25, "itl_p50_ms": 2.5, "ttft_mean_ms": 8.5}


def test_a_figure_that_aiperf_lacks_is_no_agreement() -> None:
    assert aiperf.apart({"value": 103.0, "peer_value": 100.0}) == pytest.approx(0.03)
    assert aiperf.apart({"value": 1.0, "peer_value": 0.0}) == float("inf")


def test_other_tokens_than_the_cells_are_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"6 answers of 3\.50 tokens, the cell is 6 of 4"):
        aiperf.theirs(program(tmp_path, 3.5), "http://127.0.0.1:1", "m", tmp_path, CELL)


def test_its_last_words_are_kept(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no server answers"):
        aiperf.theirs(program(tmp_path, 4.0, "--fail"), "http://127.0.0.1:1", "m", tmp_path, CELL)


def test_requests_at_moments_are_made_before_the_first_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def one(a: argparse.Namespace, body: bytes, result: object = None, pool: object = None) -> load.Result:
        done.append(body.decode())
        return load.Result(float(len(done)), ended=float(len(done)))

    monkeypatch.setattr(load, "one", one)
    monkeypatch.setattr(load, "body_of", lambda a, number: done.append("made") or str(number).encode())
    results, wall = asyncio.run(load.run_at(argparse.Namespace(warmup=1), [0.0, 0.002, 0.001]))
    assert done == ["made", "-1", "made", "made", "made", "0", "2", "1"] and len(results) == 3 and wall == 2.0


def test_a_board_has_both_and_says_which_are_far_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cells = tmp_path / "cells.toml"
    cells.write_text("[[cell]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in CELL.items()) + "\n")
    monkeypatch.setattr("bench.board.ROOT", tmp_path)
    words = ["aiperf", "--url", "http://127.0.0.1:1", "--tokenizer", str(tmp_path), "--cells", str(cells), "--rounds", "1", "--program", program(tmp_path, 4.0), "--commit", "abc"]
    counted = iter([(0.0, 0.0), (0.06, 10.0), (0.06, 10.0), (0.14, 20.0), (0.14, 20.0), (0.20, 30.0)] * 2)
    monkeypatch.setattr(aiperf, "first_tokens", lambda url: next(counted))
    for mine, code in ((121.0, 0), (130.0, 1)):
        monkeypatch.setattr(aiperf, "ours", lambda *_, mine=mine: {"out_tok_s": mine, "ttft_p50_ms": 7.3, "itl_p50_ms": 2.0, "ttft_mean_ms": 8.0})
        monkeypatch.setattr(sys, "argv", words)
        assert aiperf.main() == code
    (board,) = (tmp_path / "bench/results/cpu2").glob("*-aiperf.json")
    rows = {r["id"]: r for r in json.loads(board.read_text())["rows"]}
    assert rows["cpu2.aiperf.8-4-c2.out_tok_s"]["peer_value"] == 120.5 and rows["cpu2.aiperf.8-4-c2.out_tok_s"]["vs_peer"] == pytest.approx(130 / 120.5, abs=1e-4)
    said = capsys.readouterr().out
    assert "further apart than 3 %: cpu2.aiperf.8-4-c2.out_tok_s" in said
    assert "8.00 ms, by the server 6.00: 2.00 are" in said and "8.50 ms, by the server 8.00: 0.50 are" in said
