"""Expert weights: every checkpoint's way of storing them becomes one matrix per expert, "layers.I.experts.gate.E.weight"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ..files.view import Pick, TensorView
from .blueprint import Experts, Layer
from .quantised import rows_of

ONE = re.compile(r"(?:mlp|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
ONE_NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
STACKS = {
    "gate_up_proj": ("experts.gate_up", "weight"), "up_proj": ("experts.up", "weight"), "down_proj": ("experts.down", "weight"),
    "gate_up_proj_blocks": ("experts.gate_up", "weight_packed"), "down_proj_blocks": ("experts.down", "weight_packed"),
    "gate_up_proj_scales": ("experts.gate_up", "weight_scale"), "down_proj_scales": ("experts.down", "weight_scale"),
    "gate_up_proj_bias": ("experts.gate_up", "bias"), "down_proj_bias": ("experts.down", "bias"),
}  # fmt: skip
HF_LAYER = {
    "mlp.gate": "router", "mlp.router": "router", "block_sparse_moe.gate": "router", "block_sparse_moe.router.layer": "router",
    "block_sparse_moe.input_linear": "experts.gate_up", "block_sparse_moe.output_linear": "experts.down",
    "mlp.shared_expert_gate": "shared_gate",
    **{f"mlp.{shared}.{name}_proj": name for shared in ("shared_expert", "shared_experts") for name in ("gate", "up", "down")},
}  # fmt: skip
GGUF_LAYER = {
    "ffn_gate_inp": "router", "exp_probs_b": "router_choice", "ffn_gate_exps": "experts.gate", "ffn_up_exps": "experts.up",
    "ffn_down_exps": "experts.down", "ffn_gate_up_exps": "experts.gate_up", "ffn_gate_inp_shexp": "shared_gate",
    "ffn_gate_shexp": "gate", "ffn_up_shexp": "up", "ffn_down_shexp": "down",
}  # fmt: skip


def hf_expert_name(stem: str, kind: str) -> str | None:
    """Our name within a layer for a Hugging Face tensor of a layer with experts; None when it is not one of theirs."""
    if match := ONE.fullmatch(stem):
        return f"experts.{ONE_NAMES[match[2]]}.{int(match[1])}.{kind}"
    if stem in ("mlp.experts", "block_sparse_moe.experts", "feed_forward.experts") and kind in STACKS:
        return ".".join(STACKS[kind])
    if kind in ("e_score_correction_bias", "expert_bias"):
        return "router_choice.bias"
    return f"{HF_LAYER[stem]}.{kind}" if stem in HF_LAYER else None


def expert_shapes(layer: Layer, experts: Experts, model_width: int) -> dict[str, tuple[int, ...]]:
    """Our name within the layer -> shape, for the router and all experts."""
    n, f, m = experts.n_experts, experts.width, model_width
    want: dict[str, tuple[int, ...]] = {"router.weight": (n, m)}
    if experts.router_bias:
        want["router.bias"] = (n,)
    if experts.choice_bias:
        want["router_choice.bias"] = (n,)
    for name, shape in (("gate", (f, m)), ("up", (f, m)), ("down", (m, f)))[0 if experts.is_gated else 1 :]:
        want.update({f"experts.{name}.{e}.weight": shape for e in range(n)})
        if experts.bias:
            want[f"experts.{name}.bias"] = (n, shape[0])
    if experts.shared_gate:
        want["shared_gate.weight"] = (1, m)
    return want


def split_experts(ours: Mapping[str, TensorView], i: int, experts: Experts, model_width: int) -> dict[str, TensorView]:
    """The tensors, with the stacks of layer i taken apart. Tensors of other shapes are left as they are, to be refused by name."""
    out, at = dict(ours), f"layers.{i}."
    n, f, m = experts.n_experts, experts.width, model_width
    if at + "shared_gate.weight" in out and out[at + "shared_gate.weight"].shape == (m,):
        out[at + "shared_gate.weight"] = replace(out[at + "shared_gate.weight"], shape=(1, m))
    _split_gate_up(out, at, experts, m)
    for name, rows, cols in (("gate", f, m), ("up", f, m), ("down", m, f)):
        view = out.get(f"{at}experts.{name}.weight")
        if view is None:
            continue
        flat = None if _holds_columns(view, experts) else _flat(view, n, rows, cols)
        if flat is not None:
            del out[f"{at}experts.{name}.weight"]
            out.update({f"{at}experts.{name}.{e}.weight": _cut(flat, e * rows, rows, 1) for e in range(n)})
        elif view.shape == (n, cols, rows) and _holds_columns(view, experts):
            del out[f"{at}experts.{name}.weight"]
            out.update({f"{at}experts.{name}.{e}.weight": _columns(view, e, rows, cols, Pick(is_transposed=True)) for e in range(n)})
    return out


def _split_gate_up(out: dict[str, TensorView], at: str, experts: Experts, m: int) -> None:
    """Gate and up that share a matrix per expert: rows of the one, then of the other, or alternating."""
    n, f = experts.n_experts, experts.width
    picks = {"gate": 0, "up": 1 if experts.is_interleaved else f}
    step = 2 if experts.is_interleaved else 1
    view = out.get(at + "experts.gate_up.weight")
    if view is not None:
        flat = None if _holds_columns(view, experts) else _flat(view, n, 2 * f, m)
        if flat is None and not (view.shape == (n, m, 2 * f) and _holds_columns(view, experts)):
            return
        del out[at + "experts.gate_up.weight"]
        for name, first in picks.items():
            for e in range(n):
                key = f"{at}experts.{name}.{e}.weight"
                if flat is not None:
                    out[key] = _cut(flat, e * 2 * f + (0 if step == 2 else first), f, step, first if step == 2 else 0)
                else:
                    out[key] = _columns(view, e, f, m, Pick(first, 1, step, is_transposed=True))
    bias = out.get(at + "experts.gate_up.bias")
    if bias is not None and bias.shape == (n, 2 * f) and step == 2:
        del out[at + "experts.gate_up.bias"]
        for name, first in picks.items():
            out[f"{at}experts.{name}.bias"] = replace(bias, shape=(n, f), pick=Pick(first, 1, 2, of_elements=True))


def _holds_columns(view: TensorView, experts: Experts) -> bool:
    """gpt-oss stores plain expert weights transposed (and its 4-bit blocks, named otherwise, not)."""
    return experts.is_interleaved and view.name.endswith("_proj")


def _flat(view: TensorView, n: int, rows: int, cols: int) -> TensorView | None:
    """A stack [n, rows, cols] as one matrix [n * rows, cols]; None when it has another shape."""
    return replace(view, shape=(n * rows, cols)) if view.shape in ((n, rows, cols), (n * rows, cols)) else None


def _cut(flat: TensorView, first: int, n: int, step: int, pick: int = 0) -> TensorView:
    """n rows of a stack, every step-th of n * step."""
    part = rows_of(flat, first, n * step)
    if step == 1:
        return part
    scales = part.scales
    if scales is not None:
        scales = replace(scales, view=replace(scales.view, shape=(n, scales.view.shape[1]), pick=Pick(pick, 1, step)))
    return replace(part, shape=(n, flat.shape[1]), pick=Pick(pick, 1, step), scales=scales)


def _columns(view: TensorView, e: int, rows: int, cols: int, pick: Pick) -> TensorView:
    """Expert e of a stack that holds transposed matrices."""
    size = view.n_bytes // view.shape[0]
    return replace(view, name=f"{view.name}[{e}]", shape=(rows, cols), offset=view.offset + e * size, n_bytes=size, pick=pick)
