"""Models of published shapes whose weights are holes in a file: every size is real, no byte is stored. For fit and memory benches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.blueprint.blueprint import Blueprint
from paddock_runner.blueprint.names import expected_shapes
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.files.checkpoint import Checkpoint
from paddock_runner.files.view import Scales, TensorView
from paddock_runner.formats.table import by_name

from .fit_families import PUBLISHED


def _qwen3(width: int, ff: int, n_layers: int, n_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": width, "intermediate_size": ff, "num_hidden_layers": n_layers, "num_attention_heads": n_heads,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu", **more,
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "0.6b": _qwen3(1024, 3072, 28, 16, tie_word_embeddings=True),
    "8b": _qwen3(4096, 12288, 36, 32),
    "32b": _qwen3(5120, 25600, 64, 64),
    "30b-a3b": _qwen3(2048, 6144, 48, 32, model_type="qwen3_moe", num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
                      moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
    "llama-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 5e5, "tie_word_embeddings": False, "hidden_act": "silu",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "gemma-12b": {
        "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "27b-hybrid": {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "tie_word_embeddings": False,
        "hidden_act": "silu", "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default"},
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
        "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "silu", "swiglu_limit": 7.0, "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": False},
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "granite-h-tiny": {
        "model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_hidden_layers": 40,
        "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 100352, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)], "mamba_n_heads": 48, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "num_local_experts": 64, "num_experts_per_tok": 6, "position_embedding_type": "nope", "tie_word_embeddings": True, "hidden_act": "silu",
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0, "rope_theta": 1e4,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 65536, "max_position_embeddings": 128000, "norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "tie_embedding": True, "rope_theta": 1e6,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    },
}  # fmt: skip
"""Published shapes: Qwen3 0.6B, 8B, 32B and 30B-A3B, Llama 3.1 8B, Gemma 3 12B, Qwen3.5 27B, gpt-oss-20b, Granite 4 H Tiny, LFM2 1.2B."""
MODELS = [
    "gemma4-e2b.bf16", "gemma4-e4b.bf16", "gemma4-31b.fp8", "gemma4-26b-a4b.bf16", "qwen2.5-7b.bf16", "afm-4.5b.bf16", "seed-oss-36b.q4_k_m", "gemma2-9b.bf16",
    "granite-8b.bf16", "granite-3b-a800m.bf16", "phi-4.fp8", "olmo3-7b.bf16", "smollm3-3b.bf16", "exaone4-32b.fp8", "ministral3-8b.fp8", "mixtral-8x7b.q4_k_m", "olmoe-7b.bf16",
    "glm-4.5-air-12l.fp8", "laguna-xs.fp8", "lfm2-8b-a1b.bf16", "35b-a3b.fp8", "flash-next-12l.fp8", "deepseek-v2-lite.bf16", "deepseek-v3-7l.fp8", "nemotron-3-nano.bf16",
    "muse-glimmer-30b.fp8", "kolibri-1-10l.fp8", "bge-m3.bf16", "nomic-v1.5.bf16", "8b.fp8", "8b.bf16", "8b.q4_k_m", "27b-hybrid.fp8", "30b-a3b.fp8", "gpt-oss-20b.mxfp4", "gemma-12b.bf16",
    "llama-8b.q8_0", "granite-h-tiny.bf16", "lfm2-1.2b.bf16", "0.6b.bf16",
]  # fmt: skip
"""Every family at hand, once or more."""


def config(name: str) -> dict[str, Any]:
    """The config.json of that shape."""
    return (CONFIGS | PUBLISHED)[name]


def blueprint(name: str) -> Blueprint:
    """What a runner reads from the config of that shape."""
    return read_blueprint(_Header("safetensors", Path(name), {}, {}, config(name)))


class _Header(Checkpoint):
    """A checkpoint of which there is a config.json and nothing else."""

    @property
    def role(self) -> str:
        """It stands for a model."""
        return "model"


def format_of(name: str, kind: str, shape: tuple[int, ...], layer: int, n_layers: int) -> str:
    """The format of one tensor of a kind of file. q4_k_m: half of the value and down matrices, and the head, are q6_k; mxfp4: experts only."""
    if len(shape) != 2 or not name.endswith(".weight"):
        return "f32"
    is_plain = name.rsplit(".", 2)[-2] in ("router", "shared_gate", "delta_a", "delta_b", "mamba_dt")
    if kind == "fp8":
        return "bf16" if is_plain or name in ("embed.weight", "head.weight") else "fp8_e4m3"
    if kind == "mxfp4":
        return "mxfp4" if ".experts." in name else "bf16"
    if kind != "q4_k_m" or is_plain:
        return "bf16" if is_plain else kind
    more = layer < n_layers // 8 or layer >= 7 * n_layers // 8 or (layer - n_layers // 8) % 3 == 2
    better = name in ("head.weight", "embed.weight") or (more and name.endswith(("v.weight", "down.weight")))
    return "q8_0" if shape[1] % 256 else "q6_k" if better else "q4_k"


def views(plan: Blueprint, kind: str, folder: Path) -> dict[str, TensorView]:
    """Every tensor of the model, all at the beginning of one file of holes; scales are small positive numbers."""
    found: dict[str, TensorView] = {}
    holes, scales = folder / "holes", folder / "scales"
    scales.write_bytes(np.full(1 << 20, 2e-4, np.float32).tobytes())
    for name, shape in expected_shapes(plan).items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        form = by_name(format_of(name, kind, shape, layer, plan.n_layers))
        n_bytes = int(np.prod(shape)) // form.block_elements * form.block_bytes
        beside = None
        if form.name == "fp8_e4m3":
            grid = (-(-shape[0] // 128), -(-shape[1] // 128))
            beside = Scales("block", TensorView(name + "_scale_inv", grid, "f32", scales, 0, 4 * grid[0] * grid[1]), (128, 128))
            if ".ngram." in name:
                beside = Scales("tensor", TensorView(name + "_scale", (), "f32", scales, 0, 4), (0, 0))
        found[name] = TensorView(name, shape, form.name, holes, 0, n_bytes, beside)
    with holes.open("wb") as file:
        file.truncate(max(x.n_bytes for x in found.values()))
    return found
