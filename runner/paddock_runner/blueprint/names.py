"""Tensor names of GGUF and Hugging Face checkpoints -> ours, with every shape checked against the blueprint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import FileError, UnsupportedError
from ..files.checkpoint import Checkpoint
from ..files.view import TensorView
from . import gemma4
from .blueprint import Blueprint, Layer
from .conv import GGUF_LAYER as GGUF_CONV
from .conv import HF_LAYER as HF_CONV
from .conv import conv_shapes, with_taps
from .delta import HF_LAYER as HF_DELTA
from .delta import delta_shapes, gguf_delta_name, split_delta, split_gated_q
from .encoder import gguf_name as gguf_encoder_name
from .encoder import hf_name as hf_encoder_name
from .experts import GGUF_LAYER as GGUF_EXPERTS
from .experts import expert_shapes, hf_expert_name, split_experts
from .guessing import draft_name, draft_part, draft_shapes
from .latent import GGUF_LAYER as GGUF_LATENT
from .latent import HF_LAYER as HF_LATENT
from .latent import latent_shapes, split_latent
from .mamba import gguf_mamba_view, mamba_name, mamba_shapes, nemotron_name, split_mamba
from .pooling import pooling_shapes, pooling_views
from .quantised import join_scales, rows_of
from .streams import HF as HF_STREAMS
from .streams import HF_LAYER as HF_STREAMS_LAYER
from .streams import is_derived, ngram_piece, stream_shapes, with_shared_scales
from .unit import unit_norms

GGUF = {
    "token_embd": "embed", "output_norm": "out_norm", "token_embd_norm": "out_norm", "output": "head", "dense_2": "dense.0", "dense_3": "dense.1",
    **gemma4.GGUF,
}  # fmt: skip
GGUF_LAYER = {
    "attn_norm": "attn_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_qkv": "qkv", "attn_output": "o",
    "attn_q_norm": "q_norm", "attn_k_norm": "k_norm", "attn_gate": "q_gate", "post_attention_norm": "attn_post_norm", "attn_sinks": "sinks",
    "ffn_norm": "ffn_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down", "post_ffw_norm": "ffn_post_norm",
}  # fmt: skip
GGUF_NAMES = {**GGUF_LAYER, **GGUF_EXPERTS, **GGUF_CONV, **GGUF_LATENT}
GGUF_UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

HF = {"embed_tokens": "embed", "norm": "out_norm", "embedding_norm": "out_norm", **gemma4.HF, **HF_STREAMS}
HF_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
    "self_attn.qkv_proj": "qkv", "self_attn.o_proj": "o", "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm", "self_attn.g_proj": "q_gate", "self_attn.gate_proj": "q_gate",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.gate_up_proj": "gate_up",
    "mlp.down_proj": "down", "shared_mlp.input_linear": "gate_up", "shared_mlp.output_linear": "down",
}  # fmt: skip
HF_POST_NORMS = {
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}
HF_KOLIBRI = {
    "post_attn_norm": "attn_post_norm", "post_self_attn_layernorm": "attn_post_norm", "post_ffn_norm": "ffn_post_norm", "post_mlp_layernorm": "ffn_post_norm",
}  # fmt: skip
HF_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "text_model.model.", "model.", "")
HF_HEADS = ("lm_head.", "language_model.lm_head.", "model.lm_head.")
HF_OTHER_PARTS = (
    "vision_tower.",
    "multi_modal_projector.",
    "audio_tower.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
    "model.vision_embedder.",
    "model.vision_adapter.",
    "model.vision_projection.",
    "vision_model.",
    "visual.",
    "model.visual.",
    "mtp.",
    "model.mtp.",
)


def tensors_by_name(checkpoint: Checkpoint, blueprint: Blueprint) -> dict[str, TensorView]:
    """Every tensor the model needs, by our names.

    Raises: FileError naming what is missing or has another shape; UnsupportedError naming what has no place in the model.
    """
    if checkpoint.kind == "gguf":
        ours = _gguf_names(checkpoint.tensors, blueprint)
    else:
        ours = join_scales(with_shared_scales(_hf_names(checkpoint.tensors, blueprint)), checkpoint)
    if blueprint.tied_head:
        ours = {name: view for name, view in ours.items() if not name.startswith("head.")}
    ours = _split_gate_up(ours, blueprint)
    for i, layer in enumerate(blueprint.all_layers):
        if layer.delta is not None:
            ours = split_delta(ours, i, layer.delta)
        if layer.attention.out_gate:
            ours = split_gated_q(ours, i, layer.attention)
        if layer.conv is not None:
            ours = with_taps(ours, f"layers.{i}.conv.weight", layer.conv.width, layer.conv.conv_width)
        if layer.mamba is not None:
            ours = with_taps(ours, f"layers.{i}.mamba_conv.weight", layer.mamba.n_channels, layer.mamba.conv_width)
            ours = split_mamba(ours, i, layer.mamba)
        if layer.attention.latent is not None:
            ours = split_latent(ours, i, layer.attention, layer.attention.latent)
        if layer.experts is not None:
            ours = split_experts(ours, i, layer.experts, blueprint.model_width)
    ours = pooling_views(blueprint, checkpoint, ours)
    fused = {name for name in ours if name.endswith((".qkv.weight", ".delta_qkv.weight"))}
    want = expected_shapes(blueprint, frozenset(int(name.split(".")[1]) for name in fused))
    _blame_missing(checkpoint, want, ours)
    extra = [view.name for name, view in ours.items() if name not in want]
    if extra:
        raise UnsupportedError(
            f"{checkpoint.path}: {len(extra)} tensors have no place in a {blueprint.family} model, among them {extra[0][:80]}",
            what=extra[0],
            extra=extra[:20],
        )
    for name, shape in want.items():
        if ours[name].shape != shape:
            view = ours[name]
            raise FileError(
                f"{view.path}: tensor {view.name} has the shape {list(view.shape)}, expected {list(shape)}",
                path=str(view.path),
                field=view.name,
                need=list(shape),
                have=list(view.shape),
            )
    return {name: ours[name] for name in want}


def expected_shapes(blueprint: Blueprint, fused_layers: frozenset[int] = frozenset()) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of every tensor of the model. fused_layers: layers whose q, k and v are one tensor."""
    m = blueprint.model_width
    want: dict[str, tuple[int, ...]] = {"embed.weight": (blueprint.n_vocab, m), **pooling_shapes(blueprint)}
    if blueprint.has_out_norm and blueprint.n_streams == 1:
        want["out_norm.weight"] = (m,)
    want.update(stream_shapes(blueprint))
    want.update(draft_shapes(blueprint))
    if not blueprint.tied_head and blueprint.pooling is None:
        want["head.weight"] = (blueprint.n_vocab, m)
    if blueprint.embed_norm:
        want["embed_norm.weight"] = (m,)
    for name, n in (("positions", blueprint.n_positions), ("token_types", blueprint.n_token_types)):
        if n:
            want[name + ".table"] = (n, m)
    for i, layer in enumerate(blueprint.all_layers):
        ff, at = layer.feed_forward.width, f"layers.{i}."
        if layer.delta is not None:
            want.update({at + name: shape for name, shape in delta_shapes(layer.delta, m, i in fused_layers).items()})
        elif layer.conv is not None:
            want.update({at + name: shape for name, shape in conv_shapes(layer.conv, m).items()})
        elif layer.mamba is not None:
            want.update({at + name: shape for name, shape in mamba_shapes(layer.mamba, m).items()})
        elif layer.kind != "none":
            _attention_shapes(want, layer, at, m, i in fused_layers)
        if ff:
            want.update({f"{at}{name}.weight": (ff, m) for name in ("gate", "up")[0 if layer.feed_forward.is_gated else 1 :]})
            want[at + "down.weight"] = (m, ff)
        if layer.experts is not None:
            want.update({at + name: shape for name, shape in expert_shapes(layer, layer.experts, m).items()})
            want.update({at + name: shape for name, shape in gemma4.beside_shapes(layer.experts, m).items()})
        parts = [name for name, is_there in (("attn", layer.kind != "none"), ("ffn", layer.has_feed_forward)) if is_there]
        norms = [f"{name}_norm" for name in parts] if layer.pre_norms else []
        norms += [f"{name}_post_norm" for name in parts] if layer.post_norms or layer.residual_norms else []
        want.update({f"{at}{name}.weight": (m,) for name in norms})
        if layer.feed_forward.bias:
            want.update({at + "gate.bias": (ff,)} if layer.feed_forward.is_gated else {})
            want.update({at + "up.bias": (ff,), at + "down.bias": (m,)})
    want.update(gemma4.input_shapes(blueprint))
    if blueprint.norm_bias:
        want.update({name.removesuffix("weight") + "bias": shape for name, shape in want.items() if name.endswith("norm.weight")})
    units = unit_norms(blueprint)
    return {name: shape for name, shape in want.items() if name not in units}


