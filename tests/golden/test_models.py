"""Real models through the real pack against the recorded references (rules: README.md of the golden folder)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.state import StateSizes, state_layout
from paddock_runner.pack.library import find_pack

from tests.golden.requant import requantise
from tests.golden.teacher import Teacher

MODELS = {
    "smollm2-135m-instruct-q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m-q4_k_m": "gemma3-270m-q4_k_m.gguf",
    "qwen2.5-coder-0.5b-instruct-q4_k_m": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}
CTX_TOKENS, CHUNK = 512, 16  # a small chunk, so that prefill crosses chunks and pages


def open_device(path: Path, kv_format: str = "f32", chunk: int = 64, max_isa: int = 0):
    checkpoint = open_checkpoint(path)
    blueprint = read_blueprint(checkpoint)
    views = tensors_by_name(checkpoint, blueprint)
    sizes = StateSizes(1, CTX_TOKENS, 16, CTX_TOKENS // 16 + 1, blueprint.n_vocab, chunk, 1, recurrent_bytes=state_layout(blueprint).slot_bytes)
    return build_device(Assembly(find_pack("cpu"), sizes, kv_format, max_isa=max_isa), blueprint, views)


def top5(case: dict) -> list:
    """Per step [[token, log-probability, text], ...], whichever of the two spellings the reference uses."""
    return case["steps_top5"] if "steps_top5" in case else [step["top5"] for step in case["steps"]]


def deviations(teacher: Teacher, case: dict) -> list[tuple[float, bool, float]]:
    """Per step: largest |difference of log-probability| over the reference's top five, same argmax, the reference's margin."""
    found = []
    best = teacher.begin(case["prompt_ids"])
    for step, token in zip(top5(case), case["generated_ids"], strict=True):
        floor = min(best.values())
        worst = max(abs(p - best.get(i, min(floor, p))) if i in best else max(0.0, p - floor) for i, p, _ in step)
        found.append((worst, max(best, key=best.get) == step[0][0], step[0][1] - step[1][1]))
        best = teacher.follow(token)
    return found


def reference(shared_dir: Path, name: str) -> dict:
    return {c["id"]: c for c in json.loads((shared_dir / "golden" / f"{name}.json").read_text())["cases"]}


def peer_deviations(truth: dict, peer: dict) -> list[float]:
    """llama.cpp's own distance from the truth, per step, while its free-running answer is still on the truth's path."""
    found = []
    for mine, theirs, a, b in zip(top5(truth), top5(peer), truth["generated_ids"], peer["generated_ids"], strict=True):
        known = {i: p for i, p, _ in theirs}
        found.append(max((abs(p - known[i]) for i, p, _ in mine if i in known), default=0.0))
        if a != b:
            break
    return found


@pytest.mark.models
@pytest.mark.parametrize("name", MODELS)
def test_quantised_model_is_as_true_as_one_that_dequantises_and_truer_than_llama_cpp(name, shared_dir, models_dir):
    truth, peer = reference(shared_dir, f"{name}.hf_fp32"), reference(shared_dir, f"{name}.llamacpp")
    device = open_device(models_dir / MODELS[name])
    try:
        teacher = Teacher(device, CHUNK)
        ours_sum = peer_sum = 0.0
        for key, case in truth.items():
            steps, theirs = deviations(teacher, case), peer_deviations(case, peer[key])
            assert max(d for d, _, _ in steps) <= 0.15, key
            assert all(same for _, same, margin in steps if margin > 0.3), key
            ours_sum += sum(d for d, _, _ in steps[: len(theirs)])
            peer_sum += sum(theirs)
            along_peer = deviations(teacher, peer[key])
            # 0.8 as the reference's rule says; where llama.cpp itself is that far from the truth, we may be as far from it
            assert max(d for d, _, _ in along_peer) <= max(0.8, max(theirs) + 0.05), key
            assert all(same for _, same, margin in along_peer if margin > 1.0), key
        assert ours_sum < peer_sum, f"ours {ours_sum:.3f}, llama.cpp {peer_sum:.3f}"
    finally:
        device.close()


@pytest.mark.models
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_requantised_smollm2_passes_its_reference(kind, shared_dir, models_dir, tmp_path):
    path = requantise(models_dir / MODELS["smollm2-135m-instruct-q4_1"], tmp_path / f"{kind}.gguf", GGMLQuantizationType[kind])
    device = open_device(path)
    try:
        teacher = Teacher(device, CHUNK)
        for key, case in reference(shared_dir, f"requant_smollm2-135m-{kind}.llamacpp").items():
            steps = deviations(teacher, case)
            limit, margin_limit = (0.15, 0.3) if kind in ("F16", "BF16") else (0.8, 1.0)
            assert max(d for d, _, _ in steps) <= limit, key
            assert all(same for _, same, margin in steps if margin > margin_limit), key
    finally:
        device.close()


@pytest.mark.models
def test_smollm2_in_f16_gives_the_same_greedy_tokens_as_fp32(shared_dir, models_dir, tmp_path):
    path = requantise(models_dir / MODELS["smollm2-135m-instruct-q4_1"], tmp_path / "f16.gguf", GGMLQuantizationType.F16)
    device = open_device(path)
    try:
        teacher = Teacher(device, CHUNK)
        for key, case in reference(shared_dir, "smollm2-135m-instruct-q4_1.hf_fp32").items():
            best, drawn = teacher.begin(case["prompt_ids"]), []
            for _ in range(32):
                drawn.append(max(best, key=best.get))
                assert drawn[-1] == teacher.token
                best = teacher.follow(drawn[-1])
            assert drawn == case["generated_ids"], key
    finally:
        device.close()
