"""The tiny folders as GGUF files, with gguf-py's own names and writer, and llama.cpp's conventions on top.

Those conventions (source: llama.cpp, convert_hf_to_gguf.py): q and k rows are permuted where rope is interleaved; gemma's norms hold
1 + w (qwen3.5's too); experts are stacked; gpt-oss's gate and up rows are told apart; value heads of qwen3.5's delta nets are tiled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.golden import gguf_mixed
from tests.golden.arrays import read_safetensors

ARCHS = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "granite": "granite", "phi3": "phi3", "olmo2": "olmo2", "olmo3": "olmo2", "smollm3": "smollm3", "exaone4": "exaone4", "ministral3": "mistral3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "granitemoe": "granitemoe", "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4", "muse_glimmer": "muse-glimmer", "muse_glimmer_text": "muse-glimmer", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h_moe", "ernie4_5": "ernie4_5", "seed_oss": "seed_oss", "arcee": "arcee", "laguna": "laguna",
}  # fmt: skip
"""model_type -> general.architecture."""
GEMMA4_SCALES = {"layer_scalar": "layer_output_scale.weight", "scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}

INTERLEAVED = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3", "arcee", "muse-glimmer")
NUMBERS = {
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "attention_multiplier": "attention.scale",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "output_multiplier": "logit_scale",
    "routed_scaling_factor": "expert_weights_scale",
}  # fmt: skip
COUNTS = {
    "num_experts": "expert_count", "num_local_experts": "expert_count", "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count", "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip


def permuted(w: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows as interleaved rope wants them."""
    return w.reshape(n_heads, 2, w.shape[0] // n_heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def convert(folder: Path, target: Path) -> Path:
    """One folder as one GGUF file in f32."""
    stored = read_safetensors(folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text())
    config = gguf_mixed.normalised(whole.get("text_config", whole), stored)
    has_draft = (folder / "mtp.safetensors").is_file()
    if has_draft:
        stored |= gguf_mixed.behind(read_safetensors(folder / "mtp.safetensors"), config["num_hidden_layers"])
        config["num_hidden_layers"] += 1
    arch = "gemma-embedding" if config.get("use_bidirectional_attention") else ARCHS[config["model_type"]]
    writer = gguf.GGUFWriter(target, arch)
    _write_keys(writer, arch, config)
    gguf_mixed.write_keys(writer, arch, config)
    if has_draft:
        writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
    for name, values in _tensors(gguf_mixed.restored(stored, config), arch, config).items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    if arch == "gemma-embedding":
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        for name in ("2_Dense", "3_Dense"):
            dense = read_safetensors(folder / name / "model.safetensors")
            writer.add_tensor(f"dense_{name[0]}.weight", np.ascontiguousarray(dense["linear.weight"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _write_keys(writer: Any, arch: str, c: dict[str, Any]) -> None:
    width = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    rope = c["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c.get("intermediate_size") or c["moe_intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_float32(f"{arch}.rope.scaling.yarn_beta_fast", rope.get("beta_fast", 32.0))
        writer.add_float32(f"{arch}.rope.scaling.yarn_beta_slow", rope.get("beta_slow", 1.0))
        if "attention_factor" in rope:  # llama.cpp multiplies it with the usual magnitude
            writer.add_rope_scaling_attn_factors(rope["attention_factor"] / (0.1 * float(np.log(rope["factor"])) + 1.0))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(c["original_max_position_embeddings"])
        ratio = c["max_position_embeddings"] / c["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(ratio) / np.log(c["original_max_position_embeddings"]))))
    if c.get("sliding_window"):
        writer.add_sliding_window(c["sliding_window"])
    if "sliding_attention" in c.get("layer_types", []) and "full_attention" in c["layer_types"]:
        writer.add_sliding_window_pattern([k == "sliding_attention" for k in c["layer_types"]])
    if arch == "gemma4":
        _write_gemma4(writer, c)
    if "linear_num_key_heads" in c:
        writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(c["linear_key_head_dim"])
        writer.add_ssm_group_count(c["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
        writer.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
        writer.add_full_attention_interval(c["layer_types"].index("full_attention") + 1)
    for theirs, ours in NUMBERS.items():
        if c.get(theirs) is not None:
            writer.add_float32(f"{arch}.{ours}", c[theirs])
    for theirs, ours in COUNTS.items():
        if c.get(theirs) is not None:
            writer.add_uint32(f"{arch}.{ours}", c[theirs])
    if arch == "glm4moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(c["norm_topk_prob"])
    if "query_pre_attn_scalar" in c:  # not of llama.cpp, which knows the published sizes
        writer.add_float32(f"{arch}.attention.scale", c["query_pre_attn_scalar"] ** -0.5)
    if rope.get("llama_4_scaling_beta"):
        writer.add_float32(f"{arch}.attention.temperature_scale", rope["llama_4_scaling_beta"])


def _write_gemma4(writer: Any, c: dict[str, Any]) -> None:
    """What full layers and shared ones have of their own. gguf-py's writer refuses a key twice: those of before are taken back."""
    own = next(iter(c["per_layer_config"].values()))
    is_local = [k == "sliding_attention" for k in c["layer_types"]]
    n, shared, width = c["num_hidden_layers"], c["num_kv_shared_layers"], own["head_dim"]
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count", "attention.head_count_kv", "feed_forward_length"):
        writer.kv_data[0].pop(f"gemma4.{key}")
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_key_length_swa(c["head_dim"])
    writer.add_value_length_swa(c["head_dim"])
    writer.add_rope_dimension_count(width)
    writer.add_rope_dimension_count_swa(c["head_dim"])
    writer.add_rope_freq_base_swa(c["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"])
    writer.add_head_count_kv([c["num_key_value_heads"] if local else own.get("num_key_value_heads", c["num_key_value_heads"]) for local in is_local])
    writer.add_feed_forward_length([c["intermediate_size"] * (2 if c["use_double_wide_mlp"] and i >= n - shared else 1) for i in range(n)])
    if c["enable_moe_block"]:
        writer.add_expert_used_count(c["top_k_experts"])


MAPS = {"laguna": "step35", "muse-glimmer": "gemma2"}
"""Architectures that gguf-py does not know yet -> one whose tensors have the same names."""


def _tensors(stored: dict[str, np.ndarray], arch: str, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Tensors by GGUF name."""
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == MAPS.get(arch, arch))
    names = gguf.get_tensor_name_map(kind, c["num_hidden_layers"])
    out: dict[str, np.ndarray] = {}
    for name, values in _restored(stored, c).items():
        if name.startswith("blk."):
            out[name] = values
            continue
        if name.endswith(".sinks"):
            out[f"{names.get_name(name)}.weight"] = values
            continue
        if arch == "muse-glimmer":
            name = name.replace("language_model.", "")
            if "vision" in name:
                continue
            if name.endswith("self_attn.gate_proj.weight"):
                out[f"blk.{name.split('.')[2]}.attn_gate.weight"] = values
                out |= {f"blk.{name.split('.')[2]}.attn_{x}_norm.weight": np.full(c["head_dim"], f) for x, f in (("q", c["qk_scale_factor"]), ("k", 1.0))}
                continue
        if arch == "gemma4" and name.split(".")[-1] in GEMMA4_SCALES:
            out[f"blk.{name.split('.')[2]}.{GEMMA4_SCALES[name.split('.')[-1]]}"] = values
            continue
        theirs = "output.weight" if name == "lm_head.weight" else names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is not None and name.endswith(("gate_up_proj", "down_proj")):
            theirs += ".weight"
        assert theirs is not None, name
        if arch in INTERLEAVED and ".attn_q." in theirs:
            values = permuted(values, c["num_attention_heads"])
        if arch in INTERLEAVED and ".attn_k." in theirs:
            values = permuted(values, int(np.max(c["num_key_value_heads"])))
        if arch in ("qwen35", "qwen35moe", "qwen3next") and name.endswith("norm.weight") and ".linear_attn." not in name:
            values = values + 1
        if (arch in ("gemma2", "gemma3", "gemma-embedding") and theirs.endswith("norm.weight")) or (arch == "muse-glimmer" and name.endswith("layernorm.weight")):
            values = values + 1
        out[theirs] = values
    rope = c["rope_parameters"]
    if arch == "gemma4":
        n = next(iter(c["per_layer_config"].values()))["head_dim"] // 2
        turned = int(n * rope["full_attention"]["partial_rotary_factor"])
        out["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * (n - turned))
    for key in ("short_factor", "long_factor"):
        if key in rope:
            out[f"rope_factors_{key[:-7]}.weight"] = np.array(rope[key])
    return out


def _restored(tensors: dict[str, np.ndarray], c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Experts as stacks under the names that gguf-py's map knows; other tensors as they are."""
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        stem, _, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if number.isdecimal():
            stacks.setdefault(f"{stem}.experts.{part}", {})[int(number)] = values
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            out[name.replace("input_linear", "experts.w1")], out[name.replace("input_linear", "experts.w3")] = np.split(values, 2, axis=1)
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            out[name.replace("output_linear", "experts.w2")] = values
        elif c["model_type"] == "gpt_oss" and rest:
            out.update(_gpt_oss(stem, rest, values))
        elif ".linear_attn." in name:
            out.update(_delta(stem, name, values, c))
        elif name.endswith("e_score_correction_bias"):
            out[name.replace("mlp.gate.e_score_correction_bias", "mlp.gate.e_score_correction.bias")] = values
        else:
            out[name] = values
    return {**out, **{name: np.stack([parts[e] for e in range(len(parts))]) for name, parts in stacks.items()}}


def _delta(stem: str, name: str, values: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """A tensor of a delta net: tiled where qwen3.5 is, taken apart where qwen3-next is."""
    g, h, dk, dv = (c[f"linear_{x}"] for x in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    root, _, kind = name.partition(".linear_attn.")
    ratio, keys = h // g, 2 * g * dk
    if kind == "in_proj_qkvz.weight":
        parts = np.split(values.reshape(g, -1, values.shape[1]), np.cumsum([dk, dk, ratio * dv]), axis=1)
        q, k, v, z = (x.reshape(-1, values.shape[1]) for x in parts)
        return {f"{root}.linear_attn.in_proj_qkv.weight": np.concatenate([q, k, v]), f"{root}.linear_attn.in_proj_z.weight": z}

    def tiled(x: np.ndarray, width: int) -> np.ndarray:
        return x if c["model_type"] == "qwen3_next" else x.reshape(g, ratio, width, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    if kind == "A_log":
        return {name: -np.exp(tiled(values, 1))}
    if kind == "dt_bias":
        return {f"{root}.linear_attn.dt_proj.bias": tiled(values, 1)}
    if kind.startswith(("in_proj_qkv", "conv1d")):
        values = values.reshape(values.shape[0], -1)
        return {name: np.concatenate([values[:keys], tiled(values[keys:], dv)])}
    if kind.startswith("out_proj"):
        return {name: tiled(values.T, dv).T}
    width = {"in_proj_z.weight": dv, "in_proj_a.weight": 1, "in_proj_b.weight": 1}.get(kind)
    return {name: values if width is None else tiled(values, width)}


def _gpt_oss(stem: str, rest: str, values: np.ndarray) -> dict[str, np.ndarray]:
    kind = "bias" if rest.endswith("_bias") else "weight"
    values = values if kind == "bias" else values.swapaxes(1, 2)
    if rest.startswith("down"):
        return {f"{stem}.experts.down_proj.{kind}": values}
    return {f"{stem}.experts.gate_proj.{kind}": values[:, 0::2], f"{stem}.experts.up_proj.{kind}": values[:, 1::2]}

