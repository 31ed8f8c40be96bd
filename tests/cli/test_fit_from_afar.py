"""Fit by headers: what a remote model is asked for, and that the answer is that of the files here."""

from __future__ import annotations

import json

import pytest

from tests.checkpoint_bytes import gguf_model, safetensors
from tests.hostile.test_safetensors_cases import LLAMA_CONFIG, NAMES, shard

N_SHARDS = 11


def plans(paddock, far, near, *more):
    found = []
    for word in (far, near):
        done = paddock("fit", word, "--device", "cpu", *more, "--json")
        assert done.code == 0, done.err
        found.append(done.json["reports"][0]["plan"])
    return found


def big_vocabulary(n_tokens):
    """A llama whose header is longer than the first window."""
    metadata = {"general.architecture": "llama", "general.name": "wide"}
    numbers = {"context_length": 256, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16}
    metadata |= {f"llama.{k}": v for k, v in numbers.items()} | {"llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2"}
    metadata["tokenizer.ggml.tokens"] = [f"token-{i:028d}" for i in range(n_tokens)]
    shapes = {"token_embd.weight": (n_tokens, 64), "output_norm.weight": (64,), "blk.0.attn_norm.weight": (64,), "blk.0.ffn_norm.weight": (64,)}
    shapes |= {"blk.0.attn_q.weight": (64, 64), "blk.0.attn_k.weight": (32, 64), "blk.0.attn_v.weight": (32, 64), "blk.0.attn_output.weight": (64, 64)}
    shapes |= {"blk.0.ffn_gate.weight": (96, 64), "blk.0.ffn_up.weight": (96, 64), "blk.0.ffn_down.weight": (64, 96)}
    return gguf_model(metadata, shapes)


def test_long_header_of_a_gguf_costs_at_most_three_requests(paddock, hub, tmp_path):
    path = tmp_path / "wide.F32.gguf"
    path.write_bytes(big_vocabulary(250_000))
    hub.add("org/wide", {path.name: path.read_bytes()})
    far, near = plans(paddock, "org/wide", str(path))
    assert far == near
    asked = hub.data_requests()
    assert 2 <= len(asked) <= 3 and hub.served_bytes < path.stat().st_size / 2


@pytest.mark.parametrize("n_shards", [1, N_SHARDS])
def test_shards_cost_one_short_request_each(paddock, hub, tmp_path, n_shards):
    names = [f"model-{i + 1:05d}-of-{n_shards:05d}.safetensors" for i in range(n_shards)] if n_shards > 1 else ["model.safetensors"]
    files = {"config.json": json.dumps(LLAMA_CONFIG).encode()}
    for number, name in enumerate(names):
        mine = [t for i, t in enumerate(NAMES) if i % n_shards == number]
        files[name] = shard(mine) if mine else safetensors({}, 0)
    if n_shards > 1:
        files["model.safetensors.index.json"] = json.dumps({"weight_map": {t: names[i % n_shards] for i, t in enumerate(NAMES)}}).encode()
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, body in files.items():
        (folder / name).write_bytes(body)
    hub.add("org/folder", files)
    far, near = plans(paddock, "org/folder", str(folder), "--ctx", "128")
    assert far == near
    weights = [a for a in hub.data_requests() if ".safetensors?" in a.path]
    assert len(weights) == n_shards and max(a.n_bytes for a in weights) <= 128 << 10


def test_long_header_of_a_safetensors_file_is_asked_for_by_its_length():
    from paddock_runner.files.source import RemoteFile

    head = (300_000).to_bytes(8, "little") + b"{" + b" " * 299_999
    asked = []

    def read(offset, n_bytes):
        asked.append((offset, n_bytes))
        return (head + bytes(1 << 20))[offset : offset + n_bytes]

    source = RemoteFile("model.safetensors", read, len(head) + (1 << 20))
    source.grow()
    assert asked == [(0, 128 << 10), (128 << 10, 300_008 - (128 << 10))]


def test_answer_says_what_it_was_made_from(paddock, hub):
    hub.add("org/folder", {"config.json": json.dumps(LLAMA_CONFIG).encode(), "model.safetensors": shard(NAMES)})
    done = paddock("fit", "org/folder", "--vram", "24GiB", "--arch", "sm_89", "--ctx", "128", "--json")
    assert done.code == 0
    report = done.json["reports"][0]
    assert "in 2 request(s)" in report["notes"][0] and report["device"]["source"] == "told"
    assert all(line["source"] for line in report["plan"]["lines"])
    assert sum(line["bytes"] for line in report["plan"]["lines"]) == report["plan"]["total_bytes"]


def test_smaller_quants_of_the_repository_that_fit_are_named_as_commands(paddock, hub):
    from tests.cli.test_tutorial import qwen3_8b
    from tests.fakes.hub import Hollow

    small = {"m-Q2_K.gguf": Hollow(b"GGUF", 3_281_728_416), "m-Q3_K_M.gguf": Hollow(b"GGUF", 3_924_162_208), "m-Q8_0.gguf": Hollow(b"GGUF", 8_709_518_112)}
    hub.add("org/eight", {"m-Q4_K_M.gguf": qwen3_8b(), **small})
    words = ("fit", "org/eight:Q4_K_M", "--vram", "5GiB", "--arch", "sm_89", "--ctx", "512")
    done = paddock(*words, "--json")
    assert done.code == 9
    found = done.json["reports"][0]["alternatives"]
    assert [a["ref"] for a in found if a["change"] == "quant"] == ["org/eight:Q3_K_M", "org/eight:Q2_K"]
    said = paddock(*words).err
    assert "\n    paddock fit org/eight:Q3_K_M --ctx 512 --arch sm_89 --vram 5GiB\n" in said
    assert not any(a.server == "data" and "Q3_K" in a.path for a in hub.asked)
