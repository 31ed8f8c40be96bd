"""The manager with the real runner and a real model: what README promises, and what fit says against what the runner took."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path

import pytest
from paddock_manager.fleet import state
from paddock_manager.paths import places

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("stopped")]


@pytest.fixture
def model(models_dir: Path) -> str:
    """The small model, used where it lies."""
    return str(models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_served_model_answers_and_takes_what_fit_said(paddock, model):
    done = paddock("serve", model, "--name", "small", "--port", "0", "--ctx", "2048", "--batch", "2", "--device", "cpu", "--json")
    assert done.code == 0, done.err
    server = done.json["server"]
    assert (server["max_ctx_tokens"], server["max_batch"], server["device"]) == (2048, 2, "cpu")
    request = urllib.request.Request(server["url"] + "/v1/models", headers={"Authorization": f"Bearer {paddock('key').out.strip()}"})
    with urllib.request.urlopen(request) as answer:
        shown = json.load(answer)["data"][0]
    plan = paddock("fit", model, "--ctx", "2048", "--batch", "2", "--device", "cpu", "--json").json["reports"][0]["plan"]
    assert shown["id"] == "small" and shown["context_length"] == 2048
    assert shown["memory_bytes"] == plan["total_bytes"]
    first = paddock("run", model, "Name a colour.", "--temperature", "0", "--max-tokens", "8", "--json")
    assert first.code == 0 and first.json["usage"]["completion_tokens"] <= 8 and first.json["answer"]
    again = paddock("run", model, "Name a colour.", "--temperature", "0", "--max-tokens", "8", "--json")
    assert again.json["answer"] and again.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    past = paddock("fit", "small", "--history", "--json").json["history"]
    assert len(past) == 1 and past[0]["planned_bytes"] == plan["total_bytes"] and 0.3 < past[0]["measured_bytes"] / plan["total_bytes"] < 1.5
    assert paddock("stop", "small").code == 0


def test_run_starts_and_stops_its_own_runner(paddock, model):
    done = paddock("run", model, "Say hello.", "--temperature", "0", "--max-tokens", "6", "--ctx", "512", "--device", "cpu")
    assert done.code == 0 and done.out.strip()
    assert state.servers(places()) == []


def test_prompt_over_the_context_is_refused_with_both_numbers(paddock, model):
    done = paddock("run", model, "word " * 400, "--ctx", "128", "--device", "cpu", "--json")
    assert done.code == 2 and done.json["error"]["code"] == "context_length_exceeded"
    assert "128" in done.json["error"]["message"]


def test_context_over_the_models_own_stops_the_start(paddock, model):
    done = paddock("serve", model, "--port", "0", "--ctx", "999999", "--device", "cpu", "--json")
    assert done.code == 2 and f"{Path(model).stem} was made for 8192" in done.json["error"]["message"]


def test_model_that_does_not_fit_stops_the_start(paddock, model, monkeypatch):
    monkeypatch.setenv("PADDOCK_MEMORY_GIB", "0.2")
    done = paddock("serve", model, "--port", "0", "--ctx", "8192", "--batch", "1", "--device", "cpu", "--json")
    assert done.code == 9, done.err
    assert Path(model).stem in done.json["error"]["message"]


def test_port_in_use_is_one_sentence(paddock, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = paddock("serve", model, "--port", port, "--ctx", "256", "--batch", "1", "--device", "cpu", "--json")
    assert done.code == 2 and port in done.json["error"]["message"]


def test_truncated_file_is_exit_7_from_every_command(paddock, model, tmp_path):
    cut = tmp_path / "cut.gguf"
    with open(model, "rb") as f:
        cut.write_bytes(f.read(40 << 20))
    for words in (("inspect", str(cut)), ("fit", str(cut)), ("add", str(cut)), ("run", str(cut), "hi"), ("serve", str(cut), "--port", "0")):
        done = paddock(*words)
        assert done.code == 7, (words, done.err)
        assert "cut.gguf" in done.err and "Traceback" not in done.err


def test_https_by_the_runner_itself(paddock, model, tls):
    import ssl

    cert, key = tls
    assert paddock("serve", model, "--port", "0", "--ctx", "256", "--tls-cert", key, "--tls-key", key).code == 7
    done = paddock("serve", model, "--port", "0", "--ctx", "256", "--batch", "1", "--device", "cpu", "--tls-cert", cert, "--tls-key", key, "--json")
    assert done.code == 0, done.err
    context = ssl.create_default_context(cafile=cert)
    context.check_hostname = False
    with urllib.request.urlopen(done.json["server"]["url"] + "/health", context=context) as answer:
        assert answer.status == 200
    assert paddock("run", model, "Say hello.", "--temperature", "0", "--max-tokens", "4").out.strip()


def test_bench_quality_tells_the_perplexity_of_the_fixed_text(paddock, model):
    done = paddock("bench", model, "--quality", "--kv", "f16", "--device", "cpu", "--json")
    assert done.code == 0, done.err
    base, f16 = done.json["quality"]
    assert 5 < base["perplexity"] < 40 and abs(f16["delta"]) < 0.01 and base["tokens"] > 500


def test_bench_quality_tells_what_keys_in_fp8_cost(paddock, model):
    done = paddock("bench", model, "--quality", "--kv", "fp8", "--device", "cpu", "--json")
    base, fp8 = done.json["quality"]
    assert (base["kv"], fp8["kv"]) == ("bf16", "fp8") and 0 < fp8["delta"] < 0.03
    assert done.code == (fp8["delta"] > 0.01)
