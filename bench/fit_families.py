"""Configs of published models, one or more for each family that fit_shapes.py has no shape of. Data; fit_shapes.py reads it."""

from __future__ import annotations

from typing import Any

LOCAL, WIDE = "sliding_attention", "full_attention"


def dense(kind: str, width: int, ff: int, n_layers: int, heads: tuple[int, int, int], vocab: int, ctx: int, **more: Any) -> dict[str, Any]:
    """The fields that most configs have. heads: of queries, of keys, and their width."""
    return {
        "model_type": kind, "hidden_size": width, "intermediate_size": ff, "num_hidden_layers": n_layers, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "head_dim": heads[2], "vocab_size": vocab, "max_position_embeddings": ctx, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _gemma4(width: int, ff: int, n_layers: int, heads: tuple[int, int], window: int, **more: Any) -> dict[str, Any]:
    return dense(
        "gemma4_text", width, ff, n_layers, (*heads, 256), 262144, more.pop("ctx", 131072), global_head_dim=512, sliding_window=window,
        final_logit_softcapping=30.0, hidden_size_per_layer_input=more.pop("input_width", 0), tie_word_embeddings=True, **more,
    ) | {"rope_theta": None}  # fmt: skip


def _hybrid(kind: str, width: int, n_layers: int, heads: tuple[int, int], n_values: int, **more: Any) -> dict[str, Any]:
    """Gated delta nets, every fourth layer full attention, all with experts."""
    return dense(
        kind, width, more["moe_intermediate_size"], n_layers, (*heads, 256), 248320, 262144, norm_topk_prob=True,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(n_layers)], linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=n_values,
        rope_parameters={"partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default"}, **more,
    )  # fmt: skip


