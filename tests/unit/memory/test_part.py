"""The part of a device that reads long prompts: who has one, how large it is, and that it takes what is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paddock_runner.blueprint.blueprint import Latent
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.errors import UnsupportedError
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.part import MOST_TILES, PART_TOKENS, TILE_TOKENS, can_part, part_tokens
from paddock_runner.memory.plan import (
    BESIDE_COUNTER_BYTES,
    GRAPH_BYTES_PER_PANEL_LAUNCH,
    PARTS_BYTES,
    PlanRequest,
    cpu_facts,
    cuda_facts,
    graph_bytes,
    plan,
    token_buckets,
)
from paddock_runner.memory.solve import solver
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack.device import Device
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
    assert plan(blueprint, views, PlanRequest(128, 3, cuda_facts(132, arch="sm_90a"))).sizes.part_processors == 84
    assert plan(blueprint, views, PlanRequest(128, 3, cuda_facts(132, arch="sm_86"))).sizes.part_tokens == 0


def test_a_part_is_left_out_where_its_memory_is_pages_that_are_lacking():
    blueprint, views = opened("llama")
    request = PlanRequest(128, 16, cuda_facts(132, arch="sm_90a"))
    parted, lone = (plan(blueprint, views, replace(request, prefill_share=share)).peak_bytes for share in (None, 0.0))
    assert lone < parted
    tight = solver(blueprint, views, lone, "cuda")
    assert not tight.fits(request)
    found = tight.shrunk(request)
    assert found is not None and tight.plan(found).sizes.part_tokens == 0 and tight.plan(found).sizes.n_pages == plan(blueprint, views, request).sizes.n_pages
    assert tight.shrunk(replace(request, prefill_share=0.667)) is None


def test_models_whose_kernels_never_ran_on_a_part_of_a_gpu_have_none():
    blueprint, _ = opened("llama")
    layer = blueprint.layers[0]
    for other in (replace(layer, has_streams=True), replace(layer, attention=replace(layer.attention, latent=Latent(8, 4, 8, 8)))):
        model = replace(blueprint, layers=(other, *blueprint.layers[1:]))
        sizes = StateSizes(4, 128, 32, 64, 64, 64, 4)
        assert not can_part(model, sizes, "cuda", False) and can_part(model, sizes, "cpu", False)


def test_a_device_that_cannot_be_parted_has_steps_in_turn(monkeypatch, caplog):
    def refuse(device: Device, n: int) -> Device:
        raise UnsupportedError("part: the driver lacks green contexts")

    monkeypatch.setattr(Device, "part", refuse)
    blueprint, views = opened("llama")
    found = plan(blueprint, views, PlanRequest(128, 3, cpu_facts(2), "f32", 96, 8))
    assert found.sizes.part_tokens
    with caplog.at_level("INFO", logger="paddock"):
        device = build_device(Assembly(find_pack("cpu"), found.sizes, found.kv_format, n_threads=2), blueprint, views)
    assert device.aside is None and "lacks green contexts" in caplog.text
    device.close()


def test_a_slice_of_a_device_that_has_fewer_processors_than_the_part_has_steps_in_turn(caplog):
    blueprint, views = opened("llama")
    found = plan(blueprint, views, PlanRequest(128, 3, cpu_facts(8), "f32", 96, 8))
    assert found.sizes.part_processors == 4
    with caplog.at_level("INFO", logger="paddock"):
        device = build_device(Assembly(find_pack("cpu"), found.sizes, found.kv_format, n_threads=2), blueprint, views)
    assert device.aside is None and "2 are there" in caplog.text
    device.close()


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
    assert parted.sizes.part_processors == 92 and parted.sizes.part_tokens >= PART_TOKENS["cuda"]
    n = len([b for b in token_buckets(2560) if b <= 512]) + sum((b <= 16) + (2 <= b <= 16) for b in token_buckets(2560)) + len(token_buckets(parted.sizes.part_tokens)) + 1
    each = lone.group_bytes("graphs") / (len(token_buckets(2560)) + sum((b <= 16) + (2 <= b <= 16) for b in token_buckets(2560)))
    assert parted.group_bytes("graphs") == pytest.approx(lone.group_bytes("graphs") + n * each + BESIDE_COUNTER_BYTES + PARTS_BYTES, rel=1e-6)


def test_steps_of_a_gpu_are_as_long_as_few_are_idle_in_the_last_turn():
    blueprint, _ = opened("llama")
    for n in (40, 84, 88, 92):
        tokens = part_tokens(blueprint, "cuda", n)
        items = blueprint.layers[0].attention.n_heads * tokens // TILE_TOKENS
        assert PART_TOKENS["cuda"] <= tokens <= MOST_TILES * TILE_TOKENS and tokens % TILE_TOKENS == 0
        assert tokens / -(-items // n) >= PART_TOKENS["cuda"] / -(-(blueprint.layers[0].attention.n_heads * PART_TOKENS["cuda"] // TILE_TOKENS) // n)


def test_both_sides_unpack_weights_panel_by_panel():
    blueprint, views = opened("llama")
    request = PlanRequest(128, 16, cuda_facts(132), max_step_tokens=2560)
    lone, parted = (plan(blueprint, views, replace(request, prefill_share=share)).sizes for share in (0.0, 0.7))
    n = {sizes.part_tokens: (graph_bytes(blueprint, sizes, 100) - graph_bytes(blueprint, sizes)) // GRAPH_BYTES_PER_PANEL_LAUNCH for sizes in (lone, parted)}
    of_part = sum(b > 256 for b in token_buckets(parted.part_tokens))
    assert n == {0: 100 * sum(b > 256 for b in token_buckets(2560)), parted.part_tokens: n[0] + 100 * (2 + of_part)}
