"""A model's program in numbers: each op with its shapes, bytes, flops and share of the step's roofline. Loads nothing, opens no device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..blueprint.blueprint import Blueprint
from ..blueprint.unit import unit_norms
from ..files.view import TensorView
from ..memory.arena import arena
from ..memory.state import StateSizes, page_layout, state_layout
from ..model.decoder import trace
from ..model.site import Site
from ..model.weights import source_of, stacks
from ..pack import abi
from ..pack.program import Rotation
from ..pack.tensor import ELEMENT_BYTES, S, T, Tensor
from .assemble import element_format, format_ids, kept_places

FLOPS_PER_BYTE = {"cpu": 20.0, "cuda": 184.0}
"""How many flops a device does while it reads a byte. cuda: an H200 in bf16 (790 TFLOP/s, 4.3 TB/s); cpu: two cores with AVX-512."""
_STEP = 1 << 12


@dataclass(frozen=True, slots=True)
class Case:
    """The step that is explained: tokens in it, sequences sampled, context of each. device: "cpu" or "cuda".

    packed_bytes: bytes of a weight on the device, from its format's name, rows and columns.
    """

    tokens: int
    sequences: int
    ctx_tokens: int
    device: str
    packed_bytes: Callable[[str, int, int], int]


@dataclass(frozen=True, slots=True)
class Row:
    """One op. share: of the time that the step takes on a device that reaches both its limits."""

    number: int
    op: str
    weights: str
    shape: str
    n_bytes: int
    flops: int
    share: float

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def explain(
    blueprint: Blueprint, views: Mapping[str, TensorView], sizes: StateSizes, kv_format: str, case: Case
) -> list[Row]:
    """The rows of one step. Raises: UnsupportedError as the decoder and the formats do."""
    names: dict[int, str] = {}
    site = _site(blueprint, views, sizes, kv_format, names)
    costs = []
    for record in trace(blueprint, site).records:
        op = type(record).__name__.removeprefix("pk_op_")
        operands = list(_operands(record))
        weights = [names[t.data] for _, t in operands if t.data in names]
        n_bytes = sum(_operand_bytes(name, t, views.get(names.get(t.data, "")), case) for name, t in operands)
        if op == "experts":
            n_bytes = _expert_bytes(
                record, n_bytes, [t for _, t in operands if t.layout == abi.PK_PACKED], views, names, case
            )
        if op == "delta":
            n_bytes += 8 * case.sequences * record.n_v_heads * record.k_width * record.v_width
        flops = _flops(op, record, operands, case)
        if op == "attention":
            n_bytes += _kv_bytes(record, case)
        costs.append((op, ", ".join(weights), _shape(op, record, case), n_bytes, flops))
    balance = FLOPS_PER_BYTE[case.device]
    times = [max(n_bytes, flops / balance) for *_, n_bytes, flops in costs]
    whole = sum(times) or 1.0
    return [Row(i, *cost, time / whole) for i, (cost, time) in enumerate(zip(costs, times, strict=True))]


def _site(
    blueprint: Blueprint, views: Mapping[str, TensorView], sizes: StateSizes, kv_format: str, names: dict[int, str]
) -> Site:
    """Everything at made-up addresses, one to each weight (noted in `names`)."""
    weights = {}
    for i, (name, view) in enumerate(views.items()):
        address = (i + 1) * _STEP
        names[address] = name
        if len(view.shape) == 2 and name.endswith(".weight"):
            kind = source_of(view).format
            weights[name] = Tensor(address, view.shape[0], view.shape[1], kind, layout=abi.PK_PACKED)
        else:
            weights[name] = Tensor(address, 1, view.n_elements, abi.PK_F32)
    weights |= stacks(weights, {name: _STEP for name in weights})
    weights |= {name: Tensor(64, 1, n, abi.PK_F32) for name, n in unit_norms(blueprint).items()}
    plan, base = arena(blueprint, sizes.max_step_tokens, sizes.max_step_rows, 2, kv_format), (len(views) + 2) * _STEP
    buffers = {name: Tensor(base + b.offset, S if b.is_sampled else T, b.cols, element_format(b, abi.PK_BF16)) for name, b in plan.buffers.items()}
    ropes = {x.attention.rope for x in blueprint.layers if x.attention.rope is not None}
    turns = {r: Rotation(Tensor(64, 1, r.width // 2, abi.PK_F32), r.width, r.layout, r.magnitude) for r in ropes}
    layout = page_layout(blueprint, kv_format, sizes.page_tokens)
    states = state_layout(blueprint)
    return Site(weights, buffers, layout.offsets, format_ids(blueprint, kv_format), turns, states.offsets, layout.index_offsets, states.ngram_offsets, kept_places(blueprint))


def _operands(record: ctypes.Structure) -> Iterator[tuple[str, Any]]:
    """The tensors of a record that are there, with their names."""
    for field in record._fields_:
        value = getattr(record, field[0])
        if isinstance(value, abi.pk_tensor):
            if value.data:
                yield field[0], value
        elif isinstance(value, ctypes.Array):
            for i, item in enumerate(value):
                if isinstance(item, abi.pk_tensor) and item.data:
                    yield f"{field[0]}[{i}]", item


def _rows(tensor: Any, case: Case) -> int:
    return int({T: case.tokens, S: case.sequences}.get(tensor.rows, tensor.rows))


def _operand_bytes(name: str, tensor: Any, view: TensorView | None, case: Case) -> int:
    if tensor.layout == abi.PK_PACKED and view is not None:
        whole = case.packed_bytes(view.format, tensor.rows, tensor.cols)
        return int(whole * min(case.tokens, tensor.rows) // tensor.rows) if name == "table" else whole
    return int(_rows(tensor, case) * tensor.cols * ELEMENT_BYTES[tensor.format])


def _expert_bytes(
    record: Any, n_bytes: int, stacks_: list[Any], views: Mapping[str, TensorView], names: Mapping[int, str], case: Case
) -> int:
    """The operands' bytes with one expert's matrices counted as often as experts are chosen, at most all of them."""
    n_touched = min(record.n_experts, case.tokens * record.ids.cols)
    one = sum(int(case.packed_bytes(views[names[t.data]].format, t.rows, t.cols)) for t in stacks_)
    return int(n_bytes + (n_touched - 1) * one)


def _kv_bytes(record: Any, case: Case) -> int:
    seen = min(case.ctx_tokens, record.window) if record.window else case.ctx_tokens
    return int(case.sequences * seen * record.n_kv_heads * (record.head_width + record.v_width) * ELEMENT_BYTES[record.kv_format])


def _flops(op: str, record: Any, operands: list[tuple[str, Any]], case: Case) -> int:
    if op == "matmul":
        rows = _rows(record.x, case)
        return int(sum(2 * rows * t.rows * t.cols for name, t in operands if name.startswith("w[")))
    if op == "experts":
        return int(6 * case.tokens * record.ids.cols * record.gate.rows * record.gate.cols)
    if op == "delta":
        return int(8 * case.tokens * record.n_v_heads * record.k_width * record.v_width)
    if op == "attention":
        seen = min(case.ctx_tokens, record.window) if record.window else case.ctx_tokens
        return int(2 * case.tokens * seen * record.n_heads * (record.head_width + record.v_width))
    return int(max((_rows(t, case) * t.cols for _, t in operands if t.layout != abi.PK_PACKED), default=0))


def _shape(op: str, record: Any, case: Case) -> str:
    if op == "matmul":
        outs = "+".join(str(w.rows) for w in record.w if w.data)
        return f"[{_rows(record.x, case)}, {record.x.cols}] x [{outs}, {record.x.cols}]"
    if op == "attention":
        window = f", window {record.window}" if record.window else ""
        return (
            f"{record.n_heads} heads of {record.head_width}, {record.n_kv_heads} kv, {case.ctx_tokens} tokens{window}"
        )
    first = next((t for _, t in _operands(record) if t.layout != abi.PK_PACKED), None)
    return f"[{_rows(first, case)}, {first.cols}]" if first is not None else ""
