"""Tensors that only Gemma 4 has: inputs of every layer, experts beside a feed-forward, and what shared keys and values leave over."""

from __future__ import annotations

from collections.abc import Sequence

from ..files.checkpoint import Checkpoint
from ..files.fields import Fields
from .blueprint import Blueprint, Experts, Rope
from .experts import hf_expert_name
from .rope import proportional_factors
from .sizes import rope_base
from .stored import stored_numbers

HF = {"embed_tokens_per_layer": "layer_inputs", "per_layer_model_projection": "input_projection", "per_layer_projection_norm": "input_norm"}
HF_LAYER = {
    "per_layer_input_gate": "input_gate", "per_layer_projection": "input_out", "post_per_layer_input_norm": "input_post_norm",
    "pre_feedforward_layernorm_2": "experts_norm", "post_feedforward_layernorm_1": "dense_post_norm", "post_feedforward_layernorm_2": "experts_post_norm",
    "router.proj": "router",
}  # fmt: skip
GGUF = {"per_layer_token_embd": "layer_inputs", "per_layer_model_proj": "input_projection", "per_layer_proj_norm": "input_norm"}
GGUF_LAYER = {
    "inp_gate": "input_gate", "proj": "input_out", "post_norm": "input_post_norm",
    "pre_ffw_norm_2": "experts_norm", "post_ffw_norm_1": "dense_post_norm", "post_ffw_norm_2": "experts_post_norm",
}  # fmt: skip
VECTORS = {
    "router.scale": "router_norm", "router.per_expert_scale": "expert_scales", "ffn_gate_inp.scale": "router_norm", "ffn_down_exps.scale": "expert_scales",
}  # fmt: skip
SCALES = ("layer_scalar", "layer_output_scale.weight")
"""Tensors whose numbers the family put into the blueprint."""

KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm", "v_norm", "attn_k", "attn_v", "attn_k_norm")


def kv_owners(is_local: Sequence[bool], n_shared: int, fields: Fields, key: str) -> list[int | None]:
    """For each of the last n_shared layers the last one of its kind before them; None for layers with keys and values of their own.

    Raises: FileError naming the key when there is none.
    """
    own = len(is_local) - n_shared
    if own < 1:
        raise fields.error(key, f"is {n_shared} of {len(is_local)} layers: a model that reads another model's keys and values")
    last = {local: max((i for i in range(own) if is_local[i] == local), default=None) for local in (True, False)}
    found = [last[local] if i >= own else None for i, local in enumerate(is_local)]
    if any(x is None for x in found[own:]):
        raise fields.error(key, f"is {n_shared}: some of these layers have no layer of their kind before them")
    return found


def hf_ropes(config: Fields, wide: int, narrow: int) -> tuple[Rope, Rope]:
    """Of full layers with heads of that width, and of layers with a window. Raises: FileError, UnsupportedError."""
    nothing = Fields({}, config.where, config.noun, config.prefix)
    both = config.section("rope_parameters") if "rope_parameters" in config else nothing
    full, local = (both.section(kind) if kind in both else nothing for kind in ("full_attention", "sliding_attention"))
    local.choice("rope_type", "default", ("default",))
    share = full.number("partial_rotary_factor", 0.25) if full.choice("rope_type", "proportional", ("proportional", "default")) == "proportional" else 1.0
    factor = full.number("factor", 1.0)
    if not 0 <= share <= 1 or factor <= 0:
        raise full.error("partial_rotary_factor", f"is {share} with a factor of {factor}, expected 0 to 1 and a positive factor")
    if wide % 2:
        raise config.error("global_head_dim", f"is {wide}, expected an even width")
    factors = proportional_factors(wide, int(share * wide // 2), factor)
    return Rope(rope_base(full, "rope_theta", 1000000.0), wide, factors=factors), Rope(rope_base(local, "rope_theta", 10000.0), narrow)


def layer_scales(checkpoint: Checkpoint, n_layers: int) -> tuple[list[float], bool]:
    """What multiplies the residual at the end of every layer, and whether some of it could not be read. Raises: FileError for numbers that are none."""
    outs, is_unread = [1.0] * n_layers, False
    for name in checkpoint.tensors:
        words = name.split(".")
        at = next((i for i, word in enumerate(words) if word in ("layers", "blk")), len(words))
        if ".".join(words[at + 2 :]) not in SCALES or not words[at + 1].isdecimal() or int(words[at + 1]) >= n_layers:
            continue
        values = stored_numbers(checkpoint, name)
        is_unread = is_unread or not values
        outs[int(words[at + 1])] = values[0] if values else 1.0
    return outs, is_unread


def hf_name(within: str) -> str | None:
    """Our name within a layer for what stands behind "layers.I."; None when it is not one of these."""
    if within in VECTORS:
        return VECTORS[within] + ".weight"
    stem, _, kind = within.rpartition(".")
    if stem.startswith("experts."):
        return hf_expert_name(f"mlp.{stem}", kind)
    if stem == "experts":
        return {"gate_up_proj": "experts.gate_up.weight", "down_proj": "experts.down.weight"}.get(kind)
    return f"{HF_LAYER[stem]}.{kind}" if stem in HF_LAYER else None


def gguf_name(within: str) -> str | None:
    """The same for what stands behind "blk.I."."""
    if within in VECTORS:
        return VECTORS[within] + ".weight"
    stem, _, kind = within.rpartition(".")
    return f"{GGUF_LAYER[stem]}.{kind}" if stem in GGUF_LAYER else None


def is_left_out(within: str, blueprint: Blueprint, i: int) -> bool:
    """True for a tensor of layer i that is not loaded: its numbers are in the blueprint, or it makes keys and values that nobody reads."""
    if within in SCALES:
        return True
    return blueprint.layers[i].attention.kv_from is not None and within.rpartition(".")[0].rpartition(".")[2] in KEYS_AND_VALUES


def input_shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of what gives every layer its input of the token."""
    m, width = blueprint.model_width, blueprint.input_width
    if not width:
        return {}
    every = blueprint.n_layers * width
    want: dict[str, tuple[int, ...]] = {
        "layer_inputs.weight": (blueprint.n_vocab, every), "input_projection.weight": (every, m), "input_norm.weight": (width,),
    }  # fmt: skip
    for i in range(blueprint.n_layers):
        at = f"layers.{i}."
        want.update({at + "input_gate.weight": (width, m), at + "input_out.weight": (m, width), at + "input_post_norm.weight": (m,)})
    return want


def beside_shapes(experts: Experts, m: int) -> dict[str, tuple[int, ...]]:
    """Our name within the layer -> shape of the norms of experts that stand beside a feed-forward, and of the experts' factors."""
    names = ("router_norm", "experts_norm", "dense_post_norm", "experts_post_norm") if experts.is_beside else ()
    scales = {"expert_scales.weight": (experts.n_experts,)} if experts.has_scales else {}
    return {**{name + ".weight": (m,) for name in names}, **scales}
