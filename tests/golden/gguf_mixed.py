"""What gguf_of.py needs for models whose layers differ in kind, and for latent attention: their keys and their tensors.

Conventions (source: llama.cpp, convert_hf_to_gguf.py): a layer that lacks a part has 0 heads, or a width of 0; A_log is stored as -exp(A_log); the
convolutions' weights are [C, W]; latent attention's kv_b is taken apart per head; Nemotron-H's blocks have one norm each.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MAMBA_SIZES = {
    "granitemoehybrid": ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
}
PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def normalised(c: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The config with the fields that other families have."""
    kinds, kind = c.get("layers_block_type") or c.get("layer_types") or [], c["model_type"]
    c = {"num_hidden_layers": len(kinds), "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **c}
    c.setdefault("rms_norm_eps", c.get("norm_eps", c.get("layer_norm_epsilon")))
    has_kv = kinds and kind in ("lfm2", "lfm2_moe", "granitemoehybrid", "nemotron_h")
    if has_kv:
        c["num_key_value_heads"] = [c["num_key_value_heads"] if k in ("full_attention", "attention") else 0 for k in kinds]
    if kind == "nemotron_h":
        c["intermediate_size"] = [c["intermediate_size"] if k == "mlp" else 0 for k in kinds]
        c["moe_layers"] = [i for i, k in enumerate(kinds) if k == "moe"]
        c["shared_expert_intermediate_size"] = c["moe_shared_expert_intermediate_size"]
    if kind == "lfm2":
        c["intermediate_size"] = tensors["model.layers.0.feed_forward.w1.weight"].shape[0]
    if kind == "lfm2_moe":
        c["first_k_dense_replace"] = c["num_dense_layers"]
    if kind == "granitemoehybrid":
        c["shared_expert_intermediate_size"] = c["shared_intermediate_size"]
        if not c["num_local_experts"]:
            c["intermediate_size"] = c["shared_intermediate_size"]
    if kind == "laguna":
        c["routed_scaling_factor"] = c["moe_routed_scaling_factor"]
        c["first_k_dense_replace"] = c["mlp_layer_types"].index("sparse")
        c["sliding_window"] = c["sliding_window"] if "sliding_attention" in c["layer_types"] else 0
    if kind in ("deepseek_v2", "deepseek_v3"):
        c["head_dim"], c["num_key_value_heads"] = c["kv_lora_rank"] + c["qk_rope_head_dim"], 1
    return c


DRAFT = {
    "mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm", "mtp.norm": "shared_head_norm",
    "eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm",
}  # fmt: skip


def behind(tensors: dict[str, np.ndarray], n: int) -> dict[str, np.ndarray]:
    """A draft layer as the n-th layer, with what it has of its own under GGUF's names; Qwen's norms hold 1 + w there."""
    out = {}
    for name, values in tensors.items():
        stem, _, kind = name.removeprefix(f"model.layers.{n}.").rpartition(".")
        if stem in DRAFT:
            is_offset = stem.startswith("mtp.") and "norm" in stem
            out[f"blk.{n}.nextn.{DRAFT[stem]}.{kind}"] = values + is_offset
        else:
            out[name.replace("mtp.layers.0.", f"model.layers.{n}.")] = values
    return out


def write_keys(writer: Any, arch: str, c: dict[str, Any]) -> None:
    """Keys beyond those of every family."""
    kind = c["model_type"]
    if kind in MAMBA_SIZES and any(k in ("mamba", "linear_attention") for k in c.get("layers_block_type") or c["layer_types"]):
        heads, width, groups, state, taps = (c[name] for name in MAMBA_SIZES[kind])
        writer.add_ssm_conv_kernel(taps)
        writer.add_ssm_state_size(state)
        writer.add_ssm_group_count(groups)
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * width)
    if kind == "granitemoehybrid":
        writer.add_bool(f"{arch}.rope.scaling.finetuned", c["position_embedding_type"] == "rope")
    if kind in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(c["conv_L_cache"])
    if kind == "nemotron_h":
        writer.add_uint32(f"{arch}.expert_gating_func", 2)
        writer.add_expert_weights_norm(c["norm_topk_prob"])
    if kind == "laguna":
        writer.add_head_count(c["num_attention_heads_per_layer"])
        writer.add_uint32(f"{arch}.rope.dimension_count_swa", int(c["head_dim"] * c["rope_parameters"]["sliding_attention"]["partial_rotary_factor"]))
        writer.add_float32(f"{arch}.rope.freq_base_swa", c["rope_parameters"]["sliding_attention"]["rope_theta"])
    if arch == "deepseek2":
        _write_latent(writer, arch, c)


def _write_latent(writer: Any, arch: str, c: dict[str, Any]) -> None:
    is_new = c["model_type"] == "deepseek_v3"
    writer.add_kv_lora_rank(c["kv_lora_rank"])
    if c["q_lora_rank"]:
        writer.add_q_lora_rank(c["q_lora_rank"])
    writer.add_value_length(c["kv_lora_rank"])
    writer.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    writer.add_value_length_mla(c["v_head_dim"])
    writer.add_rope_dimension_count(c["qk_rope_head_dim"])
    writer.add_uint32(f"{arch}.expert_gating_func", 2 if is_new else 1)
    writer.add_expert_weights_norm(is_new and c["norm_topk_prob"])
    if "mscale_all_dim" in c["rope_parameters"]:
        writer.add_float32(f"{arch}.rope.scaling.yarn_log_multiplier", 0.1 * c["rope_parameters"]["mscale_all_dim"])


