"""Experts in host memory, as `paddock fit` offers them: the command to type fits itself, and host memory that is not there is said."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from paddock_manager.commands.fit import wont_fit
from paddock_manager.fit import fit

from bench import fit_shapes

GIB = 1 << 30


@pytest.fixture
def answer(monkeypatch, tmp_path):
    """The report for OLMoE in bf16 on 8 GiB, with a wish for experts and so much host memory."""
    blueprint = fit_shapes.blueprint("olmoe-7b")
    views = fit_shapes.views(blueprint, "bf16", tmp_path)
    monkeypatch.setattr(fit, "read_blueprint", lambda _: blueprint)
    monkeypatch.setattr(fit, "tensors_by_name", lambda *_: views)
    where = fit.on_told(8 * GIB, "sm_89")
    return lambda gib=None, host=0: fit.report("olmoe", None, replace(where, host_free_bytes=host), fit.Wish(expert_gib=gib))


ASKED = SimpleNamespace(found={"model": "olmoe", "vram": 8 * GIB, "arch": "sm_89"})
"""What was typed."""


def test_the_split_that_is_offered_fits_and_is_a_command(answer):
    report = answer()
    split = report.alternatives[0]
    assert report.verdict == "no" and split["change"] == "expert_vram_gib" and split["host_bytes"] > 12 * GIB
    assert f"paddock fit olmoe --arch sm_89 --vram 8GiB --expert-vram-gib {split['expert_vram_gib']}" in wont_fit(report, ASKED).hint
    found = answer(split["expert_vram_gib"])
    assert found.verdict in ("fits", "tight") and found.plan.sizes.max_step_tokens == 8192
    away = 16 * 8 * 3 * 2 * 2048 * 1024 * (1 - split["n_expert_slots"] / 64)
    assert f"a token would lack {away / 1e9:.2f} GB of them" in " ".join(found.notes)


def test_host_memory_that_is_not_there_is_said_and_no_split_offered(answer):
    assert answer(host=4 * GIB).alternatives == [] and answer(host=64 * GIB).alternatives
    report = answer(3.0, 4 * GIB)
    assert report.verdict == "no" and "of host memory, 4.00 GiB of it are free" in report.notes[-1]
    assert "GiB of host memory for its experts, 4.00 are free" in wont_fit(report, ASKED).message


def test_another_format_that_is_offered_is_that_of_all_layers(answer):
    """What was solved has no other format for layers with a window, so the command has none either."""
    report = replace(answer(), alternatives=[{"change": "kv_format", "kv_format": "fp8"}])
    asked = SimpleNamespace(found={**ASKED.found, "kv": "f32", "window_kv": "bf16"})
    assert "paddock fit olmoe --kv fp8 --arch sm_89 --vram 8GiB" in wont_fit(report, asked).hint
    report = replace(report, alternatives=[{"change": "max_batch", "max_batch": 2}])
    assert "paddock fit olmoe --kv f32 --arch sm_89 --window-kv bf16 --vram 8GiB --batch 2" in wont_fit(report, asked).hint


def test_a_format_that_a_gpu_does_not_usually_take_is_explained(monkeypatch, tmp_path):
    blueprint = fit_shapes.blueprint("qwen2.5-7b")
    monkeypatch.setattr(fit, "read_blueprint", lambda _: blueprint)
    monkeypatch.setattr(fit, "tensors_by_name", lambda *_: fit_shapes.views(blueprint, "bf16", tmp_path))
    where = fit.on_told(80 * GIB, "sm_90")
    told = fit.report("qwen", None, where, fit.Wish())
    assert told.plan.kv_format == "f16" and any("keys and values in f16: projections of its keys have a bias" in note for note in told.notes)
    chosen = fit.report("qwen", None, where, fit.Wish(kv_format="bf16"))
    assert chosen.plan.kv_format == "bf16" and not any("keys and values" in note for note in chosen.notes)