def _attention_shapes(want: dict[str, tuple[int, ...]], layer: Layer, at: str, m: int, is_fused: bool) -> None:
    """Adds the tensors of attention."""
    a = layer.attention
    if a.latent is not None:
        want.update({at + name: shape for name, shape in latent_shapes(a, a.latent, m).items()})
        return
    v_width = a.v_width or a.head_width
    rows = {"q": a.n_heads * a.head_width, "k": a.n_kv_heads * a.head_width, "v": a.n_kv_heads * v_width}
    if is_fused:
        rows = {"qkv": sum(rows.values())}
    if a.values_are_keys:
        del rows["v"]
    if a.kv_from is not None:
        rows = {"q": rows["q"]}
    for name, n in rows.items():
        want[f"{at}{name}.weight"] = (n, m)
        if a.qkv_bias:
            want[f"{at}{name}.bias"] = (n,)
    if a.out_gate:
        want[at + "q_gate.weight"] = (a.gate_width, m)
    want[at + "o.weight"] = (m, a.n_heads * v_width)
    if a.qk_norm or a.qk_norm_all:
        heads = (a.n_heads, a.n_kv_heads) if a.qk_norm_all else (1, 1)
        names = ("q_norm",) if a.kv_from is not None else ("q_norm", "k_norm")
        want.update({f"{at}{name}.weight": (a.head_width * n,) for name, n in zip(names, heads, strict=False)})
    if a.out_bias:
        want[at + "o.bias"] = (m,)
    if a.sinks:
        want[at + "sinks.weight"] = (a.n_heads,)


