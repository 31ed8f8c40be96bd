"""Weights that are several tensors in a safetensors checkpoint: codes and scales become one view.

What a tensor is follows from its type and from the scales beside it, so formats may be mixed freely within a checkpoint.
Activation and KV scales are not needed (activations stay in the pack's own format) and are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import FileError, UnsupportedError
from ..files.checkpoint import Checkpoint
from ..files.fields import Fields
from ..files.view import Int4, Scales, TensorView

SUPPORTED = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "mxfp4", "gptq", "awq")
"""Values of quantization_config.quant_method."""
AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
"""Values that say who quantised, not how it is stored."""

CODES = ("weight", "weight_packed", "qweight")
FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale")
UNUSED = ("input_scale", "input_scale_ub", "activation_scale", "input_global_scale", "k_scale", "v_scale", "output_scale", "weight_shape")
"""Tensors for quantised activations and KV caches."""

DEFAULT_BLOCK = (128, 128)
FLOATS = ("f32", "bf16", "f16")


def _settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """quantization_config, empty where there is none. What AutoRound packs as GPTQ or AWQ do is theirs."""
    config = checkpoint.config.get("quantization_config")
    if not isinstance(config, dict):
        return {"quant_method": "unknown"} if config else {}
    method, packing = str(config.get("quant_method", "unknown")), str(config.get("packing_format", ""))
    if method in AUTO_ROUND:
        method = next((m for m in ("gptq", "awq") if m in packing), f"{method} in {packing or 'a packing of its own'}")
    return {**config, "quant_method": method}


def require_known_method(checkpoint: Checkpoint) -> None:
    """Raises: UnsupportedError for a folder whose quantization nobody applies, by name."""
    config = _settings(checkpoint)
    if not config:
        return
    method = config["quant_method"]
    if method not in SUPPORTED:
        raise _refusal(checkpoint, method)
    for weights in _weight_settings(config):
        if weights.get("type") == "int" and weights.get("num_bits") != 4:
            raise _refusal(checkpoint, f"{method} int{weights.get('num_bits', '')}")
    if method in ("gptq", "awq") and config.get("bits") != 4:
        raise _refusal(checkpoint, f"{method} int{config.get('bits', '')}")
    if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
        raise _refusal(checkpoint, f"awq in the layout {config.get('version')}")


def _refusal(checkpoint: Checkpoint, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{checkpoint.path}: quantization {what:.40} of safetensors is not supported; supported: bf16, f16 and f32, and {', '.join(SUPPORTED)} in fp8, nvfp4, mxfp4 and int4",
        what=f"safetensors {what}",
        supported=list(SUPPORTED),
    )


def _weight_settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The `weights` objects of compressed-tensors' groups."""
    groups = config.get("config_groups")
    found = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    return [w for w in found if isinstance(w, dict)]


