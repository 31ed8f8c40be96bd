"""Laguna's config: heads, windows and ropes per layer, which layers have experts, and what is refused."""

from __future__ import annotations

import math

import pytest
from paddock_runner.blueprint.names import expected_shapes
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.errors import FileError, UnsupportedError
from paddock_runner.memory.state import page_layout

from tests.checkpoint_bytes import checkpoint, safetensors

XS = {
    "model_type": "laguna", "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "num_attention_heads_per_layer": [48, 64, 64, 64],
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip


def read(**more):
    entry = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    return read_blueprint(checkpoint(safetensors(entry, 2), "m.safetensors", {**XS, **more}))


def test_layers_have_their_own_heads_windows_and_ropes():
    b = read()
    wide, local = b.layers[0].attention, b.layers[1].attention
    assert (wide.n_heads, wide.window, wide.rope.theta, wide.rope.width) == (48, 0, 500000.0, 64)
    assert (local.n_heads, local.window, local.rope.theta, local.rope.width) == (64, 512, 10000.0, 128)
    assert (wide.gate_width, local.gate_width, local.gate_act) == (48, 64, "softplus")
    assert [x.experts is None for x in b.layers] == [True, False, False, False]
    assert (b.layers[1].experts.n_experts, b.layers[1].experts.n_used, b.layers[1].feed_forward.width) == (256, 8, 512)
    assert page_layout(b, "bf16", 16).page_bytes == 4 * 2 * 8 * 128 * 16 * 2


def test_the_published_model_has_as_many_parameters_as_its_makers_say():
    kinds = ["full_attention" if i % 4 == 0 else "sliding_attention" for i in range(40)]
    b = read(num_hidden_layers=40, layer_types=kinds, num_attention_heads_per_layer=[48 if k == "full_attention" else 64 for k in kinds])
    assert round(sum(math.prod(shape) for shape in expected_shapes(b).values()) / 1e9) == 33


@pytest.mark.parametrize(
    ("more", "error", "sentence"),
    [
        ({"gating": "per-layer"}, FileError, r"gating is 'per-layer'"),
        ({"num_attention_heads_per_layer": [48, 60, 64, 64]}, FileError, r"is 60 in layer 1, expected a multiple of 8"),
        ({"mlp_layer_types": ["dense"]}, FileError, r"no list of 4 times dense or sparse"),
        ({"moe_apply_router_weight_on_input": True}, UnsupportedError, r"moe_apply_router_weight_on_input"),
    ],
)
def test_what_cannot_be_is_one_sentence(more, error, sentence):
    with pytest.raises(error, match=sentence):
        read(**more)