def restored(tensors: dict[str, np.ndarray], c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Tensors in the shapes that GGUF has, under Hugging Face's names or (with "blk.") under its own."""
    out: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        stem, _, kind = name.rpartition(".")
        if c["model_type"] in MAMBA_SIZES and (found := _mamba(name, values, c)):
            out.update(found)
        elif name.endswith((".conv.conv.weight", "conv1d.weight")) and values.ndim == 3:
            out[name] = values[:, 0]
        elif name.endswith("shared_mlp.input_linear.weight"):
            at = "blk." + stem.split(".")[2]
            suffix = "_shexp" if c["num_local_experts"] else ""
            out[f"{at}.ffn_gate{suffix}.weight"], out[f"{at}.ffn_up{suffix}.weight"] = np.split(values, 2)
        elif name.endswith("shared_mlp.output_linear.weight"):
            out[f"blk.{stem.split('.')[2]}.ffn_down{'_shexp' if c['num_local_experts'] else ''}.weight"] = values
        elif ".feed_forward.experts." in name:
            number, part = stem.split(".")[5:]
            out[f"{'.'.join(stem.split('.')[:3])}.mlp.experts.{number}.{PARTS[part]}.{kind}"] = values
        elif name.endswith("kv_b_proj.weight"):
            per_head = values.reshape(c["num_attention_heads"], c["qk_nope_head_dim"] + c["v_head_dim"], -1)
            at = f"blk.{stem.split('.')[2]}"
            out[f"{at}.attn_k_b.weight"] = per_head[:, : c["qk_nope_head_dim"]].swapaxes(1, 2)
            out[f"{at}.attn_v_b.weight"] = per_head[:, c["qk_nope_head_dim"] :]
        elif name.endswith("expert_bias") or kind == "e_score_correction_bias":
            out[f"blk.{stem.split('.')[2]}.exp_probs_b.bias"] = values
        elif name.endswith("g_proj.weight"):
            out[f"blk.{stem.split('.')[2]}.attn_gate.weight"] = values
        elif c["model_type"] == "deepseek_v3" and name.endswith(("q_b_proj.weight", "kv_a_proj_with_mqa.weight")):
            out[name] = _stretched(name, values, c)
        else:
            out[name] = values
    return out


def _stretched(name: str, values: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    """Rows that are rotated times the stretch of cos and sin, for which such files have no key."""
    rope = c["rope_parameters"]
    over, under = (0.1 * rope[key] * math.log(rope["factor"]) + 1.0 for key in ("mscale", "mscale_all_dim"))
    out = values.copy()
    parts = out.reshape(c["num_attention_heads"], -1, out.shape[1]) if "q_b_proj" in name else out[None]
    parts[:, -c["qk_rope_head_dim"] :] *= over / under
    return out


def _mamba(name: str, values: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """A tensor of Mamba 2, or any of Nemotron-H, whose blocks call every part `mixer`."""
    parts = name.split(".")
    if parts[1] != "layers":
        return None
    at, within = f"blk.{parts[2]}", ".".join(parts[4:])
    if parts[3] not in ("mamba", "mixer"):
        return {f"{at}.attn_norm.weight": values} if parts[3] == "norm" else None
    groups = c[MAMBA_SIZES[c["model_type"]][2]]
    own = {
        "A_log": lambda: {"ssm_a": -np.exp(values)[:, None]}, "D": lambda: {"ssm_d": values[:, None]}, "dt_bias": lambda: {"ssm_dt.bias": values},
        "conv1d.weight": lambda: {"ssm_conv1d.weight": values[:, 0]}, "conv1d.bias": lambda: {"ssm_conv1d.bias": values},
        "in_proj.weight": lambda: {"ssm_in.weight": values}, "out_proj.weight": lambda: {"ssm_out.weight": values},
        "norm.weight": lambda: {"ssm_norm.weight": values.reshape(groups, -1)},
        "q_proj.weight": lambda: {"attn_q.weight": values}, "k_proj.weight": lambda: {"attn_k.weight": values},
        "v_proj.weight": lambda: {"attn_v.weight": values}, "o_proj.weight": lambda: {"attn_output.weight": values},
        "gate.weight": lambda: {"ffn_gate_inp.weight": values}, "gate.e_score_correction_bias": lambda: {"exp_probs_b.bias": values},
        "shared_experts.up_proj.weight": lambda: {"ffn_up_shexp.weight": values}, "shared_experts.down_proj.weight": lambda: {"ffn_down_shexp.weight": values},
        "up_proj.weight": lambda: {"ffn_up.weight": values}, "down_proj.weight": lambda: {"ffn_down.weight": values},
    }  # fmt: skip
    if within.startswith("experts."):
        return {f"model.layers.{parts[2]}.mlp.{within}": values}
    if within not in own:
        return None
    return {f"{at}.{key}": part for key, part in own[within]().items()}