def _split_gate_up(ours: Mapping[str, TensorView], blueprint: Blueprint) -> dict[str, TensorView]:
    """Gate and up as two views, where the checkpoint has one matrix with the rows of both (named gate_up, or up alone)."""
    out = dict(ours)
    for i, layer in enumerate(blueprint.all_layers):
        at, width = f"layers.{i}.", layer.feed_forward.width
        name = at + ("gate_up.weight" if at + "gate_up.weight" in out else "up.weight")
        view = out.get(name)
        if view is None or not layer.feed_forward.is_gated or view.shape[:1] != (2 * width,) or at + "gate.weight" in out:
            continue
        del out[name]
        out[at + "gate.weight"], out[at + "up.weight"] = rows_of(view, 0, width), rows_of(view, width, width)
    return out


def _blame_missing(checkpoint: Checkpoint, want: Mapping[str, tuple[int, ...]], ours: Mapping[str, TensorView]) -> None:
    missing = [name for name in want if name not in ours]
    if missing:
        names = ", ".join(missing[:4]) + (" and more" if len(missing) > 4 else "")
        raise FileError(
            f"{checkpoint.path}: {len(missing)} of {len(want)} tensors are missing: {names}",
            path=str(checkpoint.path),
            field=missing[0],
            missing=missing[:20],
            need=len(want),
            have=len(want) - len(missing),
        )


def _gguf_names(tensors: Mapping[str, TensorView], blueprint: Blueprint) -> dict[str, TensorView]:
    """By our names; a name without a translation stands for itself, and has no place later.

    Without norms after the branches, post_attention_norm is the one before the feed-forward (gpt-oss, GLM 4).
    """
    out: dict[str, TensorView] = {}
    if blueprint.layers[0].residual_norms:
        return {gguf_encoder_name(name) or name: view for name, view in tensors.items()}
    layer_names = GGUF_NAMES if blueprint.layers[0].post_norms else {**GGUF_NAMES, "post_attention_norm": "ffn_norm"}
    for name, view in tensors.items():
        if name in GGUF_UNUSED:
            continue
        root, _, rest = name.partition(".")
        number, _, within = rest.partition(".")
        stem, _, kind = name.rpartition(".")
        if root != "blk" or not number.isdecimal():
            out[f"{GGUF[stem]}.{kind}" if stem in GGUF else name] = view
        elif int(number) < blueprint.n_layers and gemma4.is_left_out(within, blueprint, int(number)):
            continue
        elif blueprint.draft is not None and int(number) == blueprint.n_layers and (part := draft_part(within)) is not None:
            out.update({part: view} if part else {})
        elif int(number) < len(blueprint.all_layers) or not blueprint.n_draft_layers:
            layer = blueprint.all_layers[int(number)] if int(number) < len(blueprint.all_layers) else None
            own = gemma4.gguf_name(within) if blueprint.family == "gemma4" else None
            ours, view = (own, view) if own else _gguf_layer_name(within, view, layer, layer_names)
            out[f"layers.{int(number)}.{ours}" if ours else name] = view
    return out


