"""Boards made of what a run on the device left."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import board, boards

CONTEXT = {"cpu": "16 cores", "gpu": "NVIDIA H200", "driver": "580"}


def left(path: Path, rows: list[dict[str, Any]], command: str = "python -m bench.gpu_models pack.so", **context: Any) -> None:
    """A board as a bench writes it on the device, which knows no commit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": "h200", "date": "2026-12-01", "commit": "", "command": command, "context": CONTEXT | context, "rows": rows}))


def run(monkeypatch: pytest.MonkeyPatch, root: Path, *words: object) -> None:
    monkeypatch.setattr("bench.board.ROOT", root)
    monkeypatch.setattr(sys, "argv", ["boards", *map(str, words)])
    boards.main()


def written(root: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((root / "bench/results/h200" / f"{name}.json").read_text()))


def row(id: str, value: float, better: str = "higher", **more: Any) -> dict[str, Any]:
    return {"id": id, "value": value, "unit": "tok/s", "better": better, "samples": 5, **more}


def test_boards_of_two_stages_and_one_topic_become_one_with_the_commit_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(tmp_path / "s0/boards/bf16/serve.json", [row("h200.load.8b.bf16.out_tok_s", 6210.0)], "python -m bench.gpu_cells --formats bf16", model="8b")
    left(tmp_path / "s1/boards/fp8/serve.json", [row("h200.load.8b.fp8.out_tok_s", 8234.0)], "python -m bench.gpu_cells --formats fp8")
    left(tmp_path / "s1/boards/h200/2026-12-01-twin.json", [row("h200.twin.out_tok_s", 8362.0, peer="C++ loop", peer_value=8362.3, vs_peer=1.0)])
    (tmp_path / "s1/machine.json").write_text("{}")
    run(monkeypatch, tmp_path, tmp_path / "s0", tmp_path / "s1", "--commit", "abc1234", "--note", "serve=one card")
    serve, twin = written(tmp_path, "2026-12-01-serve"), written(tmp_path, "2026-12-01-twin")
    assert [r["id"] for r in serve["rows"]] == ["h200.load.8b.bf16.out_tok_s", "h200.load.8b.fp8.out_tok_s"]
    assert serve["commit"] == twin["commit"] == "abc1234" and serve["context"] == CONTEXT | {"model": "8b", "note": "one card"}
    assert serve["command"] == "python -m bench.gpu_cells --formats bf16; python -m bench.gpu_cells --formats fp8"
    assert twin["rows"][0]["vs_peer"] == 1.0


def test_a_board_of_the_same_day_keeps_its_figures_under_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for value, commit in ((100.0, "aaa"), (110.0, "bbb"), (111.0, "bbb")):
        left(tmp_path / "out/whole.json", [row("h200.decode.8b.bf16.b1", value)])
        run(monkeypatch, tmp_path, tmp_path / "out", "--commit", commit)
    assert written(tmp_path, "2026-12-01-whole-aaa")["rows"][0]["value"] == 100.0
    assert written(tmp_path, "2026-12-01-whole")["rows"][0]["value"] == 111.0
    assert "1.100 x" in capsys.readouterr().out, "what it was before stands beside it"
    assert len(list((tmp_path / "bench/results/h200").iterdir())) == 2


