"""Whole models in contexts opened for it (is_invariant): prompts one by one, all together, and cut at random among others leave the same keys, values, states and tokens (bench.company)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import pack_path
from paddock_runner.blueprint.blueprint import NO_ATTENTION, Blueprint, Delta, Experts, FeedForward, Layer
from paddock_runner.pack.library import Pack

from bench import company, gpu_hybrids, gpu_models


def asked(kv_format: str = "bf16") -> company.Asked:
    """Prompts of some pages, other ones each time."""
    return company.Asked(n_prompts=5, longest=300, n_out=6, n_cuts=2, seed=int.from_bytes(np.random.bytes(2), "little"), kv_format=kv_format)


@pytest.mark.parametrize("kind, kv_format", [("bf16", "bf16"), ("fp8", "bf16"), ("q8_0", "fp8"), ("q4_k_m", "bf16")])
def test_answers_and_what_they_leave_do_not_know_their_company(pack: Pack, tmp_path: Path, kind: str, kv_format: str) -> None:
    if kv_format == "fp8" and "fp8_e4m3" not in pack.description["kv_formats"]:
        pytest.skip("this pack has no keys in FP8")
    plan, tensors = company.model_of(f"tiny.{kind}", 2, tmp_path)
    this = asked(kv_format)
    assert company.check(pack_path(), plan, tensors, this) == [], this


def mixture(plan: Blueprint) -> Blueprint:
    """The same layers with experts."""
    return replace(plan, family="qwen3moe", layers=tuple(replace(layer, feed_forward=FeedForward(0), experts=Experts(16, 4, 256)) for layer in plan.layers))


def hybrid(plan: Blueprint) -> Blueprint:
    """A gated delta net in front of them."""
    return replace(plan, family="qwen35", layers=(Layer(NO_ATTENTION, FeedForward(512), kind="delta", delta=Delta(2, 4, 128, 128, 4)), *plan.layers))


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("shape", [mixture, hybrid])
def test_experts_and_states_do_not_either(tmp_path: Path, shape, format: str) -> None:
    plan, this = shape(gpu_models.blueprint("tiny")), asked()
    assert company.check(pack_path(), plan, gpu_hybrids.views(plan, tmp_path, format), this) == [], this
