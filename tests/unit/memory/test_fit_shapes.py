"""The shapes that plans are measured with: every family has one, and each is as large as its name says."""

from __future__ import annotations

import math

import pytest
from paddock_runner.blueprint.families import FAMILIES
from paddock_runner.blueprint.names import expected_shapes

from bench.fit_shapes import MODELS, blueprint, config

BILLIONS = {"gemma4-e2b": 4.63, "gemma4-31b": 30.7, "mixtral-8x7b": 46.7, "laguna-xs": 33.44, "35b-a3b": 34.66, "nemotron-3-nano": 31.58, "olmoe-7b": 6.92, "deepseek-v2-lite": 15.71}  # fmt: skip


def test_every_family_has_a_shape():
    kinds = {config(model.rpartition(".")[0])["model_type"] for model in MODELS}
    assert not [family.name for family in FAMILIES if kinds.isdisjoint(family.hf)]


@pytest.mark.parametrize("name", BILLIONS)
def test_a_shape_has_the_parameters_of_its_model(name):
    assert round(sum(math.prod(shape) for shape in expected_shapes(blueprint(name)).values()) / 1e9, 2) == BILLIONS[name]
