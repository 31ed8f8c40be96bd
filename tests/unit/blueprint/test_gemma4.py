"""Gemma 4's configs: head widths, key-value heads and ropes per layer, shared keys and values, inputs of layers, and what is refused."""

from __future__ import annotations

import math

import pytest
from paddock_runner.blueprint.names import expected_shapes, tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.errors import FileError, UnsupportedError
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.plan import PlanRequest, complete, cpu_facts, cuda_facts, plan, state_sizes, weight_sizes
from paddock_runner.memory.state import page_layout

from tests.checkpoint_bytes import checkpoint, safetensors
from tests.golden.test_tiny import TINY

LOCAL, WIDE = "sliding_attention", "full_attention"
COMMON = {"model_type": "gemma4_text", "vocab_size": 262144, "head_dim": 256, "global_head_dim": 512, "max_position_embeddings": 131072, "final_logit_softcapping": 30.0}
E2B = {
    **COMMON, "hidden_size": 1536, "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1, "sliding_window": 512, "intermediate_size": 6144,
    "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": ([LOCAL] * 4 + [WIDE]) * 7,
}  # fmt: skip
E4B = {
    **COMMON, "hidden_size": 2560, "num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 512, "intermediate_size": 10240,
    "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18,
}  # fmt: skip
DENSE_31B = {
    **COMMON, "hidden_size": 5376, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "sliding_window": 1024,
    "intermediate_size": 21504, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "max_position_embeddings": 262144,
}  # fmt: skip
MOE_26B = {
    **COMMON, "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "sliding_window": 1024,
    "intermediate_size": 2112, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
    "moe_intermediate_size": 704,
}  # fmt: skip


def read(config, **more):
    entry = {"model.language_model.embed_tokens.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    whole = {"model_type": "gemma4", "text_config": {**config, **more}, "vision_config": {}, "audio_config": {}}
    return read_blueprint(checkpoint(safetensors(entry, 2), "m.safetensors", whole))


def token_bytes(b):
    return page_layout(b, "bf16", 32).page_bytes // 32


def test_e2b_shares_keys_and_values_of_the_last_layer_of_each_kind():
    b = read(E2B)
    assert [x.attention.kv_from for x in b.layers[:15]] == [None] * 15
    assert [x.attention.kv_from for x in b.layers[15:20]] == [13, 13, 13, 13, 14]
    wide, local = b.layers[14].attention, b.layers[13].attention
    assert (wide.head_width, wide.window, wide.scale, wide.rope.theta, wide.rope.width) == (512, 0, 1.0, 1e6, 512)
    assert wide.rope.factors == (1.0,) * 64 + (math.inf,) * 192
    assert (local.head_width, local.window, local.rope.theta, local.rope.factors) == (256, 512, 1e4, ())
    assert [x.feed_forward.width for x in b.layers[14:16]] == [6144, 12288]
    assert token_bytes(b) == 2 * 2 * (12 * 256 + 3 * 512)  # 18 KiB: 15 layers of 35 have keys
    assert (b.input_width, b.logit_softcap, b.embed_scale, b.tied_head) == (256, 30.0, 1536**0.5, True)
    assert b.notes == ("the vision and audio part is not loaded: text only",)


def test_scales_that_were_not_read_are_said():
    entries = {"model.layers.3.layer_scalar": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    b = read_blueprint(checkpoint(safetensors(entries, 2), "m.safetensors", E2B))
    assert b.notes == ("scales of layers are in tensors that were not read",) and b.layers[3].out_scale == 1.0


def test_the_12b_has_no_inputs_of_layers_and_a_wide_window():
    b = read({**DENSE_31B, "model_type": "gemma4_unified_text", "hidden_size_per_layer_input": None, "sliding_window": None})
    assert b.input_width == 0 and b.layers[0].attention.window == 1024


def test_every_other_size_has_its_own_key_value_heads_per_layer():
    assert token_bytes(read(E4B)) == 2 * 2 * 2 * (20 * 256 + 4 * 512)
    assert token_bytes(read(MOE_26B)) == 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)
    b = read(DENSE_31B)
    wide = b.layers[5].attention
    assert (wide.n_kv_heads, wide.values_are_keys, b.layers[0].attention.n_kv_heads, b.layers[0].attention.values_are_keys) == (4, True, 16, False)
    assert "layers.5.v.weight" not in (shapes := expected_shapes(b)) and shapes["layers.0.v.weight"] == (4096, 5376)
    # Published for the 31B at 131072 tokens, with windows that drop what they passed: 11 576 279 040 bytes.
    window = 50 * 2 * 2 * 16 * 256
    assert (token_bytes(b) - window) * 131072 + window * 1024 == 11_576_279_040


def test_the_31b_at_its_long_context_keeps_only_what_windows_see():
    b = read(DENSE_31B)
    gb, lines = 1e9, {}
    for has_windows in (False, True):
        request = PlanRequest(131072, 1, cuda_facts(132, free_bytes=int(140e9)), has_windows=has_windows)
        lines[has_windows] = complete(b, weight_sizes(b, {}), 0, request)
    assert 118 < lines[False].group_bytes("kv") / gb < 119
    # All tokens of ten layers; of the other fifty a window and a step's prompt tokens, and the windows of eight prefixes that can be gone on from.
    assert 10.7 < lines[True].group_bytes("kv") / gb < 10.8 and 9 < lines[True].group_bytes("windows") / gb < 10.5
    assert lines[True].kv_token_bytes == 10 * 2 * 2 * 4 * 512
    short = state_sizes(b, PlanRequest(1024, 1, cuda_facts(132)))
    assert short.n_window_pages == 0, "windows as long as the context have no pages of their own"


def test_experts_stand_beside_a_feed_forward():
    x = read(MOE_26B).layers[0]
    assert (x.experts.n_experts, x.experts.n_used, x.experts.width, x.feed_forward.width) == (128, 8, 704, 2112)
    assert x.experts.is_beside and x.experts.has_scales and x.experts.activation == "gelu_tanh" and x.experts.router_scale == 2816**-0.5


def test_settings_per_layer_mean_what_the_published_fields_mean():
    plain = {k: v for k, v in DENSE_31B.items() if k not in ("global_head_dim", "num_global_key_value_heads")}
    own = {str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)}
    assert [x.attention for x in read(plain, per_layer_config=own).layers] == [x.attention for x in read(DENSE_31B).layers]


