"""gemma4: Gemma 4, text part. Windows with narrow heads between full layers with wide ones, shared keys and values, inputs for every layer, experts.

Source: https://github.com/huggingface/transformers, models/gemma4; GGUF keys as in llama.cpp, src/models/gemma4.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Attention, Blueprint, Experts, FeedForward, Layer, Rope
from ..gemma4 import hf_ropes, kv_owners, layer_scales
from ..layers import gguf_local_layers, local_layers
from ..mixture import checked_experts
from ..sizes import Sizes, gguf_sizes, hf_sizes, rope_base

DEFAULTS = {"head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Fields that published configs leave out. Source: transformers, configuration_gemma4.py, Gemma4TextConfig."""
PERIOD = 6
WIDE_HEAD, LOCAL_THETA, WINDOW = 512, 10000.0, 512


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs between layers. wide, local: (head width, rope) of layers that see all, and of those with a window; owners: see kv_owners."""

    is_local: Sequence[bool]
    n_kv_heads: Sequence[int]
    wide: tuple[int, Rope]
    local: tuple[int, Rope]
    owners: Sequence[int | None]
    window: int
    ff_widths: Sequence[int]
    values_are_keys: Sequence[bool]
    experts: Experts | None
    bias: bool = False
    causal: bool = True


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "gemma4.*" keys. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch, may_have_experts=True)
    f, has = s.fields, checkpoint.tensors.__contains__
    is_local = gguf_local_layers(s, [(i + 1) % PERIOD != 0 for i in range(s.n_layers)])
    narrow = f.integer(f"{arch}.attention.key_length_swa", s.head_width, low=2, high=4096)
    local = Rope(rope_base(f, f"{arch}.rope.freq_base_swa", LOCAL_THETA), f.integer(f"{arch}.rope.dimension_count_swa", narrow, low=2, high=narrow))
    key = f"{arch}.attention.shared_kv_layers"
    experts = None
    if f.integer(f"{arch}.expert_count", 0) > 0:
        n = f.integer
        experts = Experts(n(f"{arch}.expert_count"), n(f"{arch}.expert_used_count", low=1), n(f"{arch}.expert_feed_forward_length", low=1))
    parts = Parts(
        is_local, s.n_kv_heads, (s.head_width, s.rope()), (narrow, local), kv_owners(is_local, f.integer(key, 0), f, key),
        f.integer(f"{arch}.attention.sliding_window", WINDOW, low=1), s.ff_widths, [not has(f"blk.{i}.attn_v.weight") and not has(f"blk.{i}.attn_qkv.weight") for i in range(s.n_layers)], experts,
    )  # fmt: skip
    softcap = f.number(f"{arch}.final_logit_softcapping", 0.0)
    return _blueprint(checkpoint, s, parts, softcap, f.integer(f"{arch}.embedding_length_per_layer_input", 0))


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type gemma4_text, or the text_config around it. Raises: FileError, UnsupportedError."""
    config.choice("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    plain = Fields({k: v for k, v in config.items() if k != "rope_parameters"}, config.where, config.noun, config.prefix)
    s = hf_sizes(checkpoint, plain.with_defaults(DEFAULTS), tied_default=True)
    is_local = local_layers(config, s.n_layers, [(i + 1) % PERIOD != 0 for i in range(s.n_layers)])
    is_local[-1] = False
    wide, n_kv = _wide_heads(config, s, is_local)
    owners = kv_owners(is_local, config.integer("num_kv_shared_layers", 0), config, "num_kv_shared_layers")
    wide_rope, local_rope = hf_ropes(config, wide, s.head_width)
    widths = [n * (2 if owner is not None and config.flag("use_double_wide_mlp", False) else 1) for n, owner in zip(s.ff_widths, owners, strict=True)]
    is_unified = config.get("model_type") == "gemma4_unified_text"
    width = config.integer("hidden_size_per_layer_input", 0 if is_unified else 256)
    if width and config.integer("vocab_size_per_layer_input", s.n_vocab) != s.n_vocab:
        raise config.error("vocab_size_per_layer_input", f"is {config['vocab_size_per_layer_input']}, expected {s.n_vocab} as the vocabulary")
    window, is_encoder = config.integer("sliding_window", WINDOW * (2 if is_unified else 1), low=1), config.get("use_bidirectional_attention") == "all"
    keys_too = config.flag("attention_k_eq_v", False)
    parts = Parts(
        is_local, n_kv, (wide, wide_rope), (s.head_width, local_rope), owners, window // 2 + 1 if is_encoder else window,
        widths, [keys_too and not local for local in is_local], _experts(config), config.flag("attention_bias", False), not is_encoder,
    )  # fmt: skip
    return _blueprint(checkpoint, s, parts, config.number("final_logit_softcapping", 0.0), width)


def _blueprint(checkpoint: Checkpoint, s: Sizes, p: Parts, softcap: float, input_width: int) -> Blueprint:
    outs, is_unread = layer_scales(checkpoint, s.n_layers)
    experts = p.experts and replace(p.experts, activation="gelu_tanh", is_beside=True, router_scale=s.model_width**-0.5, has_scales=True)
    layers = []
    for i, local in enumerate(p.is_local):
        width, rope = p.local if local else p.wide
        attention = Attention(
            s.n_heads, p.n_kv_heads[i], width, 1.0, rope, window=p.window if local else 0, qk_norm=True, v_norm=True, qkv_bias=p.bias, out_bias=p.bias,
            causal=p.causal, values_are_keys=p.values_are_keys[i] and p.owners[i] is None, kv_from=p.owners[i],
        )  # fmt: skip
        layers.append(Layer(attention, FeedForward(p.ff_widths[i], "gelu_tanh"), post_norms=True, out_scale=outs[i], experts=experts))
    return Blueprint(
        "gemma4", s.n_vocab, s.model_width, s.max_ctx_tokens, tuple(layers), s.norm_eps, s.tied_head, embed_scale=math.sqrt(s.model_width),
        logit_softcap=softcap, input_width=input_width, name=s.name,
        notes=(*s.notes, *(("scales of layers are in tensors that were not read",) if is_unread else ())),
    )  # fmt: skip


def _wide_heads(config: Fields, s: Sizes, is_local: Sequence[bool]) -> tuple[int, tuple[int, ...]]:
    """Head width of full layers, and every layer's key-value heads: from per_layer_config, or the fields of published checkpoints."""
    n_kv = list(s.n_kv_heads)
    own = config.section("per_layer_config") if config.get("per_layer_config") else None
    wide = config.integer("global_head_dim", WIDE_HEAD if own is None else s.head_width, low=2, high=4096)
    if config.flag("attention_k_eq_v", False) and "num_global_key_value_heads" in config:
        n_kv = [n if local else config.integer("num_global_key_value_heads", low=1) for n, local in zip(n_kv, is_local, strict=True)]
    widths = {wide} if own is None else set()
    for i, local in enumerate(is_local if own is not None else ()):
        fields = own.section(str(i)) if own is not None and str(i) in own else Fields({}, config.where, config.noun)
        if local and len(fields):
            raise UnsupportedError(f"{config.where}: layer {i} has a window and settings of its own, which is not supported", what="per_layer_config")
        if not local:
            widths.add(fields.integer("head_dim", wide, low=2, high=4096))
            n_kv[i] = fields.integer("num_key_value_heads", n_kv[i], low=1)
    if len(widths) != 1:
        raise UnsupportedError(f"{config.where}: full layers have heads of {sorted(widths)}, expected one width", what="per_layer_config")
    odd = next((n for n in n_kv if s.n_heads % n), 0)
    if odd:
        raise config.error("num_global_key_value_heads", f"is {odd}, expected a divisor of {s.n_heads} heads")
    return widths.pop(), tuple(n_kv)


def _experts(config: Fields) -> Experts | None:
    if not config.flag("enable_moe_block", False):
        return None
    n_experts, n_used, width = (config.integer(k, low=1) for k in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    return checked_experts(Experts(n_experts, n_used, width), config)
