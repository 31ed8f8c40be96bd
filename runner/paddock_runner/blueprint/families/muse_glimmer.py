"""muse-glimmer: Meta's Muse Glimmer, text part. Norms without weights on embeddings, q and k, a gate on attention, windows with rope between full layers without.

Source: https://github.com/huggingface/transformers, models/muse_glimmer; GGUF keys as in llama.cpp, src/models/muse-glimmer.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Attention, Blueprint, Layer
from ..layers import attention_of, blueprint_of, gated, gguf_local_layers, local_layers, stack
from ..sizes import Sizes, gguf_sizes, hf_sizes

DEFAULTS = {
    "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Fields that published configs leave out. Source: transformers, configuration_muse_glimmer.py, MuseGlimmerTextConfig."""
PERIOD = 4
WINDOW, SOFTCAP, QUERY_FACTOR, LOGIT_SCALE, POST_NORM_EPS = 2048, 20.0, 3.87, 0.19611613513818404, 1e-8


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "muse-glimmer.*" keys: q and k lie for interleaved rope, their norms' weights hold the factor of queries. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch)
    f = s.fields
    attention = replace(attention_of(s, "interleaved"), qk_norm=True, out_gate=True)
    is_local = gguf_local_layers(s, _local(s.n_layers))
    window = f.integer(f"{arch}.attention.sliding_window", WINDOW, low=1)
    scale, softcap = f.number(f"{arch}.logit_scale", LOGIT_SCALE), f.number(f"{arch}.final_logit_softcapping", SOFTCAP)
    return _blueprint(s, attention, (is_local, is_local), window, logit_scale=scale, logit_softcap=softcap)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type muse_glimmer_text, or the text_config around it. Raises: FileError, UnsupportedError."""
    config.choice("hidden_activation", "silu", ("silu",))
    s = hf_sizes(checkpoint, config.with_defaults(DEFAULTS))
    is_local = local_layers(config, s.n_layers, _local(s.n_layers))
    turns = _local(s.n_layers)
    if "layer_rope_theta" in config:
        thetas = config.numbers("layer_rope_theta")
        if len(thetas) != s.n_layers:
            raise config.error("layer_rope_theta", f"has {len(thetas)} entries, expected {s.n_layers}")
        turns = [theta != 0 for theta in thetas]
    bias = config.flag("attention_bias", False)
    attention = replace(
        attention_of(s), scale=s.head_width**-0.5 * config.number("qk_scale_factor", QUERY_FACTOR), qk_norm=True, unit_qk_norm=True, out_gate=True,
        qkv_bias=bias, out_bias=bias,
    )  # fmt: skip
    return _blueprint(
        s, attention, (is_local, turns), config.integer("sliding_window", WINDOW, low=1), norm_offset=1.0, out_norm_offset=0.0,
        logit_scale=config.number("output_multiplier", LOGIT_SCALE), logit_softcap=config.number("final_logit_softcapping", SOFTCAP),
        post_norm_eps=config.number("post_norm_eps", POST_NORM_EPS),
    )  # fmt: skip


def _local(n_layers: int) -> list[bool]:
    """All but every fourth layer, counted back from the last."""
    return [(n_layers - 1 - i) % PERIOD != 0 for i in range(n_layers)]


def _blueprint(s: Sizes, attention: Attention, kinds: tuple[list[bool], list[bool]], window: int, **more: Any) -> Blueprint:
    """kinds: which layers have a window, and which have rope."""
    layers = tuple(
        replace(layer, attention=replace(layer.attention, window=window if local else 0, rope=layer.attention.rope if turns else None))
        for layer, local, turns in zip(stack(s, Layer(attention, gated(s), post_norms=True)), *kinds, strict=True)
    )
    return blueprint_of("muse-glimmer", s, layers, embed_norm=True, unit_embed_norm=True, **{"post_norm_eps": POST_NORM_EPS, **more})
