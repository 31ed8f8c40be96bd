"""Scales of keys and values that lie in a checkpoint, for caches in FP8: compressed-tensors' and ModelOpt's, one a tensor or one a KV head."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import FileError
from ..files.view import TensorView
from .blueprint import Blueprint

NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:(?:attn\.|[kv]_proj\.)?([kv])_scale|([kv])_proj\.output_scale)$")
FORMATS = ("f32", "bf16", "f16")

Pair = tuple[TensorView, TensorView]


def kv_scales(tensors: Mapping[str, TensorView], blueprint: Blueprint) -> dict[int, Pair]:
    """(of keys, of values) by layer; empty when the checkpoint has none. Raises: FileError when some layers have them and others not, or in another shape."""
    found: dict[int, dict[str, TensorView]] = {}
    for name, view in tensors.items():
        if (m := NAME.search(name)) and int(m[1]) < blueprint.n_layers:
            found.setdefault(int(m[1]), {})[m[2] or m[3]] = view
    if not found:
        return {}
    pairs = {}
    for i, layer in enumerate(blueprint.layers):
        a = layer.attention
        if a.kv_from is not None or not a.n_kv_heads or a.latent is not None:
            continue
        views = found.get(i, {})
        for part in "kv":
            if part not in views:
                raise FileError(f"layer {i} has no {part}_scale, others have", field=f"layers.{i}.self_attn.{part}_scale")
            view = views[part]
            if view.format not in FORMATS or view.n_elements not in (1, a.n_kv_heads):
                raise FileError(
                    f"{view.path}: tensor {view.name} is {view.format} {list(view.shape)}, expected one number or one for each of {a.n_kv_heads} heads", field=view.name
                )
        pairs[i] = (views["k"], views["v"])
    return pairs
