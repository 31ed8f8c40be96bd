"""Tensors of Mamba 2 layers: their names and shapes, and the one projection taken apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..files.fields import Fields
from ..files.view import TensorView
from .blueprint import Blueprint, Mamba
from .quantised import rows_of

PARTS = {
    "in_proj": "mamba_in", "conv1d": "mamba_conv", "norm": "mamba_scale", "out_proj": "o", "A_log": "mamba_a_log.weight", "D": "mamba_d.weight",
    "dt_bias": "mamba_dt_bias.weight",
}  # fmt: skip
"""Stems, and whole names where the last word is no kind of tensor. mamba_scale is the output norm's weight."""


MAMBA_KINDS = ("mamba", "linear_attention")
"""Words for a layer of this kind in layer_types."""


def step_limits(config: Fields) -> tuple[float, float]:
    """The least and the largest time step. Raises: FileError."""
    value = config.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    found = [math.inf if x in (math.inf, {"__float__": "Infinity"}) else x for x in value] if isinstance(value, list) else []
    if len(found) != 2 or not all(isinstance(x, (int, float)) and x >= 0 for x in found) or found[0] > found[1]:
        raise config.error("time_step_limit", "is no pair of a least and a largest time step")
    return float(found[0]), float(found[1])


def mamba_name(stem: str, kind: str) -> str | None:
    """Our name within a Mamba layer for what follows its module's name; None when it is not one of its own."""
    if not stem:
        return PARTS.get(kind)
    return f"{PARTS[stem]}.{kind}" if stem in PARTS else None


GGUF_VECTORS = {"ssm_a": "mamba_a_log.weight", "ssm_d": "mamba_d.weight", "ssm_dt.bias": "mamba_dt_bias.weight", "ssm_norm.weight": "mamba_scale.weight"}
GGUF_LAYER = {
    "ssm_in.weight": "mamba_in.weight", "ssm_in.bias": "mamba_in.bias", "ssm_conv1d.weight": "mamba_conv.weight", "ssm_conv1d.bias": "mamba_conv.bias",
    "ssm_out.weight": "o.weight", "ssm_out.bias": "o.bias",
}  # fmt: skip


def gguf_mamba_view(within: str, view: TensorView, x: Mamba) -> tuple[str, TensorView] | None:
    """Our name within a Mamba layer for a GGUF tensor, and the tensor with its vectors as such (ssm_a holds -exp(A_log)); None: not one of its own."""
    if within in GGUF_LAYER:
        return GGUF_LAYER[within], view
    if within not in GGUF_VECTORS:
        return None
    n = x.n_values if within == "ssm_norm.weight" else x.n_heads
    flat = replace(view, shape=(n,)) if view.n_elements == n else view
    return GGUF_VECTORS[within], replace(flat, is_log_of_negative=within == "ssm_a")


def gguf_mamba(fields: Fields, arch: str, conv_bias: bool, bias: bool = False, least_step: float = 0.0) -> Mamba:
    """From the keys "<arch>.ssm.*". Raises: FileError."""
    n_heads, n_values = fields.integer(f"{arch}.ssm.time_step_rank", low=1), fields.integer(f"{arch}.ssm.inner_size", low=1)
    n_groups = fields.integer(f"{arch}.ssm.group_count", 1, low=1)
    if n_values % n_heads or n_heads % n_groups:
        raise fields.error(f"{arch}.ssm.time_step_rank", f"is {n_heads} heads for {n_values} values and {n_groups} groups")
    return Mamba(
        n_heads, n_values // n_heads, n_groups, fields.integer(f"{arch}.ssm.state_size", low=1), fields.integer(f"{arch}.ssm.conv_kernel", low=2, high=16),
        n_groups, conv_bias, bias, (least_step, math.inf),
    )  # fmt: skip


def mamba_shapes(x: Mamba, model_width: int) -> dict[str, tuple[int, ...]]:
    """Our name within the layer -> shape."""
    want: dict[str, tuple[int, ...]] = {f"mamba_{name}.weight": (n, model_width) for name, n in _rows(x).items()}
    want |= {"mamba_conv.weight": (x.n_channels, 1, x.conv_width), "mamba_scale.weight": (x.n_values,), "o.weight": (model_width, x.n_values)}
    want |= {f"mamba_{name}.weight": (x.n_heads,) for name in ("a_log", "d", "dt_bias")}
    if x.conv_bias:
        want["mamba_conv.bias"] = (x.n_channels,)
    if x.bias:
        want |= {f"mamba_{name}.bias": (n,) for name, n in _rows(x).items()}
        want["o.bias"] = (model_width,)
    return want


def _rows(x: Mamba) -> dict[str, int]:
    return {"z": x.n_values, "xbc": x.n_channels, "dt": x.n_heads}


def split_mamba(ours: Mapping[str, TensorView], i: int, x: Mamba) -> dict[str, TensorView]:
    """The tensors, the projection of layer i (rows of z, then of x, B and C, then of dt) taken apart."""
    out, at = dict(ours), f"layers.{i}."
    for kind in ("weight", "bias"):
        view = out.get(f"{at}mamba_in.{kind}")
        if view is None or view.shape[0] != sum(_rows(x).values()):
            continue
        del out[f"{at}mamba_in.{kind}"]
        first = 0
        for name, n in _rows(x).items():
            out[f"{at}mamba_{name}.{kind}"] = rows_of(view, first, n)
            first += n
    return out


def nemotron_name(name: str, blueprint: Blueprint) -> str:
    """A tensor of Nemotron-H, whose blocks call every part `mixer`, by the name that other models have for it."""
    for prefix in ("backbone.", "model."):
        if name.startswith(prefix):
            name = "model." + name.removeprefix(prefix)
    name = name.replace("model.embeddings.", "model.embed_tokens.").replace("model.norm_f.", "model.norm.")
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or len(parts) < 5 or not parts[2].isdecimal() or int(parts[2]) >= blueprint.n_layers:
        return name
    layer = blueprint.layers[int(parts[2])]
    if parts[3] == "norm":
        parts[3] = "post_attention_layernorm" if layer.kind == "none" else "input_layernorm"
    elif parts[3] == "mixer":
        parts[3] = "mamba" if layer.mamba is not None else "self_attn" if layer.kind == "attention" else "mlp"
    return ".".join(parts)
