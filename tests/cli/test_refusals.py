"""What a new user runs into: repositories that hold no model, models that cannot be run, names, settings from variables, damaged bytes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from paddock_manager.commands import launch

from tests.cli.conftest import tiny_gguf
from tests.fakes.hub import some_bytes
from tests.hostile.test_safetensors_cases import LLAMA_CONFIG, NAMES, shard

CONFIG = json.dumps(LLAMA_CONFIG).encode()
WEIGHTS = shard(NAMES)
REPOSITORIES = {
    "adapter": ({"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}, 12, "org/adapter holds an adapter (LoRA), not a model"),
    "projector": ({"mmproj-model-f16.gguf": b"x"}, 12, "org/projector holds no model: mmproj-model-f16.gguf is a projector, a drafter or an adapter, which belongs to one"),
    "pickle": ({"pytorch_model.bin": b"x", "config.json": CONFIG}, 12, "org/pickle holds its weights as pytorch_model.bin, a format that can carry programs, which Paddock does not open"),
    "onnx": ({"model.onnx": b"x"}, 12, "org/onnx holds neither GGUF nor safetensors weights"),
    "no-config": ({"model.safetensors": WEIGHTS}, 12, "org/no-config has no Hugging Face model at its root (config.json beside *.safetensors): it lacks config.json"),
    "half": (
        {"config.json": CONFIG, "model-00001-of-00003.safetensors": WEIGHTS, "model-00003-of-00003.safetensors": b"x"}, 3,
        "org/half is incomplete: model-00002-of-00003.safetensors is not in the repository, which has 2 of 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPOSITORIES)
def test_repository_without_a_whole_model_is_one_sentence_and_nothing_is_fetched(paddock, hub, name):
    files, code, sentence = REPOSITORIES[name]
    hub.add(f"org/{name}", files)
    done = paddock("pull", f"org/{name}")
    assert done.code == code and done.err.splitlines()[0] == f"error: {sentence}"
    assert not hub.data_requests()


def test_set_that_is_numbered_from_zero_is_whole(paddock, hub):
    hub.add("org/zero", {"config.json": CONFIG, **{f"model-0000{i}-of-00002.safetensors": shard(NAMES[i::3]) for i in range(3)}})
    assert paddock("pull", "org/zero", "--dry-run").code == 0


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model_type": "frobnicator"}, "the architecture frobnicator is not supported; supported: "),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization hqq of safetensors is not supported; supported: "),
        ({}, "has no tokenizer.json (take a conversion that carries one, or a GGUF file of the model)"),
    ],
)
def test_model_that_cannot_be_run_is_told_before_and_after_it_is_fetched_and_shown(paddock, hub, changed, sentence):
    files = {"config.json": json.dumps({**LLAMA_CONFIG, **changed}).encode(), "model.safetensors": WEIGHTS}
    hub.add("org/odd", files if not changed else {**files, "tokenizer.json": b"{}"})
    before = paddock("pull", "org/odd", "--dry-run")
    assert before.code == 0 and ("Paddock cannot run it: org/odd: " + sentence in before.err if changed else "it has no tokenizer.json: Paddock cannot run it" in before.err)
    after = paddock("pull", "org/odd", "--reserve", "0")
    assert after.code == 0 and "warning: Paddock cannot run it: " in after.err and sentence in after.err
    assert sentence in paddock("show", "org/odd").out and sentence in paddock("show", "org/odd", "--json").json["model"]["problem"]


def test_full_disk_is_told_in_gib(paddock, hub):
    hub.add("org/tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf()})
    done = paddock("pull", "org/tiny-GGUF", "--reserve", "1000TiB")
    assert done.code == 8 and "needs 0.00 GiB more and 1024000.00 GiB are kept in reserve" in done.err


def test_damaged_model_is_called_so_and_not_run_until_it_is_repaired(paddock, hub):
    hub.add("org/big", {"big.Q4_0.gguf": tiny_gguf() + some_bytes(5 << 20)})
    assert paddock("pull", "org/big", "--reserve", "0").code == 0
    path = Path(paddock("show", "org/big", "--path").out.strip())
    raw = bytearray(path.read_bytes())
    raw[3 << 20] ^= 1
    path.write_bytes(raw)
    assert paddock("verify", "org/big").code == 7
    assert paddock("ls", "--json").json["models"][0]["state"] == "damaged"
    refused = paddock("run", "org/big", "hi")
    assert refused.code == 7 and "were not the published ones" in refused.err and "`paddock verify org/big:Q4_0 --repair`" in refused.err
    assert paddock("verify", "org/big", "--repair").code == 0
    assert paddock("ls", "--json").json["models"][0]["state"] == "ok"


def test_model_on_a_disk_that_is_away_is_offline_for_verify_and_no_damage(paddock, hub, tmp_path):
    hub.add("org/tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf()})
    root = tmp_path / "disk"
    root.mkdir()
    paddock("config", "set", "store.roots", str(root))
    assert paddock("pull", "org/tiny-GGUF", "--reserve", "0", "--root", str(root)).code == 0
    assert paddock("ls").code == 0
    os.rename(root, tmp_path / "away")
    done = paddock("verify", "--all")
    assert done.code == 0 and done.out == "org/tiny-GGUF:Q4_0: offline\n"
    named = paddock("verify", "org/tiny-GGUF")
    assert named.code == 7 and "is its disk mounted?" in named.err


def test_setting_comes_from_its_variable_and_says_so(paddock, monkeypatch, tmp_path):
    monkeypatch.setenv("PADDOCK_SERVE_PORT", "12001")
    monkeypatch.setenv("PADDOCK_STORE_ROOTS", str(tmp_path))
    paddock("config", "set", "serve.port", "12002")
    rows = {r["key"]: r for r in paddock("config", "--json").json["settings"]}
    assert (rows["serve.port"]["value"], rows["serve.port"]["origin"]) == (12001, "PADDOCK_SERVE_PORT")
    assert rows["store.roots"]["origin"] == "PADDOCK_STORE_ROOTS" and "disk 1: " in paddock("doctor").out
    monkeypatch.setenv("PADDOCK_SERVE_PORT", "seven")
    done = paddock("config")
    assert done.code == 2 and "error: PADDOCK_SERVE_PORT: serve.port takes a whole number, not 'seven'" in done.err
    monkeypatch.delenv("PADDOCK_SERVE_PORT")
    assert "error: serve.port is from 0 to 65535, not 99999\n" in paddock("config", "set", "serve.port", "99999").err


def test_variable_that_nobody_reads_is_named(paddock, monkeypatch):
    monkeypatch.setenv("PADDOCK_MAX_CTX", "4096")
    monkeypatch.setenv("PADDOCK_PORT", "8000")
    monkeypatch.setenv("PADDOCK_SERVE_PORT", "8000")
    done = paddock("ls", "--json")
    assert done.code == 0 and done.json["models"] == []
    assert done.err == (
        "warning: PADDOCK_MAX_CTX is set, and there is no such setting; PADDOCK_MAX_CTX_TOKENS is one\n"
        "warning: PADDOCK_PORT is for paddock-runner alone: `paddock` sets this itself; here it is PADDOCK_SERVE_PORT\n"
    )


def test_option_that_is_like_none_gets_no_far_fetched_advice(paddock):
    assert "`paddock pull --help` lists what there is" in paddock("pull", "--frob").err
    assert "did you mean --json?" in paddock("pull", "--jsn").err


@pytest.mark.usefixtures("fake_runner")
def test_running_model_is_found_by_its_repository_alone(paddock, hub):
    hub.add("org/tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf()})
    assert paddock("logs").code == 2 and "no server is running" in paddock("logs").err
    assert paddock("pull", "org/tiny-GGUF", "--reserve", "0").code == 0
    assert paddock("serve", "org/tiny-GGUF", "--port", "0").code == 0
    assert paddock("logs", "org/tiny-GGUF", "--json").json["name"] == "org/tiny-GGUF:Q4_0"
    assert paddock("logs", "tiny-GGUF").code == 0
    unit = paddock("serve", "org/tiny-GGUF", "--systemd").out
    state_file = Path(re.search(r'"--state-file" "([^"]*)"', unit)[1])
    assert '"--model"' in unit and state_file.parent.is_dir()
    assert paddock("stop", "tiny-GGUF").code == 0
    assert paddock("logs", "org/tiny-GGUF").code == 0
    assert paddock("logs", "org/other").code == 3


@pytest.mark.usefixtures("fake_runner")
def test_gateway_tells_the_contexts_of_models_that_are_not_loaded(paddock, hub, tmp_path):
    import urllib.request

    hub.add("org/folder", {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"})
    assert paddock("pull", "org/folder", "--reserve", "0").code == 0
    done = paddock("serve", "org/folder", "--on-demand", "--port", "0", "--ctx", "16", "--no-auth", "--json")
    assert done.code == 0, done.err
    with urllib.request.urlopen(done.json["server"]["url"] + "/v1/models", timeout=20) as answer:
        assert [m["context_length"] for m in json.load(answer)["data"]] == [16]
    assert paddock("ps").out.splitlines()[1].split()[2:6] == ["gateway", "-", "-", "-"]


def test_codex_is_told_to_speak_the_interface_it_still_knows():
    assert any('wire_api="responses"' in word for word in launch.AGENTS["codex"].words)


LOCAL = {
    "adapter": ({"adapter_config.json": b'{"base_model_name_or_path": "org/base"}', "adapter_model.safetensors": WEIGHTS}, 12, "this is an adapter (LoRA) for org/base, not a model"),
    "half": ({"config.json": CONFIG, "model-00001-of-00002.safetensors": WEIGHTS}, 7, "model has 1 of 2 shards, model-00002-of-00002.safetensors is missing"),
    "no-config": ({"model.safetensors": WEIGHTS}, 7, "config.json is missing, so this is no model folder"),
    "projector.gguf": (tiny_gguf(arch="clip"), 12, "this is a projector (the vision or audio part of a model), not a model"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("command", ["add", "fit"])
def test_path_that_holds_no_whole_model_is_one_sentence_and_what_to_do(paddock, tmp_path, name, command):
    files, code, sentence = LOCAL[name]
    path = tmp_path / name
    if isinstance(files, bytes):
        path.write_bytes(files)
    else:
        path.mkdir()
        for file, body in files.items():
            (path / file).write_bytes(body)
    done = paddock(command, str(path))
    assert done.code == code and done.err.splitlines()[0] == f"error: {path}: {sentence}" and done.err.splitlines()[1].startswith("hint:  ")


def test_show_tells_what_the_catalog_knows_of_a_model_that_is_not_here_and_what_only_the_hub_knows(paddock):
    pinned = paddock("show", "qwen3-8b", "--json").json["catalog"]
    assert pinned["size_bytes"] == 5027783488 and len(pinned["rev"]) == 40
    text = paddock("show", "qwen3-8b-fp8").out
    assert "not known before the hub is asked: `paddock ls --remote qwen3-8b-fp8`" in text and "not here: `paddock pull qwen3-8b-fp8` fetches it" in text
    assert "are told by the hub" in paddock("search", "--local", "qwen3-8b").err
    assert paddock("show", "qwen3-8b", "--path").code == 3


@pytest.mark.usefixtures("fake_runner")
def test_bench_uses_the_server_that_runs(paddock, tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(tiny_gguf())
    assert paddock("serve", str(path), "--port", "0", "--batch", "2").code == 0
    before = sorted((Path(os.environ["PADDOCK_HOME"]) / "logs").iterdir())
    done = paddock("bench", str(path), "--streams", "1,3", "--tokens", "4", "--prompt-tokens", "4", "--rounds", "1")
    assert done.code == 0 and "mine answers 2 at a time: further streams wait for each other" in done.err
    assert sorted((Path(os.environ["PADDOCK_HOME"]) / "logs").iterdir()) == before and "loading" not in done.err


@pytest.mark.usefixtures("fake_runner")
def test_llm_gets_a_folder_of_ours_that_names_the_model_and_holds_no_key(paddock, tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(tiny_gguf())
    told = paddock("launch", "llm", str(path), "--json").json
    folder = Path(told["env"]["LLM_USER_PATH"])
    assert folder.is_relative_to(Path(os.environ["PADDOCK_HOME"])) and told["env"]["LLM_MODEL"] == "mine"
    text = (folder / "extra-openai-models.yaml").read_text()
    assert json.loads(text)[0]["api_base"] == told["env"]["OPENAI_BASE_URL"] and told["env"]["OPENAI_API_KEY"] not in text


def test_page_of_the_hub_is_pulled_and_an_address_elsewhere_is_not(paddock, hub):
    hub.add("org/tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf(), "tiny.Q8_0.gguf": tiny_gguf(context=256)})
    address = f"{hub.url}/org/tiny-GGUF/blob/main/tiny.Q8_0.gguf"
    assert paddock("pull", address, "--reserve", "0").out.startswith("org/tiny-GGUF:Q8_0 is here")
    assert paddock("show", f"{hub.url}/org/tiny-GGUF/resolve/main/tiny.Q8_0.gguf", "--path").out.endswith("tiny.Q8_0.gguf\n")
    assert paddock("pull", f"{hub.url}/org/tiny-GGUF").code == 4
    refused = paddock("pull", "https://example.org/m.gguf")
    assert refused.code == 2 and "is not on the hub, so nothing says what its bytes should be" in refused.err and "`paddock add`" in refused.err


def test_memory_without_a_unit_is_asked_about(paddock, tmp_path):
    (tmp_path / "m.gguf").write_bytes(tiny_gguf())
    done = paddock("fit", str(tmp_path / "m.gguf"), "--vram", "24", "--arch", "sm_89")
    assert done.code == 2 and done.err == "error: --vram 24 are 24 bytes\nhint:  write the unit: --vram 24GiB\n"


def test_pull_of_what_is_here_says_that_nothing_was_fetched(paddock, hub):
    hub.add("org/tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf()})
    assert "verified 800 B" in paddock("pull", "org/tiny-GGUF", "--reserve", "0").err
    again = paddock("pull", "org/tiny-GGUF", "--reserve", "0")
    assert "nothing was fetched; `paddock verify org/tiny-GGUF:Q4_0` reads every byte again" in again.err and "verified" not in again.err
    assert paddock("pull", "org/tiny-GGUF", "--connections", "0").err == "error: --connections is from 1 to 32, not 0\n"
