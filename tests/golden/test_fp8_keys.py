"""Keys and values in FP8: every kind of attention stays near its reference, and heads of any size lose no more than others do."""

from __future__ import annotations

import json

import numpy as np
import pytest
from paddock_runner.blueprint.kv_scales import kv_scales
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, Kept, build_device, fill_device
from paddock_runner.engine.scales import measure, stored
from paddock_runner.errors import FileError, PackError
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.state import StateSizes, largest_window
from paddock_runner.model.site import Site
from paddock_runner.pack.device import Device
from paddock_runner.pack.library import find_pack, load_pack
from safetensors.numpy import load_file

from tests.golden.teacher import Teacher
from tests.golden.test_latent import write
from tests.golden.test_models import open_device
from tests.golden.test_tiny import TINY, log_softmax

COARSER = 24
"""How many times as far off as keys in bf16: FP8 has four bits less, and errors meet."""
KINDS = {"llama": COARSER, "gemma3": COARSER, "gemma4": COARSER, "deepseek-v2": COARSER, "mistral-window": COARSER, "exaone4": COARSER, "lfm2": COARSER, "qwen3-next": COARSER, "qwen4-exp": 100}
"""Full attention, windows, layers that read another's keys, latents, hybrids; of the last, errors choose other blocks of tokens."""


def answers(device, ids: list[int], n_prompt: int = 20, chunk: int = 7) -> list[dict[int, float]]:
    """Log-probabilities of the best tokens after every position from the prompt's last on."""
    teacher = Teacher(device, chunk)
    return [teacher.begin(ids[:n_prompt]), *(teacher.follow(i) for i in ids[n_prompt:])]


def distance(got: list[dict[int, float]], wanted: np.ndarray) -> float:
    return max(abs(row[i] - p) for row, best in zip(wanted, got, strict=True) for i, p in best.items())


@pytest.mark.parametrize("name", list(KINDS))
def test_a_family_stays_as_near_as_four_bits_less_allow(name):
    golden = np.load(TINY / name / "golden.npz")
    ids, far = golden["ids"].tolist(), {}
    wanted = log_softmax(golden["logits"])[19:]
    for kv in ("bf16", "fp8", "bf16,window=fp8"):
        device = open_device(TINY / name, kv, max_isa=2)
        try:
            far[kv] = distance(answers(device, ids), wanted)
        finally:
            device.close()
    assert far["bf16"] < far["fp8"] < KINDS[name] * far["bf16"]
    has_windows = name in ("gemma3", "gemma4", "mistral-window", "exaone4")
    assert (far["bf16,window=fp8"] == far["bf16"]) != has_windows


def resized(path, factors: np.ndarray, more: dict | None = None):
    """The tiny Llama with keys and values of every KV head times its factor, and what reads them divided by it: the same model."""
    config = json.loads((TINY / "llama/config.json").read_text())
    group, width = config["num_attention_heads"] // config["num_key_value_heads"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    of_kv, of_q = np.repeat(factors, width).astype(np.float32), np.repeat(factors, group * width).astype(np.float32)
    tensors = {}
    for name, w in load_file(TINY / "llama/model.safetensors").items():
        part = name.split(".")[-2]
        w = w * of_kv[:, None] if part in ("k_proj", "v_proj") else w / of_q[:, None] if part == "q_proj" else w / of_q if part == "o_proj" else w
        tensors[name] = ("F32", w)
    path.mkdir(exist_ok=True)
    write(path / "model.safetensors", tensors | (more or {}))
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_heads_of_any_size_lose_the_same_bits(tmp_path):
    """Factors are powers of two, so every number is the same but for its exponent: not one bit may differ."""
    n = json.loads((TINY / "llama/config.json").read_text())["num_key_value_heads"]
    ids = np.load(TINY / "llama/golden.npz")["ids"].tolist()
    found = []
    for factors in (np.ones(n), 2.0 ** np.resize([13, -1], n)):
        device = open_device(resized(tmp_path / str(len(found)), factors), "fp8", max_isa=2)
        found.append((answers(device, ids), device.kv_format))
        device.close()
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]


def test_scales_are_the_same_after_a_restart_and_nothing_is_left_of_how_they_were_found():
    names = []
    for _ in range(2):
        device = open_device(TINY / "llama", "fp8")
        names.append(device.kv_format)
        assert not any(device.read(device.kv_address, device.kv_bytes)) and device.done[0] == 0
        assert not any(device.read(device.state.page_table, 4 * device.state.slot_pages))
        device.close()
    assert names[0] == names[1] and names[0].startswith("fp8 ")