def test_the_peers_figures_stand_beside_the_rows_of_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    left(tmp_path / "out/whole.json", [row(f"h200.{name}", 400.0) for name in ("decode.8b.q8_0.b1", "decode.8b.q8_0.b8", "prefill.8b.q8_0.2048", "decode.8b.bf16.b1")])
    lines = [
        {"model_type": "qwen3 8B Q8_0", "n_prompt": 2048, "n_gen": 0, "avg_ts": 800.0}, {"model_type": "qwen3 8B Q8_0", "n_prompt": 0, "n_gen": 128, "avg_ts": 200.04},
        {"pp": 128, "tg": 64, "pl": 1, "speed_tg": 190.0}, {"pp": 128, "tg": 64, "pl": 8, "speed_tg": 100.0}, {"pp": 128, "tg": 64, "pl": 64, "speed_tg": 100.0},
    ]  # fmt: skip
    (tmp_path / "llama.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(monkeypatch, tmp_path, tmp_path / "out", "--commit", "abc", "--date", "2026-12-02", "--peer", f"8b.q8_0={tmp_path / 'llama.jsonl'}", "--llama", "llama.cpp v0.5.0")
    rows = {r["id"]: r for r in written(tmp_path, "2026-12-02-whole")["rows"]}
    assert [rows[f"h200.{n}"]["vs_peer"] for n in ("decode.8b.q8_0.b1", "decode.8b.q8_0.b8", "prefill.8b.q8_0.2048")] == [1.9996, 4.0, 0.5]
    assert rows["h200.decode.8b.q8_0.b1"]["peer"] == "llama.cpp v0.5.0" and rows["h200.decode.8b.q8_0.b1"]["peer_value"] == 200.0 and "peer" not in rows["h200.decode.8b.bf16.b1"]
    assert "1 of 4 figures of the peer have no row" in capsys.readouterr().out


def test_another_peers_figures_are_told_by_the_ids_of_our_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(tmp_path / "out/serve.json", [row("h200.load.8b.bf16.128/128c32.ttft_p50_ms", 70.0, "lower"), row("h200.load.8b.bf16.128/128c32.out_tok_s", 6200.0)])
    (tmp_path / "vllm.json").write_text(json.dumps({"peer": "vLLM 0.26.0", "rows": {"h200.load.8b.bf16.128/128c32.ttft_p50_ms": 140}}))
    run(monkeypatch, tmp_path, tmp_path / "out", "--commit", "abc", "--peer", tmp_path / "vllm.json")
    first, rate = written(tmp_path, "2026-12-01-serve")["rows"]
    assert (first["peer"], first["peer_value"], first["vs_peer"]) == ("vLLM 0.26.0", 140.0, 2.0) and "peer" not in rate


@pytest.mark.parametrize(
    "words, said",
    [(["--commit", "abc", "--note", "twin=x"], "no board of twin: there are whole"), (["--commit", "abc", "--note", "twin"], "--note is TOPIC=TEXT, not twin")],
)
def test_what_cannot_be_meant_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    left(tmp_path / "out/whole.json", [row("h200.decode.8b.bf16.b1", 1.0)])
    with pytest.raises(SystemExit, match=said):
        run(monkeypatch, tmp_path, tmp_path / "out", *words)


def test_a_file_that_was_cut_off_and_a_peer_of_another_program_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(tmp_path / "out/whole.json", [row("h200.decode.8b.bf16.b1", 1.0)])
    (tmp_path / "peer").write_text("| model | size |\n")
    for word, said in ((f"8b.q8_0={tmp_path / 'peer'}", "neither llama-bench's nor"), (str(tmp_path / "peer"), "is not .*peer.*rows")):
        with pytest.raises(SystemExit, match=said):
            run(monkeypatch, tmp_path, tmp_path / "out", "--commit", "abc", "--peer", word)
    (tmp_path / "out/32b.json").write_text('{"rows": [')
    with pytest.raises(SystemExit, match=r"32b.json is no JSON"):
        run(monkeypatch, tmp_path, tmp_path / "out", "--commit", "abc")


def test_a_board_is_written_where_a_run_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_BENCH_OUT", str(tmp_path / "boards"))
    path = board.write("h200", "agents", [board.row("h200.agent.dense.cached_share", [0.97], "share")], "abc")
    assert path.parent == tmp_path / "boards/h200"
    board.save(tmp_path / "boards/whole.json", [board.row("h200.decode.8b.bf16.b1", [2.0, 1.0, 3.0], "tok/s", limit=4.0)], read_gbs=4300.0)
    found = dict(boards.boards_in([tmp_path / "boards"]))
    assert sorted(found) == ["agents", "whole"] and found["whole"]["rows"][0]["of_limit"] == 0.5 and found["whole"]["context"]["read_gbs"] == 4300.0
