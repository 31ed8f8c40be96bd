"""Latent attention: what is cached, which matrices are made of kv_b, and that DeepSeek's published shape costs what it should."""

from __future__ import annotations

import pytest
from paddock_runner.blueprint.latent import split_latent
from paddock_runner.errors import UnsupportedError
from paddock_runner.memory.plan import PlanRequest, cpu_facts, state_sizes
from paddock_runner.memory.state import page_layout

from tests.checkpoint_bytes import checkpoint, safetensors
from tests.unit.blueprint.test_families import hf_read

V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_theta": 10000, "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
}  # fmt: skip


def test_published_v3_caches_576_numbers_a_token_and_layer():
    b = hf_read(V3)
    a, x = b.layers[60].attention, b.layers[60].experts
    assert (a.latent.rank, a.head_width, a.n_kv_heads, a.values_width, a.out_width, a.qkv_width) == (512, 576, 1, 512, 16384, 129 * 576)
    assert abs(a.scale - 192**-0.5 * 1.3688879454113936**2) < 1e-9 and a.rope.magnitude == 1.0
    assert (x.n_experts, x.score, x.n_groups, x.n_groups_used, x.n_group_best, x.choice_bias) == (256, "sigmoid", 8, 4, 2, True)
    assert b.layers[2].experts is None and b.layers[3].feed_forward.width == 2048 and b.n_draft_layers == 1
    assert page_layout(b, "bf16", 32).page_bytes == 61 * 32 * 576 * 2
    assert state_sizes(b, PlanRequest(4096, 2, cpu_facts(2))).n_pages == 2 * 128 + 1


def test_v2_routes_by_the_best_of_a_group_and_projects_queries_at_once():
    v2 = {**V3, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "scoring_func": "softmax", "q_lora_rank": None, "norm_topk_prob": False, "rope_scaling": None}
    b = hf_read(v2)
    assert (b.layers[5].experts.n_group_best, b.layers[5].experts.choice_bias, b.layers[5].attention.latent.q_rank) == (1, False, 0)
    assert hf_read({**v2, "topk_method": "greedy"}).layers[5].experts.n_groups == 1


@pytest.mark.parametrize("change, said", [({"attention_bias": True}, "attention_bias"), ({"topk_method": "best"}, "topk_method is 'best'"), ({"moe_layer_freq": 2}, "moe_layer_freq")])
def test_what_is_not_supported_is_named(change, said):
    with pytest.raises(UnsupportedError, match=said):
        hf_read({**V3, **change})


def test_rows_that_make_keys_are_transposed_and_quantised_ones_become_f16():
    a = hf_read({**V3, "num_attention_heads": 2, "hidden_size": 256}).layers[0].attention
    for dtype, size, kind in (("BF16", 2, "bf16"), ("F8_E4M3", 1, "f16")):
        n = 2 * 256 * 512 * size
        view = checkpoint(safetensors({"x": {"dtype": dtype, "shape": [512, 512], "data_offsets": [0, n]}}, n), "m.safetensors", {}).tensors["x"]
        out = split_latent({"layers.0.kv_b.weight": view}, 0, a, a.latent)
        key, value = out["layers.0.latent_k.1.weight"], out["layers.0.latent_v.1.weight"]
        assert (key.shape, key.format, value.shape, value.format) == ((512, 128), kind, (128, 512), view.format)
        assert key.offset == view.offset + 256 * 512 * size and value.offset == key.offset + 128 * 512 * size
