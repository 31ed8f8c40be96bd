"""Makes the tiny random checkpoints of tests/golden/tiny with Hugging Face transformers, and their reference logits.

A tool for people, not a test: needs torch and transformers in an environment of its own.
Usage: python tests/golden/make_tiny.py [NAME ...]
Each folder: config.json, model.safetensors (f32) and golden.npz: ids [n], logits [n, V] (f32 arithmetic, eager attention).
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HERE = pathlib.Path(__file__).resolve().parent / "tiny"
COMMON = dict(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
SMALL = {**COMMON, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 128}
SMALL_HYBRID = {
    **SMALL, "num_hidden_layers": 3, "head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12, "tie_word_embeddings": False,
}  # fmt: skip
SMALL_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 8}
SMALL_LATENT = {
    **SMALL, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "pad_token_id": 0,
}  # fmt: skip
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def longrope(n: int, share: float) -> dict:
    """Divisors that differ from each other and between the two sets."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(n)], "long_factor": [1.5 + 0.7 * i for i in range(n)]}
    return {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": share, **factors}


TINY = {
    "llama": dict(model_type="llama", **COMMON, head_dim=16, tie_word_embeddings=False, rms_norm_eps=1e-5),
    "llama3-rope": dict(model_type="llama", **COMMON, head_dim=16, tie_word_embeddings=True, rope_theta=10000.0, rope_parameters=LLAMA3_ROPE, rope_scaling=LLAMA3_ROPE),
    "mistral": dict(model_type="mistral", **COMMON, head_dim=24, sliding_window=None, tie_word_embeddings=False),
    "mistral-window": dict(model_type="mistral", **COMMON, head_dim=16, sliding_window=9, tie_word_embeddings=False),
    "qwen2": dict(model_type="qwen2", **COMMON, tie_word_embeddings=True, use_sliding_window=False),
    "qwen3": dict(model_type="qwen3", **COMMON, head_dim=32, tie_word_embeddings=True),
    "gemma3": dict(
        model_type="gemma3_text", **COMMON, head_dim=32, sliding_window=8, sliding_window_pattern=3, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], rope_local_base_freq=10000.0, rope_theta=1000000.0,
    ),
    "gemma2": dict(
        model_type="gemma2", **COMMON, head_dim=32, sliding_window=8, query_pre_attn_scalar=24, attn_logit_softcapping=20.0, final_logit_softcapping=15.0,
    ),
    "gemma4": dict(
        model_type="gemma4_text", **{**SMALL, "num_hidden_layers": 6}, head_dim=16, global_head_dim=32, sliding_window=8, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128, num_kv_shared_layers=3, use_double_wide_mlp=True, final_logit_softcapping=15.0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gemma4-moe": dict(
        model_type="gemma4_text", **SMALL, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=8, hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24, layer_types=["sliding_attention", "full_attention"],
    ),
    "muse-glimmer": dict(
        model_type="muse_glimmer", text_config=dict(**{**SMALL, "num_hidden_layers": 3}, head_dim=16, sliding_window=8, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, patch_size=2, pos_emb_height=2, pos_emb_width=2),
        out_hidden_size=32, projector_hidden_size=8,
    ),
    "kolibri": dict(
        model_type="kolibri1", **{k: v for k, v in SMALL.items() if k != "intermediate_size"}, head_dim=16, sliding_window=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24, layer_types=["sliding_attention", "full_attention"],
    ),
    "granite": dict(model_type="granite", **COMMON, tie_word_embeddings=True, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0, attention_multiplier=0.2),
    "phi3": dict(model_type="phi3", **COMMON, tie_word_embeddings=False, pad_token_id=0, sliding_window=None),
    "olmo2": dict(model_type="olmo2", **COMMON, tie_word_embeddings=False),
    "smollm3": dict(model_type="smollm3", **{**COMMON, "num_hidden_layers": 4}, tie_word_embeddings=True, no_rope_layer_interval=4, use_sliding_window=False, pad_token_id=0),
    "exaone4": dict(model_type="exaone4", **{**COMMON, "num_hidden_layers": 4}, tie_word_embeddings=True, sliding_window=8, sliding_window_pattern=4, pad_token_id=0),
    "olmo3": dict(
        model_type="olmo3", **{**COMMON, "num_hidden_layers": 4}, sliding_window=8, pad_token_id=0, rope_theta=10000.0,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0, "attention_factor": 1.2}},
    ),
    "ministral": dict(model_type="ministral", **COMMON, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "ministral3": dict(
        model_type="ministral3", **COMMON, head_dim=16, pad_token_id=0,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    ),
    "qwen3-yarn": dict(model_type="qwen3", **COMMON, head_dim=32, tie_word_embeddings=True, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}),
    "phi3-short": dict(model_type="phi3", **{**COMMON, "max_position_embeddings": 4096}, tie_word_embeddings=False, pad_token_id=0, original_max_position_embeddings=1024, rope_parameters=longrope(6, 0.75)),
    "phi3-long": dict(model_type="phi3", **COMMON, tie_word_embeddings=False, pad_token_id=0, original_max_position_embeddings=32, rope_parameters=longrope(8, 1.0)),
    "mixtral": dict(model_type="mixtral", **SMALL, num_local_experts=5, num_experts_per_tok=2),
    "qwen2-moe": dict(
        model_type="qwen2_moe", **SMALL, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        norm_topk_prob=False, mlp_only_layers=[], decoder_sparse_step=2,
    ),
    "qwen3-moe": dict(model_type="qwen3_moe", **SMALL, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True, mlp_only_layers=[]),
    "olmoe": dict(model_type="olmoe", **{**SMALL, "intermediate_size": 24}, num_experts=6, num_experts_per_tok=3, norm_topk_prob=False, pad_token_id=0),
    "granite-moe": dict(
        model_type="granitemoe", **SMALL, num_local_experts=5, num_experts_per_tok=2, tie_word_embeddings=True,
        embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0, attention_multiplier=0.2,
    ),
    "glm4-moe": dict(
        model_type="glm4_moe", **SMALL, head_dim=16, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, n_group=4, topk_group=2,
        routed_scaling_factor=1.7, norm_topk_prob=True, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "gpt-oss": dict(
        model_type="gpt_oss", **{**SMALL, "intermediate_size": 32}, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, pad_token_id=0, tie_word_embeddings=False,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
    ),
    "gpt-oss-mxfp4": dict(model_type="gpt_oss", **{**SMALL, "hidden_size": 64, "intermediate_size": 64}, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, pad_token_id=0, tie_word_embeddings=False),
    "qwen3.5": dict(model_type="qwen3_5_text", **SMALL_HYBRID, rope_parameters=PARTIAL_ROPE),
    "qwen3.5-moe": dict(
        model_type="qwen3_5_moe_text", **SMALL_HYBRID, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24, rope_parameters=PARTIAL_ROPE,
    ),
    "qwen3-next": dict(
        model_type="qwen3_next", **SMALL_HYBRID, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    ),
    "lfm2": dict(model_type="lfm2", **{**SMALL, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8, conv_bias=True),
    "lfm2-moe": dict(
        model_type="lfm2_moe", **{**SMALL, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"], num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=24, num_dense_layers=1, routed_scaling_factor=1.3,
    ),
    "granite-hybrid": dict(
        model_type="granitemoehybrid", **{**SMALL, "num_hidden_layers": 3}, **SMALL_MAMBA, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=24,
        layer_types=["mamba", "attention", "mamba"], position_embedding_type="nope", tie_word_embeddings=True, pad_token_id=0,
        embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0, attention_multiplier=0.2,
    ),
    "granite-hybrid-dense": dict(
        model_type="granitemoehybrid", **SMALL, **SMALL_MAMBA, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=40, layer_types=["mamba", "attention"],
        position_embedding_type="rope", tie_word_embeddings=True, pad_token_id=0, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0, attention_multiplier=0.2,
    ),
    "nemotron-h": dict(
        model_type="nemotron_h", **{k: v for k, v in SMALL.items() if k != "num_hidden_layers"}, layers_block_type=["mamba", "mlp", "attention", "moe", "mamba"], head_dim=16,
        mamba_num_heads=6, mamba_head_dim=16, n_groups=2, ssm_state_size=12, conv_kernel=4, chunk_size=8, time_step_min=0.3, n_routed_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=24, moe_shared_expert_intermediate_size=40, n_group=2, topk_group=1, routed_scaling_factor=1.4,
    ),
    "laguna": dict(
        model_type="laguna", **{**SMALL, "num_hidden_layers": 3}, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        sliding_window=8, layer_types=["full_attention", "sliding_attention", "sliding_attention"], num_attention_heads_per_layer=[4, 6, 2], moe_routed_scaling_factor=1.7,
        moe_router_logit_softcapping=2.0,
    ),
    "laguna-by-element": dict(
        model_type="laguna", **{**SMALL, "intermediate_size": 24}, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
        gating="per-element", attention_bias=True, mlp_layer_types=["sparse", "dense"],
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    ),
    "qwen4-exp": dict(
        model_type="qwen4_exp_text", **SMALL_HYBRID, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24, rope_parameters=PARTIAL_ROPE, output_gate_type="sigmoid",
        hc_count=3, hc_lowrank=10, ple_layer_ids=[1, 3], ple_embed_dim=16, ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=2, eos_token_id=36, indexer_n_heads=5, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4,
    ),
    "ernie4.5": dict(model_type="ernie4_5", **SMALL, head_dim=16, tie_word_embeddings=True, use_bias=True),
    "seed-oss": dict(model_type="seed_oss", **SMALL, head_dim=16, attention_out_bias=True),
    "arcee": dict(model_type="arcee", **SMALL, head_dim=16),
    "deepseek-v2": dict(
        model_type="deepseek_v2", **SMALL_LATENT, q_lora_rank=None, n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=1.3,
    ),
    "deepseek-v3": dict(
        model_type="deepseek_v3", **SMALL_LATENT, q_lora_rank=20, n_group=4, topk_group=2, routed_scaling_factor=1.7, norm_topk_prob=True,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
}  # fmt: skip


def mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., K] -> blocks u8 [..., K/32, 16], scales u8 [..., K/32], and the values that these stand for."""
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = w.reshape(*w.shape[:-1], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scaled = groups / torch.exp2(exponent)[..., None]
    index = (scaled.abs()[..., None] - steps).abs().argmin(-1)
    codes = (index + 8 * (scaled < 0)).to(torch.uint8)
    values = (torch.where(scaled < 0, -steps[index], steps[index]) * torch.exp2(exponent)[..., None]).reshape(w.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8), values


def quantise_experts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """gpt-oss as it is published: expert weights become what their 4-bit codes stand for. Returns the checkpoint's tensors."""
    stored: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, values = mxfp4(p.data.transpose(1, 2).contiguous())
            p.data = values.transpose(1, 2).contiguous()
            stored[name + "_blocks"], stored[name + "_scales"] = blocks.contiguous(), scales.contiguous()
        else:
            stored[name] = p.data
    return stored


def randomise(model: torch.nn.Module) -> None:
    """Weights large enough that every part of the network matters to the logits."""
    generator = torch.Generator().manual_seed(20261129)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in name and p.ndim == 1:
            p.data = p.data + 0.2 * noise
        elif name.endswith(("router.scale", "per_expert_scale")):
            p.data = 1.0 + 0.3 * noise
        else:
            p.data = noise * (0.5 if p.ndim == 1 else p.shape[-1] ** -0.5 * 1.5)
    for name, b in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            b.data = 0.3 * torch.randn(b.shape, generator=generator)
        if name.endswith("layer_scalar"):
            b.data = 0.6 + 0.3 * torch.rand(b.shape, generator=generator)


def make(name: str) -> None:
    """Writes one folder."""
    folder = HERE / name
    settings = dict(TINY[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config._attn_implementation = "eager"
    maker = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    model = maker.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model)
    if config.get_text_config().tie_word_embeddings:
        model.tie_weights()
    stored = quantise_experts(model) if name.endswith("-mxfp4") else None
    ids = np.random.default_rng(7).integers(0, config.get_text_config().vocab_size, 41)
    with torch.no_grad():
        logits = model(torch.tensor(ids[None])).logits[0].float().numpy()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if stored is not None:
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "mxfp4"}}, indent=2))
    for extra in ("generation_config.json",):
        (folder / extra).unlink(missing_ok=True)
    np.savez_compressed(folder / "golden.npz", ids=ids.astype(np.int32), logits=logits, reference=f"transformers {transformers.__version__} torch {torch.__version__}")
    print(name, type(model).__name__, f"{logits.std():.3f}", sorted(p.name for p in folder.iterdir()))


if __name__ == "__main__":
    torch.manual_seed(1)
    for wanted in sys.argv[1:] or TINY:
        make(wanted)
