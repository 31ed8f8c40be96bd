"""The shapes that plans are measured with: every family has one, and each is as large as its name says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from paddock_runner.blueprint.families import FAMILIES
from paddock_runner.blueprint.names import expected_shapes
from paddock_runner.memory.plan import (
    AWAY_STEP_TOKENS,
    HOST_BYTES_PER_MAPPED_BYTE,
    MIB,
    cuda_facts,
    graph_bytes,
    weight_sizes,
)

from bench.fit_shapes import MODELS, blueprint, config, views

BILLIONS = {"gemma4-e2b": 4.63, "gemma4-31b": 30.7, "mixtral-8x7b": 46.7, "laguna-xs": 33.44, "35b-a3b": 34.66, "nemotron-3-nano": 31.58, "olmoe-7b": 6.92, "deepseek-v2-lite": 15.71}  # fmt: skip


def test_every_family_has_a_shape():
    kinds = {config(model.rpartition(".")[0])["model_type"] for model in MODELS}
    assert not [family.name for family in FAMILIES if kinds.isdisjoint(family.hf)]


@pytest.mark.parametrize("name", BILLIONS)
def test_a_shape_has_the_parameters_of_its_model(name):
    assert round(sum(math.prod(shape) for shape in expected_shapes(blueprint(name)).values()) / 1e9, 2) == BILLIONS[name]


TAKEN_MIB = {
    "deepseek-v2-lite": (643, 673), "deepseek-v3-7l": (740, 784), "nemotron-3-nano": (562, 577), "lfm2-8b-a1b": (551, 562), "35b-a3b": (609, 640), "27b-hybrid": (601, 633), "granite-h-tiny": (586, 613), "laguna-xs": (592, 614),
    "30b-a3b": (586, 610), "gpt-oss-20b": (556, 570), "granite-3b-a800m": (561, 576), "gemma-12b": (562, 578), "llama-8b": (566, 578), "nomic-v1.5": (540, 543),
}  # fmt: skip
"""Context and launch graphs as an H200 had them with one slot and with 32, at most (bench.fit_matrix, 2026-11-30, a process with all rows)."""


ROWS = json.loads((Path(__file__).parents[3] / "bench/results/h200/2026-11-30-fit.json").read_text())["rows"]
BY_MODEL = {model: [row for row in ROWS if row["id"][4:-6].rsplit(".", 2)[0] == model] for model in sorted({row["id"][4:-6].rsplit(".", 2)[0] for row in ROWS})}


@pytest.mark.parametrize("model", BY_MODEL)
def test_what_an_h200_measured_is_within_what_is_planned_today(model, tmp_path):
    """planned_bytes are of the day of the measurement: since then the plans of launch graphs have changed, and of experts' tables beside them."""
    name, _, gib = model.partition("+")
    shape, _, kind = name.rpartition(".")
    plan = blueprint(shape)
    weights = weight_sizes(plan, views(plan, kind, tmp_path), "cuda")
    n_away = weights.n_expert_slots(int(gib) << 30 if gib else None)
    tables = weights.experts.host_bytes // HOST_BYTES_PER_MAPPED_BYTE if n_away else 0
    for row in BY_MODEL[model]:
        n_slots = int(row["id"][4:-6].rpartition(".b")[2])
        alone = {"max_step_tokens": AWAY_STEP_TOKENS if n_away else 2560, "n_slots": n_slots, "n_expert_slots": n_away}
        graphs, beside_a_part = (graph_bytes(plan, SimpleNamespace(**alone, part_tokens=part, beside_tokens=beside), weights.panel_launches) for part, beside in ((0, 0), (1664, 512)))
        if row["graphs_bytes"] == beside_a_part:  # planned with 84 of 132 multiprocessors as a part, which is younger than the other rows
            graphs = beside_a_part
        today = row["planned_bytes"] - row["graphs_bytes"] + graphs + tables
        assert 0 <= today - row["measured_bytes"] <= max(64 * MIB, row["measured_bytes"] // 100), row["id"]


PANELS_MIB = {"8b.q4_k_m": 566, "32b.q4_k_m": 618, "exaone4-32b.q4_k_m": 622, "seed-oss-36b.q4_k_m": 635, "seed-oss-36b.q8_0": 634, "mixtral-8x7b.q4_k_m": 574}
"""The same with one slot, of weights that are unpacked panel by panel."""


@pytest.mark.parametrize("name", PANELS_MIB)
def test_unpacking_weights_panel_by_panel_is_planned(name, tmp_path):
    shape, _, kind = name.rpartition(".")
    plan = blueprint(shape)
    launches = weight_sizes(plan, views(plan, kind, tmp_path), "cuda").panel_launches
    sizes = SimpleNamespace(max_step_tokens=2560, n_slots=1, n_expert_slots=0, part_tokens=0, beside_tokens=0)
    planned = (graph_bytes(plan, sizes, launches) + cuda_facts(132).process_bytes) / MIB
    assert PANELS_MIB[name] + 16 < planned < PANELS_MIB[name] + 64


@pytest.mark.parametrize("name", TAKEN_MIB)
def test_context_and_graphs_are_planned_with_what_was_measured_and_little_more(name):
    for n_slots, taken in zip((1, 32), TAKEN_MIB[name], strict=True):
        sizes = SimpleNamespace(max_step_tokens=2560, n_slots=n_slots, n_expert_slots=0, part_tokens=0, beside_tokens=0)
        planned = (graph_bytes(blueprint(name), sizes) + cuda_facts(132).process_bytes) / MIB
        assert taken + 16 < planned < taken + 160, (name, n_slots, planned)
