"""The command line: one sentence and an exit code for every fault, plans and programs without loading anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from paddock_runner.cli import main
from paddock_runner.manifest import pack_folders
from paddock_runner.pack.library import find_pack, load_pack

from tests import tiny_gguf

needs_pack = pytest.mark.skipif(not any((f / "libpaddock_cpu.so").exists() for f in pack_folders()), reason="the CPU pack is not built")


@pytest.mark.parametrize(
    "words, code",
    [([], 2), (["--model", "/nothing/here"], 3), (["--frob"], 2), (["frob"], 2), (["plan"], 2), (["plan", "/nothing"], 3), (["--port"], 2)],
)
def test_faults_are_one_sentence_and_a_code(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    out, err = capsys.readouterr()
    assert not out and err.startswith("paddock-runner: error: ") and err.count("\n") == 1


def test_config_command_tells_origins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_MAX_BATCH", "5")
    assert main(["config", "--json", "--port", "1"]) == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)["settings"]}
    assert rows["port"]["origin"] == "flag --port" and rows["max_batch"] == {**rows["max_batch"], "value": 5, "origin": "PADDOCK_MAX_BATCH"}
    assert main(["config"]) == 0 and "PADDOCK_MAX_BATCH" in capsys.readouterr().out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and "paddock-runner" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0 and "--max-ctx" in capsys.readouterr().out


@needs_pack
def test_plan_prints_the_planners_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gguf.write(tmp_path / "tiny.gguf")
    assert main(["plan", str(model), "--json", "--max-batch", "3", "--max-ctx", "128"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["total_bytes"] == sum(line["bytes"] for line in plan["lines"]) and (plan["max_ctx_tokens"], plan["max_batch"]) == (128, 3)
    assert main(["plan", str(model)]) == 0 and "KV tokens in all" in capsys.readouterr().out


@needs_pack
def test_every_kv_format_that_can_be_asked_for_is_planned_and_the_pack_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gguf.write(tmp_path / "tiny.gguf")
    can = load_pack(find_pack("cpu")).description["kv_formats"]
    found = {}
    for kv in ("f32", "f16", "bf16", "fp8"):
        assert any(kv in name for name in can)
        assert main(["plan", str(model), "--device", "cpu", "--kv-dtype", kv, "--json"]) == 0
        found[kv] = json.loads(capsys.readouterr().out)
    assert found["f32"]["kv_token_bytes"] == 2 * found["f16"]["kv_token_bytes"] == 4 * found["fp8"]["kv_token_bytes"]
    assert [any(line["name"] == "scales of keys and values" for line in plan["lines"]) for plan in found.values()] == [False, False, False, True]
    assert main(["plan", str(model), "--device", "cpu", "--window-kv-dtype", "fp8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_format"] == "f16,window=fp8"


@needs_pack
def test_pool_shrinks_to_what_fits_and_a_context_that_cannot_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gguf.write(tmp_path / "tiny.gguf")
    assert main(["plan", str(model), "--json", "--max-batch", "64"]) == 0
    full = json.loads(capsys.readouterr().out)
    assert full["pool_tokens"] == 64 * 512
    limit = (full["total_bytes"] - 4 * (1 << 20)) / (1 << 30)
    assert main(["plan", str(model), "--json", "--max-batch", "64", "--memory-gib", str(limit)]) == 0
    less = json.loads(capsys.readouterr().out)
    assert 512 <= less["pool_tokens"] < full["pool_tokens"] and less["peak_bytes"] <= limit * (1 << 30)
    assert main(["plan", str(model), "--memory-gib", "0.01"]) == 9
    assert "GiB" in capsys.readouterr().err


@needs_pack
def test_explain_counts_every_op_of_the_traced_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gguf.write(tmp_path / "tiny.gguf")
    assert main(["explain", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ops = [row["op"] for row in found["ops"]]
    assert ops[0] == "prepare" and ops[-2:] == ["sample", "commit"] and ops.count("attention") == tiny_gguf.LAYERS
    assert sum(row["share"] for row in found["ops"]) == pytest.approx(1)
    head = next(row for row in found["ops"] if "output" in row["weights"] or "head" in row["weights"])
    n_vocab = int(head["shape"].split("[")[2].split(",")[0])
    assert head["flops"] == 2 * n_vocab * tiny_gguf.WIDTH
    assert main(["explain", str(model)]) == 0 and "share" in capsys.readouterr().out


def test_output_that_is_full_is_one_sentence_and_an_exit_code() -> None:
    for words in (["config"], ["config", "--json"], ["--version"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, "-m", "paddock_runner", *words], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 8 and done.stderr == "paddock-runner: error: the output could not be written: no space is left\n", words