def block_shape(checkpoint: Checkpoint) -> tuple[int, int]:
    """Rows and columns of a block of fp8 scales. Raises: FileError."""
    config = _settings(checkpoint)
    for source, key in ((config, "weight_block_size"), *((w, "block_structure") for w in _weight_settings(config))):
        if source.get(key):
            rows, cols = Fields(source, str(checkpoint.path / "config.json"), "field").integers(key, 2, high=1 << 20)
            if rows < 1 or cols < 1:
                raise FileError(f"{checkpoint.path}: {key} is {rows} x {cols}, expected positive numbers", field=key)
            return rows, cols
    return DEFAULT_BLOCK


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one linear layer by their last word ("weight", "weight_scale", ...)."""

    stem: str
    by_kind: dict[str, TensorView]
    block: tuple[int, int]
    config: Mapping[str, Any]

    def take(self, *kinds: str) -> TensorView | None:
        """Removes and returns the first of these that is there."""
        for kind in kinds:
            if kind in self.by_kind:
                return self.by_kind.pop(kind)
        return None


def join_scales(ours: Mapping[str, TensorView], checkpoint: Checkpoint) -> dict[str, TensorView]:
    """The same tensors, every weight with its scales; scales that belong to no weight keep their names.

    Raises: FileError naming the tensor whose scales are missing or have the wrong shape; UnsupportedError (integer codes).
    """
    block = block_shape(checkpoint)
    settings = _settings(checkpoint)
    groups: dict[str, Parts] = {}
    for name, view in ours.items():
        stem, _, kind = name.rpartition(".")
        groups.setdefault(stem, Parts(stem, {}, block, settings)).by_kind[kind] = view
    out: dict[str, TensorView] = {}
    for stem, parts in groups.items():
        for kind in UNUSED:
            parts.by_kind.pop(kind, None)
        weight = next((parts.by_kind[kind] for kind in CODES if kind in parts.by_kind), None)
        if weight is not None and (joined := _joined(weight, parts)) is not None:
            parts.take(*CODES)
            parts.by_kind["weight"] = joined
        out.update({f"{stem}.{kind}": view for kind, view in parts.by_kind.items()})
    return out


def _joined(weight: TensorView, parts: Parts) -> TensorView | None:
    """The weight with its scales; None when it needs none."""
    if weight.format == "i32" and len(weight.shape) == 2:
        return _int4(weight, parts)
    if weight.format in ("fp8_e4m3", "fp8_e5m2"):
        scale = parts.take(*FP8_SCALES)
        if scale is None:
            raise _fault(weight, f"is {weight.format} and has no scales beside it", f"expected {weight.name}_scale_inv or {weight.name}_scale")
        return replace(weight, scales=_fp8_scales(weight, scale, parts.block))
    if weight.format not in ("u8", "i8") or len(weight.shape) < 2:
        return None
    scale = parts.take("weight_scale")
    if scale is None:
        raise _fault(weight, "holds 4-bit codes and has no scales beside it", f"expected a tensor {weight.name.removesuffix('_packed')}_scale")
    is_nvfp4 = scale.format == "fp8_e4m3"
    width = 16 if is_nvfp4 else 32
    weight, scale = _flattened(weight), replace(scale, shape=_two(scale.shape))
    rows, cols = weight.shape[0], weight.shape[-1] * 2
    if scale.format not in ("fp8_e4m3", "u8", "e8m0") or scale.shape != (rows, -(-cols // width)):
        raise _fault(scale, f"is {scale.format} {list(scale.shape)}", f"expected one byte per {width} of {rows} x {cols} elements")
    divisor, factor = parts.take("weight_global_scale"), parts.take("weight_scale_2")
    whole = divisor or factor
    if is_nvfp4 and whole is None:
        raise _fault(weight, "is nvfp4 and has no scale for the whole tensor beside it", "expected weight_global_scale or weight_scale_2")
    if whole is not None and (whole.n_elements != 1 or whole.format not in FLOATS):
        raise _fault(whole, f"is {whole.format} {list(whole.shape)}", "expected one number")
    scales = Scales("group", scale, (1, width), whole, divisor is not None)
    return replace(weight, shape=(rows, cols), format="nvfp4" if is_nvfp4 else "mxfp4", scales=scales)


def _int4(weight: TensorView, parts: Parts) -> TensorView:
    """4-bit codes in words of 32 bits: along the rows (compressed-tensors), down the columns (GPTQ), or eight rows a word (AWQ)."""
    is_ours = weight.name.endswith("qweight")
    words = "rows" if not is_ours else "awq" if parts.config.get("quant_method") == "awq" else "columns"
    scale = parts.take("scales" if is_ours else "weight_scale")
    if scale is None:
        raise _fault(weight, "holds 4-bit codes and has no scales beside it", f"expected a tensor {weight.name.rpartition('.')[0]}.scales or .weight_scale")
    zeros, order = parts.take("qzeros", "weight_zero_point"), parts.take("g_idx", "weight_g_idx")
    rows, cols = {"rows": (weight.shape[0], 8 * weight.shape[1]), "columns": (weight.shape[1], 8 * weight.shape[0]), "awq": (8 * weight.shape[1], weight.shape[0])}[words]
    shape = scale.shape[::-1] if is_ours else scale.shape
    if scale.format not in FLOATS or len(shape) != 2 or shape[0] != rows or not shape[1] or cols % shape[1] or cols // shape[1] % 32:
        raise _fault(scale, f"is {scale.format} {list(scale.shape)}", f"expected one number per 32, 64, 128 ... of {rows} x {cols} elements")
    n_groups = shape[1]
    if zeros is not None:
        wanted = (n_groups, -(-rows // 8)) if is_ours else (-(-rows // 8), n_groups)
        if zeros.format != "i32" or zeros.shape != wanted:
            raise _fault(zeros, f"is {zeros.format} {list(zeros.shape)}", f"expected i32 {list(wanted)}: four bits per group of {cols // n_groups} of {rows} x {cols} elements")
    elif words == "awq" or parts.config.get("sym") is False:
        raise _fault(weight, "holds 4-bit codes and has no zero points beside it", f"expected a tensor {weight.name.rpartition('.')[0]}.qzeros")
    if order is not None and (order.format != "i32" or order.n_elements != cols):
        raise _fault(order, f"is {order.format} {list(order.shape)}", f"expected the group of each of {cols} columns")
    is_shuffled = order is not None and bool(parts.config.get("desc_act", words == "rows"))
    is_symmetric = zeros is None or (words == "columns" and bool(parts.config.get("sym", True)))
    offset = 1 if words == "columns" and parts.config.get("checkpoint_format", "gptq") != "gptq_v2" else 0
    int4 = Int4(scale, cols // n_groups, words, zeros, offset, order)
    return replace(weight, shape=(rows, cols), format="f16" if is_shuffled else "q4_0" if is_symmetric else "q4_z", int4=int4)


def _flattened(weight: TensorView) -> TensorView:
    """Codes as [rows, bytes of a row]: stacks of experts may have the blocks of a row, and the experts, as dimensions of their own."""
    shape = weight.shape
    return replace(weight, shape=_two((*shape[:-2], shape[-2] * shape[-1]) if len(shape) == 4 else shape))


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return rows, shape[-1]


def _fp8_scales(weight: TensorView, scale: TensorView, block: tuple[int, int]) -> Scales:
    """Which kind of scales these are, by their shape."""
    if scale.format not in (*FLOATS, "e8m0") or len(weight.shape) != 2:
        raise _fault(scale, f"is {scale.format} beside a weight of shape {list(weight.shape)}", f"expected {', '.join(FLOATS)} beside a matrix")
    rows, cols = weight.shape
    blocks = (-(-rows // block[0]), -(-cols // block[1]))
    if scale.n_elements == 1 and blocks != scale.shape:
        return Scales("tensor", scale)
    if scale.shape == blocks:
        return Scales("block", scale, block)
    if scale.shape in ((rows,), (rows, 1)):
        return Scales("row", scale)
    raise _fault(scale, f"has the shape {list(scale.shape)}", f"expected [1], [{rows}, 1] or {list(blocks)} for a weight of {rows} x {cols}")


def _fault(view: TensorView, trouble: str, wanted: str) -> FileError:
    return FileError(f"{view.path}: tensor {view.name} {trouble}; {wanted}", path=str(view.path), field=view.name)


def rows_of(view: TensorView, first: int, n: int) -> TensorView:
    """A view of n rows from `first` on: rows lie one after the other in every format. Raises: UnsupportedError (within a block)."""
    if view.int4 is not None:
        raise UnsupportedError(f"{view.path}: tensor {view.name} holds several projections in int4, which is not supported", what="split int4")
    row = view.n_bytes // view.shape[0]
    scales = view.scales
    if scales is not None and scales.kind in ("row", "group"):
        scales = replace(scales, view=rows_of(scales.view, first, n))
    elif scales is not None and scales.kind == "block":
        size = scales.block[0]
        if first % size:
            raise UnsupportedError(f"{view.path}: tensor {view.name} would be split at row {first}, within a block of {size} rows", what="split block")
        scales = replace(scales, view=rows_of(scales.view, first // size, -(-n // size)))
    name = f"{view.name}[{first}:{first + n}]"
    return replace(view, name=name, shape=(n, *view.shape[1:]), offset=view.offset + first * row, n_bytes=n * row, scales=scales)
