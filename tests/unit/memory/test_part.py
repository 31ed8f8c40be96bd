"""The part of a device that reads long prompts: who has one, how large it is, and that it takes what is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.part import PART_TOKENS
from paddock_runner.memory.plan import PlanRequest, cpu_facts, cuda_facts, plan, token_buckets
from paddock_runner.pack.library import find_pack

from tests.golden.test_tiny import TINY

GROUPS = ("state", "pinned", "activations", "scratch", "windows")


def opened(name: str):
    checkpoint = open_checkpoint(TINY / name)
    blueprint = read_blueprint(checkpoint)
    return blueprint, tensors_by_name(checkpoint, blueprint)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3.5"])
def test_what_it_takes_is_what_was_planned(name):
    blueprint, views = opened(name)
    taken = []
    for share in (0.0, 0.5):
        found = plan(blueprint, views, PlanRequest(128, 3, cpu_facts(2), "f32", 96, 8, prefill_share=share))
        assert (found.sizes.part_processors, found.sizes.part_tokens) == ((1, 96) if share else (0, 0))
        device = build_device(Assembly(find_pack("cpu"), found.sizes, "f32", n_threads=2), blueprint, views)
        try:
            assert (device.aside is not None) == bool(share)
            assert {g: device.allocated.get(g, 0) for g in GROUPS} == {g: found.group_bytes(g) for g in GROUPS}
        finally:
            device.close()
        taken.append(found.total_bytes)
    assert taken[0] < taken[1]


def test_a_share_becomes_so_many_processors_and_never_all_or_none():
    blueprint, views = opened("llama")
    sizes = {(n, share): plan(blueprint, views, PlanRequest(128, 3, cpu_facts(n), prefill_share=share)).sizes.part_processors for n, share in ((1, 0.5), (2, 0.5), (2, 0.9), (8, 0.5), (8, 0.05), (8, 0.9), (8, 0.0))}
    assert sizes == {(1, 0.5): 0, (2, 0.5): 1, (2, 0.9): 1, (8, 0.5): 4, (8, 0.05): 0, (8, 0.9): 7, (8, 0.0): 0}


def test_nobody_said():
    blueprint, views = opened("llama")
    cpu = plan(blueprint, views, PlanRequest(128, 3, cpu_facts(4))).sizes
    assert (cpu.part_processors, cpu.part_tokens) == (2, PART_TOKENS["cpu"])
    assert plan(blueprint, views, PlanRequest(128, 3, cuda_facts(132))).sizes.part_tokens == 0


def test_one_request_at_a_time_has_nobody_beside_it():
    blueprint, views = opened("llama")
    assert plan(blueprint, views, PlanRequest(128, 1, cpu_facts(4))).sizes.part_tokens == 0


def test_deterministic_answers_have_none():
    blueprint, views = opened("llama")
    assert plan(blueprint, views, PlanRequest(128, 3, cpu_facts(4), prefill_share=0.5, is_invariant=True)).sizes.part_tokens == 0


def test_a_gpu_has_graphs_for_both_sides():
    blueprint, views = opened("llama")
    request = PlanRequest(128, 16, cuda_facts(132), max_step_tokens=2560)
    lone, parted = plan(blueprint, views, request), plan(blueprint, views, replace(request, prefill_share=0.7))
    assert parted.sizes.part_processors == 92 and parted.sizes.part_tokens == PART_TOKENS["cuda"]
    n = len([b for b in token_buckets(2560) if b <= 512]) + sum((b <= 16) + (2 <= b <= 16) for b in token_buckets(2560)) + len(token_buckets(1024))
    each = lone.group_bytes("graphs") / (len(token_buckets(2560)) + sum((b <= 16) + (2 <= b <= 16) for b in token_buckets(2560)))
    assert parted.group_bytes("graphs") == pytest.approx(lone.group_bytes("graphs") + n * each, rel=1e-6)
