"""llama-kin: dense models that differ from llama in a bias, the layout of rope, or a feed-forward without a gate: ERNIE 4.5, Seed-OSS, AFM.

Source: https://github.com/huggingface/transformers, models/ernie4_5, models/seed_oss, models/arcee.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint
from ..sizes import gguf_sizes, hf_sizes
from .llama import dense


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From the keys of ernie4_5, seed_oss or arcee. Raises: FileError, UnsupportedError."""
    s, has = gguf_sizes(checkpoint, arch), checkpoint.tensors.__contains__
    layout = "neox" if arch == "seed_oss" else "interleaved"
    blueprint = dense(s, layout, 0, has("blk.0.attn_q.bias"), has("blk.0.attn_output.bias"), has("blk.0.ffn_down.bias"))
    return replace(_ungated(blueprint) if arch == "arcee" else blueprint, family=arch)


def _ungated(blueprint: Blueprint) -> Blueprint:
    """With the square of a rectifier instead of a gate."""
    layers = tuple(replace(x, feed_forward=replace(x.feed_forward, activation="relu2", is_gated=False)) for x in blueprint.layers)
    return replace(blueprint, layers=layers)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type ernie4_5, seed_oss or arcee. Raises: FileError, UnsupportedError."""
    kind = config.text("model_type", "")
    if kind == "ernie4_5":
        config.choice("hidden_act", "silu", ("silu",))
        s = hf_sizes(checkpoint, config.with_defaults({"head_dim": 128, "rope_theta": 500000.0}), tied_default=True)
        bias = config.flag("use_bias", False)
        return replace(dense(s, "interleaved", 0, bias, bias, bias), family=kind)
    if kind == "seed_oss":
        config.choice("hidden_act", "silu", ("silu",))
        s = hf_sizes(checkpoint, config.with_defaults({"head_dim": 128}))
        return replace(dense(s, "neox", 0, config.flag("attention_bias", True), config.flag("attention_out_bias", False), config.flag("mlp_bias", False)), family=kind)
    config.choice("hidden_act", "relu2", ("relu2",))
    bias = config.flag("attention_bias", False)
    return replace(_ungated(dense(hf_sizes(checkpoint, config), "neox", 0, bias, bias, config.flag("mlp_bias", False))), family=kind)
