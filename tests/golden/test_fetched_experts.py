"""Mixtures whose experts lie in host memory, with fewer places on the device than experts: the same bits as with all of them there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Kept, fill_device
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.experts import CACHE_HEAD_WORDS
from paddock_runner.memory.plan import PlanRequest, cpu_facts, plan, weight_sizes
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device
from paddock_runner.pack.library import find_pack, load_pack

from tests.golden.teacher import Teacher
from tests.golden.test_tiny import TINY

# Biases and clamps, a shared expert, experts beside a feed-forward, no gates, latent attention, a delta net, blocks of 4 bits.
FAMILIES = ["qwen3-moe", "mixtral", "gpt-oss", "gpt-oss-mxfp4", "gemma4-moe", "nemotron-h", "deepseek-v3", "qwen3.5-moe", "granite-moe"]


def opened(name: str):
    checkpoint = open_checkpoint(TINY / name)
    blueprint = read_blueprint(checkpoint)
    return blueprint, tensors_by_name(checkpoint, blueprint)


def held(device, experts):
    """Which experts are in each layer's places; their bytes are what host memory has."""
    for cache in experts.caches.values():
        words = np.frombuffer(device.read(cache.cache, 4 * (CACHE_HEAD_WORDS + 5 * cache.n_experts + 2 * cache.n_slots)), np.int32)
        slots = (words[CACHE_HEAD_WORDS + 5 * cache.n_experts :][: cache.n_slots] - 1).tolist()
        for slot, expert in enumerate(slots):
            assert device.read(cache.slots + slot * cache.stride, cache.n_bytes) == device.read(cache.home + expert * cache.stride, cache.n_bytes)
        yield slots


@pytest.mark.parametrize("name", [n for n in FAMILIES if (TINY / n).exists()])
def test_answers_are_the_same_however_few_experts_have_a_place(name):
    blueprint, views = opened(name)
    weights = weight_sizes(blueprint, views)
    ids = np.load(TINY / name / "golden.npz")["ids"].tolist()
    request = PlanRequest(256, 1, cpu_facts(2), "f32", max_step_tokens=64, prefill_share=0.0)
    said = []
    for n_slots in (0, 1, weights.experts.most // 2):
        found = plan(blueprint, views, replace(request, expert_bytes=weights.experts.device_bytes(n_slots) if n_slots else None))
        device = Device(load_pack(find_pack("cpu")), 0, 2, 2)
        try:
            experts = fill_device(device, replace(found.sizes, n_expert_slots=n_slots), Kept(found.kv_format), blueprint, views)
            assert experts is None or all(slots == list(range(len(slots))) for slots in held(device, experts))
            teacher = Teacher(device, 16)
            bests = [teacher.begin(ids[:20])] + [teacher.follow(token) for token in ids[20:]]
            said.append(bests)
            if experts is not None:
                assert all(len(set(slots)) == len(slots) for slots in held(device, experts))
                assert device.allocated["experts"] == weights.experts.device_bytes(n_slots)
                assert device.allocated["host experts"] == weights.experts.host_bytes
                told = experts.report()
                assert told["passed_total"] + told["kept_total"] > 0 and 0 < told["found_share"] < 1
        finally:
            device.close()
    assert said[0] == said[1] == said[2]


def test_the_words_of_a_cache_are_those_of_the_header():
    assert CACHE_HEAD_WORDS == abi.PK_CACHE_HEAD