def _latent(kind: str, width: int, ff: int, n_layers: int, n_heads: int, **more: Any) -> dict[str, Any]:
    return dense(
        kind, width, ff, n_layers, (n_heads, n_heads, 64), more.pop("vocab"), 163840, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, rope_scaling={"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}, **more,
    )  # fmt: skip


def _encoder(width: int, ff: int, n_layers: int, n_heads: int, vocab: int, ctx: int) -> dict[str, Any]:
    return {
        "model_type": "xlm-roberta", "hidden_size": width, "intermediate_size": ff, "num_hidden_layers": n_layers, "num_attention_heads": n_heads, "vocab_size": vocab,
        "max_position_embeddings": ctx, "type_vocab_size": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "pad_token_id": 1, "architectures": ["XLMRobertaModel"],
    }  # fmt: skip


def _laguna() -> dict[str, Any]:
    kinds = [WIDE if i % 4 == 0 else LOCAL for i in range(40)]
    heads = [48 if kind == WIDE else 64 for kind in kinds]
    return dense("laguna", 2048, 8192, 40, (48, 8, 128), 100352, 131072, layer_types=kinds, num_attention_heads_per_layer=heads) | {"rope_theta": None}


def _nemotron() -> dict[str, Any]:
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    return dense(
        "nemotron_h", 2688, 1856, len(pattern), (32, 2, 128), 131072, 262144, hybrid_override_pattern=pattern, mlp_hidden_act="relu2", conv_kernel=4, mamba_head_dim=64,
        mamba_num_heads=64, n_groups=8, ssm_state_size=128, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856, n_shared_experts=1,
        moe_shared_expert_intermediate_size=3712, norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1,
    )  # fmt: skip


PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": dense("qwen2", 3584, 18944, 28, (28, 4, 128), 152064, 32768),
    "afm-4.5b": dense("arcee", 2560, 18432, 36, (20, 4, 128), 128004, 65536, hidden_act="relu2"),
    "seed-oss-36b": dense("seed_oss", 5120, 27648, 64, (80, 8, 128), 155136, 524288),
    "gemma2-9b": dense("gemma2", 3584, 14336, 42, (16, 8, 256), 256000, 8192, tie_word_embeddings=True, sliding_window=4096,
                       attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=256, hidden_activation="gelu_pytorch_tanh"),
    "gemma4-e2b": _gemma4(1536, 6144, 35, (8, 1), 512, input_width=256, num_kv_shared_layers=20, use_double_wide_mlp=True, layer_types=([LOCAL] * 4 + [WIDE]) * 7),
    "gemma4-e4b": _gemma4(2560, 10240, 42, (8, 2), 512, input_width=256, num_kv_shared_layers=18),
    "gemma4-31b": _gemma4(5376, 21504, 60, (32, 16), 1024, ctx=262144, num_global_key_value_heads=4, attention_k_eq_v=True),
    "gemma4-26b-a4b": _gemma4(2816, 2112, 30, (16, 8), 1024, num_global_key_value_heads=2, attention_k_eq_v=True, enable_moe_block=True,
                              num_experts=128, top_k_experts=8, moe_intermediate_size=704),
    "granite-8b": dense("granite", 4096, 12800, 40, (32, 8, 128), 49159, 131072, tie_word_embeddings=True, attention_multiplier=0.0078125,
                        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0),
    "granite-3b-a800m": dense("granitemoe", 1536, 512, 32, (24, 8, 64), 49155, 131072, tie_word_embeddings=True, attention_multiplier=0.015625,
                              embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0, num_local_experts=40, num_experts_per_tok=8),
    "phi-4": dense("phi3", 5120, 17920, 40, (40, 10, 128), 100352, 16384, rope_theta=250000),
    "olmo3-7b": dense("olmo3", 4096, 11008, 32, (32, 32, 128), 100278, 65536, sliding_window=4096, layer_types=([LOCAL] * 3 + [WIDE]) * 8,
                      rope_theta=500000, rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32, "beta_slow": 1}),
    "smollm3-3b": dense("smollm3", 2048, 11008, 36, (16, 4, 128), 128256, 65536, tie_word_embeddings=True, no_rope_layer_interval=4),
    "exaone4-32b": dense("exaone4", 5120, 27392, 64, (40, 8, 128), 102400, 131072, sliding_window=4096, sliding_window_pattern=4),
    "ministral3-8b": dense("ministral3", 4096, 14336, 34, (32, 8, 128), 131072, 262144,
                           rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                                            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}),
    "mixtral-8x7b": dense("mixtral", 4096, 14336, 32, (32, 8, 128), 32000, 32768, num_local_experts=8, num_experts_per_tok=2),
    "olmoe-7b": dense("olmoe", 2048, 1024, 16, (16, 16, 128), 50304, 4096, num_experts=64, num_experts_per_tok=8),
    "glm-4.5-air-12l": dense("glm4_moe", 4096, 10944, 12, (96, 8, 128), 151552, 131072, attention_bias=True, first_k_dense_replace=1, moe_intermediate_size=1408,
                         n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
                         partial_rotary_factor=0.5),
    "laguna-xs": _laguna(),
    "lfm2-8b-a1b": dense("lfm2_moe", 2048, 7168, 24, (32, 8, 64), 65536, 128000, norm_eps=1e-5, conv_L_cache=3, moe_intermediate_size=1792, num_experts=32,
                         num_experts_per_tok=4, num_dense_layers=2, tie_word_embeddings=True,
                         layer_types=["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]),
    "35b-a3b": _hybrid("qwen3_5_moe_text", 2048, 40, (16, 2), 32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512),
    "flash-next-12l": _hybrid("qwen4_exp_text", 2560, 12, (24, 2), 48, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=640, shared_expert_intermediate_size=640,
                              hc_count=4, hc_lowrank=320, ple_layer_ids=[2], ple_embed_dim=2560, ngram_size=3, heads_per_ngram=8, output_gate_type="sigmoid",
                              indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048, indexer_compress_ratio=4, eos_token_id=248044),
    "deepseek-v2-lite": _latent("deepseek_v2", 2048, 10944, 27, 16, vocab=102400, q_lora_rank=None, first_k_dense_replace=1, moe_intermediate_size=1408,
                                n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0),
    "deepseek-v3-7l": _latent("deepseek_v3", 7168, 18432, 7, 128, vocab=129280, q_lora_rank=1536, first_k_dense_replace=3, moe_intermediate_size=2048,
                              n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5),
    "nemotron-3-nano": _nemotron(),
    "muse-glimmer-30b": {"model_type": "muse_glimmer_text"},
    "kolibri-1-10l": {"model_type": "kolibri1", "num_hidden_layers": 10, "layer_types": ([LOCAL] * 4 + [WIDE]) * 2},
    "bge-m3": _encoder(1024, 4096, 24, 16, 250002, 8194),
    "nomic-v1.5": {"model_type": "nomic_bert", "n_embd": 768, "n_inner": 3072, "n_layer": 12, "n_head": 12, "vocab_size": 30528, "n_positions": 8192, "rotary_emb_fraction": 1.0,
                   "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "type_vocab_size": 2,
                   "prenorm": False, "rotary_emb_base": 1000, "architectures": ["NomicBertModel"]},
}  # fmt: skip
"""Names that end in a number of layers are those models with fewer of each kind: whole they do not fit on one H200, or take long to load."""