def _gguf_layer_name(within: str, view: TensorView, layer: Layer | None, layer_names: Mapping[str, str]) -> tuple[str | None, TensorView]:
    """Our name within a layer (None: no translation), and the tensor in our shape."""
    if layer is not None and layer.delta is not None and within == "ssm_a":
        return "delta_a_log.weight", replace(view, is_log_of_negative=True)
    if layer is not None and layer.mamba is not None and (found := gguf_mamba_view(within, view, layer.mamba)):
        return found
    part, _, kind = within.rpartition(".")
    if layer is not None and layer.kind == "none" and part == "attn_norm":
        return f"ffn_norm.{kind}", view
    delta_name = gguf_delta_name(part, kind) if layer is not None and layer.delta is not None else None
    return delta_name or (f"{layer_names[part]}.{kind}" if part in layer_names else None), view


def _hf_names(tensors: Mapping[str, TensorView], blueprint: Blueprint) -> dict[str, TensorView]:
    if blueprint.layers[0].residual_norms:
        has_classifier = blueprint.pooling is not None and blueprint.pooling.task == "rank"
        named = {name: hf_encoder_name(name, has_classifier) for name in tensors}
        return {named[name] or name: view for name, view in tensors.items() if named[name] != ""}
    prefix = next((p for p in HF_PREFIXES if p + "embed_tokens.weight" in tensors), "model.")
    layer_names = {**HF_LAYER, **HF_POST_NORMS} if blueprint.layers[0].post_norms else HF_LAYER
    if blueprint.family == "kolibri":
        layer_names = {**HF_LAYER, **HF_KOLIBRI}
    if blueprint.family == "lfm2":
        layer_names = {**HF_LAYER, **HF_CONV}
    if blueprint.family == "nemotron-h":
        tensors = {nemotron_name(name, blueprint): view for name, view in tensors.items()}
        prefix = "model."
    out: dict[str, TensorView] = {}
    for name, view in tensors.items():
        if (draft := draft_name(name, blueprint)) is not None:
            if draft.startswith("draft_"):
                out[draft] = view
                continue
            name = prefix + draft
        if name.startswith(HF_OTHER_PARTS) or name.endswith(".rotary_emb.inv_freq") or is_derived(name):
            continue
        head = next((h for h in HF_HEADS if name.startswith(h)), "")
        if head:
            out["head." + name[len(head) :]] = view
            continue
        if blueprint.pooling is not None and name.startswith("score."):
            out["dense.0." + name.removeprefix("score.")] = view
            continue
        stem, _, kind = name.removeprefix(prefix).rpartition(".")
        parts = stem.split(".", 2)
        known = name.startswith(prefix) and parts[0] == "layers" and len(parts) > 1 and parts[1].isdecimal()
        if known and blueprint.n_draft_layers and int(parts[1]) >= blueprint.n_layers:
            part = draft_part(".".join((*parts[2:], kind)))
            if blueprint.draft is None or int(parts[1]) > blueprint.n_layers or part == "":
                continue
            if part:
                out[part] = view
                continue
        if known and int(parts[1]) < blueprint.n_layers and gemma4.is_left_out(".".join((*parts[2:], kind)), blueprint, int(parts[1])):
            continue
        within = _hf_layer_name(parts[2], kind, layer_names) if known and len(parts) == 3 else None
        if within is not None:
            out[f"layers.{int(parts[1])}.{within}"] = view
        elif name.startswith(prefix) and stem in HF:
            out[f"{HF[stem]}.{kind}"] = view
        else:
            out[name] = view
    return out


def _hf_layer_name(stem: str, kind: str, layer_names: Mapping[str, str]) -> str | None:
    """Our name within a layer; None when the tensor has no translation."""
    if stem in layer_names:
        return f"{layer_names[stem]}.{kind}"
    root, _, within = stem.partition(".")
    if root == "mamba" and (found := mamba_name(within, kind)):
        return found
    if stem in HF_LATENT:
        return f"{HF_LATENT[stem]}.{kind}"
    if stem in HF_STREAMS_LAYER:
        return f"{HF_STREAMS_LAYER[stem]}.{kind}"
    if (piece := ngram_piece(stem)) is not None:
        return f"ngram.{piece}.{kind}"
    if stem == "self_attn" and kind == "sinks":
        return "sinks.weight"
    if (whole := f"{stem}.{kind}") in HF_DELTA:
        return HF_DELTA[whole]
    if stem in HF_DELTA:
        return f"{HF_DELTA[stem]}.{kind}"
    return hf_expert_name(stem, kind) or gemma4.hf_name(f"{stem}.{kind}")
