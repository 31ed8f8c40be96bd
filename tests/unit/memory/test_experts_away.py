"""Experts in host memory: what the places take, how many fit, and the split that is offered where a mixture does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paddock_runner.blueprint.blueprint import Attention, Blueprint, Experts, FeedForward, Layer, Rope
from paddock_runner.blueprint.names import expected_shapes
from paddock_runner.errors import UsageError, WontFit
from paddock_runner.files.view import TensorView
from paddock_runner.memory.experts import expert_layers
from paddock_runner.memory.plan import PlanRequest, cpu_facts, cuda_facts
from paddock_runner.memory.solve import require_fit, solver

GIB = 1 << 30


def mixture(n_layers: int = 12, n_experts: int = 64):
    attention = Attention(16, 4, 128, 128**-0.5, Rope(1e6, 128))
    layer = Layer(attention, FeedForward(0), experts=Experts(n_experts, 8, 768))
    blueprint = Blueprint("qwen3moe", 1024, 2048, 40960, (layer,) * n_layers, 1e-6, False, name="big")
    views = {}
    for name, shape in expected_shapes(blueprint).items():
        kind = "bf16" if len(shape) == 2 else "f32"
        views[name] = TensorView(name, shape, kind, Path("x"), 0, int(np.prod(shape)) * (2 if kind == "bf16" else 4))
    return blueprint, views


def test_places_are_the_layers_own_and_those_that_a_step_may_need_besides():
    sizes = {f"layers.{i}.experts.{kind}.{e}.weight": 1000 + i for i in (0, 5) for kind in ("gate", "up", "down") for e in range(8 + 2 * i)}
    x = expert_layers(sizes | {"layers.0.router.weight": 99})
    assert [(y.prefix, y.n_experts, y.n_bytes) for y in x.layers] == [("layers.0.experts.", 8, 3072), ("layers.5.experts.", 18, 3072)]
    assert x.layers[0].offsets == {"gate": 0, "up": 1024, "down": 2048} and x.stride == 3072 and x.most == 18
    assert x.staging(3) == (5, 15) and x.staging(18) == (0, 0)
    places = x.device_bytes(10) - sum(y.cache_bytes(10) for y in x.layers)
    assert places == (8 + 10 + 0 + 8) * 3072
    assert x.host_bytes == 26 * 3072 + 2 * 256


def test_as_many_places_as_bytes_allow_and_no_host_memory_when_all_find_one():
    x = expert_layers({f"layers.{i}.experts.{kind}.{e}.weight": 1 << 20 for i in range(6) for kind in ("up", "down") for e in range(16)})
    for n in (1, 2, 9, 15):
        assert x.slots_in(x.device_bytes(n)) == n and (n == 1 or x.slots_in(x.device_bytes(n) - 1) == n - 1)
    assert x.slots_in(x.device_bytes(16)) == 0 and x.slots_in(1 << 50) == 0
    with pytest.raises(UsageError, match=r"0\.00 GiB of device memory were asked for experts, m needs 0\.07 GiB at the least"):
        x.slots_in(1 << 20, "m")
    with pytest.raises(UsageError, match="m has none"):
        expert_layers({"layers.0.up.weight": 5}).slots_in(1 << 30, "m")


def test_a_mixture_that_does_not_fit_is_offered_the_largest_split_that_does():
    model, request = mixture(), PlanRequest(4096, 4, cuda_facts(132, 4 * GIB, 4 * GIB))
    answer = solver(*model, 4 * GIB, "cuda")
    with pytest.raises(WontFit, match=r"it fits with --expert-vram-gib 1\.\d\d \(\d+ of 64 experts of a layer on the device, 6\.75 GiB of host memory\)") as caught:
        require_fit(answer, request)
    (split,) = [x for x in caught.value.facts["alternatives"] if x["change"] == "expert_vram_gib"]
    asked = replace(request, expert_bytes=int(split["expert_vram_gib"] * GIB), max_step_tokens=0)
    assert asked.max_step_tokens == 8192
    found = require_fit(answer, asked)
    assert found.sizes.n_expert_slots == split["n_expert_slots"] >= 8
    assert found.total_bytes <= 4 * GIB < found.total_bytes + 13 * answer.weights.experts.stride + GIB // 100
    assert found.host_bytes == split["host_bytes"] and found.group_bytes("experts") == answer.weights.experts.device_bytes(split["n_expert_slots"])
    assert found.group_bytes("weights") < GIB // 2


def test_on_the_cpu_both_lie_in_the_same_memory_and_no_split_is_offered():
    model = mixture()
    answer, request = solver(*model, 4 * GIB), PlanRequest(4096, 4, cpu_facts(2))
    assert not [x for x in answer.alternatives(request) if x["change"] == "expert_vram_gib"]
    found = answer.plan(replace(request, expert_bytes=2 * GIB))
    assert found.host_bytes == 0 and found.group_bytes("host experts") == answer.weights.experts.host_bytes