def test_the_plan_counts_shared_keys_once_and_vectors_of_ones():
    opened = open_checkpoint(TINY / "gemma4")
    b = read_blueprint(opened)
    views = tensors_by_name(opened, b)
    assert "layers.4.k.weight" not in views and "layers.4.q.weight" in views
    found = plan(b, views, PlanRequest(64, 2, cpu_facts(2), "f32"))
    assert found.kv_token_bytes == 4 * 2 * 2 * (2 * 16 + 32)
    assert all(0.5 < x.out_scale < 1.0 for x in b.layers)


@pytest.mark.parametrize(
    ("more", "error", "sentence"),
    [
        ({"num_kv_shared_layers": 42}, FileError, r"num_kv_shared_layers is 42 of 42 layers"),
        ({"num_kv_shared_layers": 40}, FileError, r"some of these layers have no layer of their kind before them"),
        ({"vocab_size_per_layer_input": 9}, FileError, r"vocab_size_per_layer_input is 9, expected 262144"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, FileError, r"is 3, expected a divisor of 8"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, UnsupportedError, r"layer 0 has a window and settings of its own"),
        ({"per_layer_config": {"5": {"head_dim": 8}}}, UnsupportedError, r"heads of \[8, 512\], expected one width"),
        ({"per_layer_config": {"5": {"head_dim": 0}}}, FileError, r"per_layer_config.5.head_dim is 0"),
        ({"global_head_dim": 33}, FileError, r"global_head_dim is 33, expected an even width"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": -1.0}}}, FileError, r"partial_rotary_factor is -1.0"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, UnsupportedError, r"rope_type is 'yarn'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(more, error, sentence):
    with pytest.raises(error, match=sentence):
        read(E4B, **more)