def test_scales_do_not_depend_on_whose_pages_layers_with_a_window_use():
    checkpoint = open_checkpoint(TINY / "gemma3")
    blueprint = read_blueprint(checkpoint)
    views, names = tensors_by_name(checkpoint, blueprint), []
    for n_window_pages in (0, 33):
        window = largest_window(blueprint) if n_window_pages else 0
        sizes = StateSizes(1, 512, 16, 66, blueprint.n_vocab, 64, 1, window_tokens=window, n_window_pages=n_window_pages)
        device = build_device(Assembly(find_pack("cpu"), sizes, "fp8"), blueprint, views)
        names.append(device.kv_format)
        if device.windows is not None:
            assert not any(device.read(device.windows.kv, n_window_pages * device.windows.kv_page_stride))
            assert not any(device.read(device.windows.page_table, 4 * sizes.slot_pages))
        device.close()
    assert names[0] == names[1]


def test_a_pool_without_room_to_measure_says_so():
    blueprint = read_blueprint(open_checkpoint(TINY / "llama"))
    device = open_device(TINY / "llama", "f16")
    device.kv_bytes = device.kv_page_bytes
    try:
        with pytest.raises(PackError, match="too small to measure"):
            measure(device, blueprint, Site({}, {}, (), (), {}), StateSizes(1, 512, 16, 33, blueprint.n_vocab, 64, 1), (0, 0))
    finally:
        device.close()


def kept(path):
    """(the checkpoint's own scales, its blueprint, its tensors)."""
    checkpoint = open_checkpoint(path)
    blueprint = read_blueprint(checkpoint)
    return kv_scales(checkpoint.tensors, blueprint), blueprint, tensors_by_name(checkpoint, blueprint)


@pytest.mark.parametrize("stem", ["self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.{}_proj.output_scale"])
def test_scales_of_the_checkpoint_are_used_as_they_are(tmp_path, stem):
    config = json.loads((TINY / "llama/config.json").read_text())
    n, layers = config["num_key_value_heads"], range(config["num_hidden_layers"])
    numbers = {"k": np.float32([0.03]), "v": np.linspace(0.02, 0.05, n, dtype=np.float32)}
    more = {f"model.layers.{i}.{stem.format(part, part)}": ("F32", x) for i in layers for part, x in numbers.items()}
    pairs, blueprint, views = kept(resized(tmp_path, np.ones(n), more))
    found = stored(pairs, blueprint)
    assert all(found[i].k.tolist() == [numbers["k"][0]] * n and found[i].v.tolist() == numbers["v"].tolist() for i in layers)
    device = Device(load_pack(find_pack("cpu")))
    golden = np.load(TINY / "llama/golden.npz")
    try:
        fill_device(device, StateSizes(1, 512, 16, 33, blueprint.n_vocab, 64, 1), Kept("fp8", pairs), blueprint, views)
        assert 0.05 < distance(answers(device, golden["ids"].tolist()), log_softmax(golden["logits"])[19:]) < 2
    finally:
        device.close()


def test_scales_that_are_missing_or_no_scales_are_refused_by_name(tmp_path):
    n = json.loads((TINY / "llama/config.json").read_text())["num_key_value_heads"]
    n_layers = json.loads((TINY / "llama/config.json").read_text())["num_hidden_layers"]
    one = {f"model.layers.{i}.self_attn.{p}_scale": ("F32", np.float32([0.1])) for i in range(n_layers) for p in "kv"}
    for number, (change, words) in enumerate(
        (
            ({"model.layers.1.self_attn.v_scale": None}, "layer 1 has no v_scale"),
            ({"model.layers.0.self_attn.k_scale": ("F32", np.ones(n + 1, np.float32))}, f"one number or one for each of {n} heads"),
            ({"model.layers.0.self_attn.k_scale": ("F32", np.float32([0]))}, "expected positive numbers"),
        )
    ):
        more = {k: v for k, v in {**one, **change}.items() if v is not None}
        with pytest.raises(FileError, match=words):
            pairs, blueprint, _ = kept(resized(tmp_path / str(number), np.ones(n), more))
            stored(pairs, blueprint)


def test_keys_that_are_no_numbers_are_refused(tmp_path):
    n = json.loads((TINY / "llama/config.json").read_text())["num_key_value_heads"]
    path = resized(tmp_path, np.full(n, 2.0**127))
    _, blueprint, views = kept(path)
    with pytest.raises(PackError, match="no numbers"):
        build_device(Assembly(find_pack("cpu"), StateSizes(1, 512, 16, 33, blueprint.n_vocab, 64, 1), "fp8"), blueprint, views)
