"""Program: one method per op; each checks shapes and appends a record. Run once per model and phase, never per step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import PackError
from . import abi
from .fetched import Ahead, ExpertCache
from .tensor import Tensor

SCORES = {"softmax": abi.PK_SCORE_SOFTMAX, "sigmoid": abi.PK_SCORE_SIGMOID, "chosen": abi.PK_SCORE_CHOSEN}
ACTS = {"none": abi.PK_ACT_NONE, "silu": abi.PK_ACT_SILU, "gelu_tanh": abi.PK_ACT_GELU_TANH, "gelu_erf": abi.PK_ACT_GELU_ERF, "swiglu_clamp": abi.PK_ACT_SWIGLU_CLAMP, "relu2": abi.PK_ACT_RELU2}
ROPE_LAYOUTS = {"neox": 0, "interleaved": 1}
NORMS = {"rms": abi.PK_NORM_RMS, "layer": abi.PK_NORM_LAYER}
POOLS = {"last": abi.PK_POOL_LAST, "first": abi.PK_POOL_FIRST, "mean": abi.PK_POOL_MEAN}


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts and widths of one attention layer, and where its keys and values lie in a page (bytes).

    parts: what is projected and stored: all three, "latent" (values are the last v_width dimensions of the keys), or queries alone.
    gains: what heads are multiplied by where they are stored, f32 [1,H+2K], and what attention multiplies its own heads by, [1,H].
    """

    n_heads: int
    n_kv_heads: int
    head_width: int
    v_width: int
    k_offset: int
    v_offset: int
    kv_format: int
    parts: int = abi.PK_PARTS_QKV
    gains: tuple[Tensor, Tensor] | None = None

    @property
    def width(self) -> int:
        """Columns of the projections together."""
        k = 0 if self.parts == abi.PK_PARTS_Q else self.n_kv_heads * self.head_width
        v = self.n_kv_heads * self.v_width if self.parts == abi.PK_PARTS_QKV else 0
        return self.n_heads * self.head_width + k + v


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages that layers with a window have of their own: addresses of the pool, its table [slots, pages of a context] and each token's page; see pk_op_pool."""

    kv: int
    kv_page_stride: int
    page_table: int
    token_page: int


@dataclass(frozen=True, slots=True)
class View:
    """Which keys a query sees. window: so many tokens, 0 for all. is_bidirectional: also later ones of its row."""

    window: int = 0
    is_bidirectional: bool = False


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rope of one layer on the device: frequency [1, width/2] f32."""

    frequency: Tensor
    width: int
    layout: str
    magnitude: float


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What a gated delta net has beside its projections, all f32: conv [1,C*W], a_log and dt_bias [1,H], scale [1,Dv]."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads and widths of a gated delta net, and where its state and its convolution's tail lie in a slot's (bytes).

    is_tiled: value head h belongs to key head h mod n_k_heads, not to h // (n_v_heads / n_k_heads).
    """

    n_k_heads: int
    n_v_heads: int
    k_width: int
    v_width: int
    conv_width: int
    state_offset: int
    conv_offset: int
    is_tiled: bool = False


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """What a Mamba 2 layer has beside its projections, all f32: conv [1,C*W], bias [1,C] or None, a_log, dt_bias and d [1,H], scale [1,H*P]."""

    conv: Tensor
    bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    d: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Heads, groups and widths of a Mamba 2 layer, where its state and its convolution's tail lie in a slot's (bytes), its limits."""

    n_heads: int
    head_width: int
    n_groups: int
    state_width: int
    conv_width: int
    n_norms: int
    state_offset: int
    conv_offset: int
    dt_low: float = 0.0
    dt_high: float = float("inf")


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a slot's state is kept, and where: see pk_op_keep. max_tokens: of a row that checks guesses."""

    n_bytes: int
    kept_offset: int
    rows_offset: int
    max_tokens: int


SETTLES: dict[type[ctypes.Structure], tuple[type[ctypes.Structure], int, str]] = {
    abi.pk_op_delta: (abi.pk_op_settle, abi.PK_OP_SETTLE, "delta"),
    abi.pk_op_mamba: (abi.pk_op_settle_mamba, abi.PK_OP_SETTLE_MAMBA, "mamba"),
    abi.pk_op_conv: (abi.pk_op_settle_conv, abi.PK_OP_SETTLE_CONV, "conv"),
}
"""Layers with states: what takes their guesses back, and its field for the layer."""


@dataclass(frozen=True, slots=True)
class NgramShape:
    """How tokens choose rows of a table: see pk_op_ngram."""

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    n_each: int
    end_token: int
    n_pieces: int


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen: see pk_op_route."""

    score: str
    is_normalised: bool = True
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    n_group_best: int = 2


@dataclass(frozen=True, slots=True)
class Stacks:
    """Expert matrices on the device: the first of each stack, with the bytes to the next as stride; biases [1, E*F], [1, E*M] or None.

    activation: "silu", "gelu_tanh", "swiglu_clamp" (with limit and alpha), or "relu2" (without gates). cache: the matrices lie in host memory,
    and chosen ones are fetched; ahead: and for the next layer, too.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    n_experts: int
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0
    cache: ExpertCache | None = None
    ahead: Ahead | None = None


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to a product before it is stored: activation (gated: two weights), scale, soft cap, an operand added last."""

    act: str = "none"
    add: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0


PLAIN = Epilogue()


class ShapeError(PackError):
    """Operands of an op do not fit together: a fault in a model program."""


def _same(op: str, a: str, x: int, b: str, y: int) -> None:
    if x != y:
        raise ShapeError(f"{op}: {a} is {x}, {b} is {y}")


class Program:
    """A growing array of records."""

    def __init__(self) -> None:
        self.records: list[ctypes.Structure] = []

    def _add(self, structure: Any, op: int, tensors: dict[str, Tensor | None], **fields: Any) -> None:
        record = structure()
        record.op, record.size = op, ctypes.sizeof(structure)
        for name, tensor in tensors.items():
            if tensor is not None:
                tensor.fill(getattr(record, name))
        for name, value in fields.items():
            setattr(record, name, value)
        self.records.append(record)

    def bytes(self) -> bytes:
        """All records, one after the other, as pk_load takes them."""
        return b"".join(bytes(r) for r in self.records)

    def prepare(self) -> None:
        """Applies the step input and builds rows and positions."""
        self._add(abi.pk_op_prepare, abi.PK_OP_PREPARE, {})

    def embed(
        self, table: Tensor, out: Tensor, scale: float = 1.0, added: tuple[Tensor | None, Tensor | None] = (None, None), position_offset: int = 0
    ) -> None:
        """out[T,M] = table[token, :] * scale, plus rows for its position and its type. added: the two tables, f32 [n, M]. See pk_op_embed."""
        _same("embed", "table width", table.cols, "out width", out.cols)
        tensors = {"table": table, "positions": added[0], "types": added[1], "out": out}
        self._add(abi.pk_op_embed, abi.PK_OP_EMBED, tensors, scale=scale, position_offset=position_offset)

    def norm(
        self,
        x: Tensor,
        w: Tensor | None,
        out: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
        post_w: Tensor | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        """v = x (normalised by post_w when there); residual += v * residual_scale; out = rms-norm(residual or v) * w.

        x, out, residual: [T or S, M]; w, post_w: [1, M] f32. Source: Zhang & Sennrich 2019, eq. 4.
        """
        for name, t in (("w", w), ("out", out), ("residual", residual), ("post_w", post_w)):
            if t is not None:
                _same("norm", "x width", x.cols, f"{name} width", t.cols)
        tensors = {"x": x, "w": w, "post_w": post_w, "residual": residual, "out": out}
        self._add(abi.pk_op_norm, abi.PK_OP_NORM, tensors, eps=eps, residual_scale=residual_scale)

    def layer_norm(self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, eps: float) -> None:
        """out = (x - mean) / sqrt(variance + eps) * w + bias, row by row; out may be x. Source: Ba et al. 2016, eq. 4."""
        _same("norm", "x width", x.cols, "out width", out.cols)
        tensors = {"x": x, "w": w, "bias": bias, "out": out}
        self._add(abi.pk_op_norm, abi.PK_OP_NORM, tensors, eps=eps, residual_scale=1.0, kind=NORMS["layer"])

    def matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        y: Tensor,
        biases: Sequence[Tensor | None] = (),
        after: Epilogue = PLAIN,
    ) -> None:
        """y = x [W0 W1 W2]^T + biases (or act(x W0^T) * (x W1^T)), times scale, soft-capped, plus add. See pk_op_matmul."""
        act, add = after.act, after.add
        for i, w in enumerate(weights):
            _same("matmul", "x width", x.cols, f"w[{i}] columns", w.cols)
        n_out = weights[0].rows if act != "none" else sum(w.rows for w in weights)
        _same("matmul", "y width", y.cols, "rows of the weights", n_out)
        record = abi.pk_op_matmul()
        record.op, record.size = abi.PK_OP_MATMUL, ctypes.sizeof(record)
        x.fill(record.x)
        y.fill(record.y)
        if add is not None:
            add.fill(record.add)
        for i, w in enumerate(weights):
            w.fill(record.w[i])
        for i, b in enumerate(biases):
            if b is not None:
                b.fill(record.bias[i])
        record.n_w, record.act, record.scale, record.softcap = len(weights), ACTS[act], after.scale, after.softcap
        self.records.append(record)

    def qkv(self, x: Tensor, q: Tensor, heads: Heads, norms: Sequence[Tensor | None], rope: Rotation | None, eps: float) -> None:
        """Splits x[T, (H+K)*D + K*Dv], normalises and rotates q and k, writes k and v into the pages. norms: of q, k and (if any) v."""
        _same("qkv", "x width", x.cols, "heads' width", heads.width)
        tensors = {"qkv": x, "q": q, "gains": _stored_gains(heads), "frequency": rope.frequency if rope else None, **dict(zip(("q_norm", "k_norm", "v_norm"), norms, strict=False))}
        self._add(
            abi.pk_op_qkv,
            abi.PK_OP_QKV,
            tensors,
            **_head_fields(heads),
            rope_width=rope.width if rope else 0,
            rope_layout=ROPE_LAYOUTS[rope.layout] if rope else 0,
            rope_magnitude=rope.magnitude if rope else 1.0,
            eps=eps,
        )

    def pool(self, pages: Pages | None) -> None:
        """From here on qkv and attention use these pages; None: those of the state again."""
        self._add(abi.pk_op_pool, abi.PK_OP_POOL, {}, **(asdict(pages) if pages is not None else {}))

    def attention(
        self, q: Tensor, out: Tensor, heads: Heads, scale: float, window: View | int = 0, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> None:
        """out[T, H*Dv] = attention of q over the pages. window: how many tokens are seen, or a View. Source: Dao et al. 2022 for the blocked form."""
        _same("attention", "q width", q.cols, "heads' width", heads.n_heads * heads.head_width)
        _same("attention", "out width", out.cols, "value width", heads.n_heads * heads.v_width)
        tensors = {"q": q, "out": out, "sinks": sinks, "gains": heads.gains[1] if heads.gains else None}
        seen = window if isinstance(window, View) else View(window)
        self._add(abi.pk_op_attention, abi.PK_OP_ATTENTION, tensors, **_head_fields(heads), scale=scale, softcap=softcap, **asdict(seen))

    def gate(self, x: Tensor, out: Tensor, act: str) -> None:
        """out[T,F] = act(x[:, :F]) * x[:, F:]; when x has F columns: out = act(x), out may be x."""
        if x.cols != out.cols:
            _same("gate", "x width", x.cols, "twice the out width", 2 * out.cols)
        self._add(abi.pk_op_gate, abi.PK_OP_GATE, {"x": x, "out": out}, act=ACTS[act])

    def gather(self, x: Tensor, out: Tensor, pool: str = "last") -> None:
        """out[S,M] = of each sequence whose next token is drawn: its "last" row, its "first" one, or the "mean" of this step's."""
        _same("gather", "x width", x.cols, "out width", out.cols)
        self._add(abi.pk_op_gather, abi.PK_OP_GATHER, {"x": x, "out": out}, pool=POOLS[pool])

    def sample(self, logits: Tensor) -> None:
        """Draws a token per sampled row from logits[S,V]."""
        self._add(abi.pk_op_sample, abi.PK_OP_SAMPLE, {"logits": logits})

    def commit(self) -> None:
        """Appends tokens, advances lengths, publishes the results."""
        self._add(abi.pk_op_commit, abi.PK_OP_COMMIT, {})

    def copy(self, x: Tensor, out: Tensor) -> None:
        """out = x, formats may differ."""
        self._add(abi.pk_op_copy, abi.PK_OP_COPY, {"x": x, "out": out})

    def add(self, x: Tensor, y: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """out = x * scale + y."""
        self._add(abi.pk_op_add, abi.PK_OP_ADD, {"x": x, "y": y, "out": out}, scale=scale)


    def route(self, logits: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor, choice: Choice) -> None:
        """ids[T,k] i32 and weights[T,k] f32 of the experts that logits[T,E] f32 choose. bias [1,E]: decides the choice only."""
        _same("route", "ids width", ids.cols, "weights width", weights.cols)
        self._add(
            abi.pk_op_route,
            abi.PK_OP_ROUTE,
            {"logits": logits, "bias": bias, "ids": ids, "weights": weights},
            score=SCORES[choice.score],
            is_normalised=int(choice.is_normalised),
            n_groups=choice.n_groups,
            n_groups_used=choice.n_groups_used,
            n_group_best=choice.n_group_best,
            scale=choice.scale,
        )

    def experts(self, x: Tensor, chosen: tuple[Tensor, Tensor], stacks: Stacks, y: Tensor, after: Epilogue = PLAIN) -> None:
        """y[T,M] = add + scale * sum of the chosen experts' feed-forwards of x[T,M]. chosen: ids, weights. See pk_op_experts."""
        _same("experts", "x width", x.cols, "up columns", stacks.up.cols)
        _same("experts", "up rows", stacks.up.rows, "down columns", stacks.down.cols)
        _same("experts", "y width", y.cols, "down rows", stacks.down.rows)
        tensors = {"x": x, "ids": chosen[0], "weights": chosen[1], "gate": stacks.gate, "up": stacks.up, "down": stacks.down, "y": y, "add": after.add}
        tensors.update(zip(("gate_bias", "up_bias", "down_bias"), stacks.biases, strict=True))
        self._add(
            abi.pk_op_experts,
            abi.PK_OP_EXPERTS,
            tensors,
            n_experts=stacks.n_experts,
            act=ACTS[stacks.activation],
            scale=after.scale,
            limit=stacks.limit,
            alpha=stacks.alpha,
        )
        if stacks.cache is not None:
            self._fetch(self.records.pop(), stacks.cache, stacks.ahead)

    def _fetch(self, experts: ctypes.Structure, here: ExpertCache, ahead: Ahead | None) -> None:
        more = {"next": ahead.next.record(), "n_most": ahead.n_most} if ahead is not None else {}
        tensors = {"expected": ahead.expected if ahead is not None else None}
        self._add(abi.pk_op_experts_fetched, abi.PK_OP_EXPERTS_FETCHED, tensors, experts=experts, here=here.record(), **more)

    def sigmoid(self, x: Tensor, g: Tensor, out: Tensor) -> None:
        """out = x * sigmoid(g); g has x's columns, or one."""
        self._add(abi.pk_op_sigmoid, abi.PK_OP_SIGMOID, {"x": x, "g": g, "out": out})


    def softplus(self, x: Tensor, g: Tensor, out: Tensor) -> None:
        """out = x * softplus(g); each of g's columns counts for equally many neighbours of x."""
        _same("softplus", "x width modulo g width", x.cols % g.cols, "wanted", 0)
        self._add(abi.pk_op_softplus, abi.PK_OP_SOFTPLUS, {"x": x, "g": g, "out": out})

    def weigh(self, chosen: tuple[Tensor, Tensor], logits: Tensor | None, scales: Tensor | None, is_normalised: bool = False) -> None:
        """weights = (sigmoid of the chosen experts' logits, or weights) * their scales, in place. chosen: ids and weights [T,k]; scales [1,E]."""
        tensors: dict[str, Tensor | None] = {"ids": chosen[0], "weights": chosen[1], "logits": logits, "scales": scales}
        self._add(abi.pk_op_weigh, abi.PK_OP_WEIGH, tensors, is_normalised=int(is_normalised))

    def ngram(self, table: Tensor, out: Tensor, shape: NgramShape) -> None:
        """out[T, n*D] = a row of every part of the table, as the last few tokens choose. table: the first of its pieces. See pk_op_ngram."""
        _same("ngram", "out width", out.cols, "rows side by side", len(shape.sizes) * table.cols)
        multipliers, sizes = (ctypes.c_int64 * 8)(*shape.multipliers), (ctypes.c_int32 * 64)(*shape.sizes)
        more = {"n_tokens": len(shape.multipliers), "n_each": shape.n_each, "end_token": shape.end_token, "n_pieces": shape.n_pieces}
        self._add(abi.pk_op_ngram, abi.PK_OP_NGRAM, {"table": table, "out": out}, multipliers=multipliers, sizes=sizes, **more)

    def streams(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """out[T,n*M] = v[T,M] in every stream, weighed by how alike the stream's q and k are. See pk_op_streams."""
        _same("streams", "q width modulo v width", q.cols % v.cols, "wanted", 0)
        self._add(abi.pk_op_streams, abi.PK_OP_STREAMS, {"q": q, "k": k, "v": v, "out": out})

    def dilated(self, x: Tensor, conv: Tensor, out: Tensor, taps: tuple[int, int], conv_offset: int) -> None:
        """out[T,C] += silu of the convolution of x[T,C]. taps: how many, and how many tokens apart. See pk_op_dilated."""
        _same("dilated", "convolution", conv.cols, "channels times taps", x.cols * taps[0])
        tensors: dict[str, Tensor | None] = {"x": x, "conv": conv, "add": out, "out": out}
        self._add(abi.pk_op_dilated, abi.PK_OP_DILATED, tensors, conv_width=taps[0], dilation=taps[1], conv_offset=conv_offset)

    def sparse(
        self, operands: tuple[Tensor, Tensor], heads: Heads, scale: float, index: tuple[Tensor, Tensor], sizes: tuple[int, int, int, int, int], rope: Rotation, eps: float
    ) -> None:
        """Attention of q into out over the blocks that an index chooses. index: its queries and its keys' norm; sizes: its heads, their width, tokens of a
        block, blocks that are seen, where its keys lie in a page. See pk_op_sparse."""
        (q, out), (index_q, index_norm) = operands, index
        _same("sparse", "index width", index_q.cols, "its heads' width", sizes[0] * sizes[1])
        tensors: dict[str, Tensor | None] = {"q": q, "index_q": index_q, "index_norm": index_norm, "frequency": rope.frequency, "gains": heads.gains[1] if heads.gains else None, "out": out}
        names = ("index_heads", "index_width", "block_tokens", "n_blocks", "i_offset")
        turns = {"rope_width": rope.width, "rope_layout": ROPE_LAYOUTS[rope.layout], "rope_magnitude": rope.magnitude}
        self._add(abi.pk_op_sparse, abi.PK_OP_SPARSE, tensors, **_head_fields(heads), **dict(zip(names, sizes, strict=True)), **turns, scale=scale, eps=eps)

    def shift(self) -> None:
        """Every token of the step becomes the one that follows it. See pk_op_shift."""
        self._add(abi.pk_op_shift, abi.PK_OP_SHIFT, {})

    def guess(self, logits: Tensor, first: int) -> None:
        """The likeliest token of logits[S,V] becomes the guess after the one just drawn. first: number of the first record that serves it alone. See pk_op_guess."""
        self._add(abi.pk_op_guess, abi.PK_OP_GUESS, {"logits": logits}, first=first)

    def keep(self, x: Tensor, numbers: tuple[Tensor | None, Tensor | None], from_offset: int, kept: Kept) -> None:
        """What a layer with a state needs to take guesses back. x: what it convolves; numbers: b and a of a delta net, dt of a mamba. See pk_op_keep."""
        self._add(abi.pk_op_keep, abi.PK_OP_KEEP, {"x": x, "b": numbers[0], "a": numbers[1]}, from_offset=from_offset, **asdict(kept))

    def settle(self, record: ctypes.Structure, from_offset: int, kept: Kept) -> None:
        """The layer of that record as it is after the guesses that were right. See pk_op_settle."""
        kind, op, name = SETTLES[type(record)]
        self._add(kind, op, {}, **{name: record}, from_offset=from_offset, **asdict(kept))

    def delta(self, inputs: tuple[Tensor, Tensor, Tensor, Tensor], weights: DeltaWeights, out: Tensor, shape: DeltaShape, eps: float, gate: str = "silu") -> None:
        """out[T,H*Dv] of qkv[T,C], z[T,H*Dv], b[T,H], a[T,H]. See pk_op_delta. Source: Yang et al. 2024, eq. 10."""
        qkv, z, b, a = inputs
        _same("delta", "z width", z.cols, "out width", out.cols)
        _same("delta", "convolution", weights.conv.cols, "channels times taps", qkv.cols * shape.conv_width)
        tensors = {"qkv": qkv, "z": z, "b": b, "a": a, "conv": weights.conv, "a_log": weights.a_log, "dt_bias": weights.dt_bias}
        op = abi.PK_OP_DELTA if gate == "silu" else abi.PK_OP_DELTA_SIGMOID
        self._add(abi.pk_op_delta, op, {**tensors, "scale": weights.scale, "out": out}, **asdict(shape), eps=eps)

    def conv(self, x: Tensor, weights: tuple[Tensor, Tensor | None], out: Tensor, conv_width: int, conv_offset: int) -> None:
        """out[T,M] of x[T,3M] = (g1, g2, v): g2 * convolution(g1 * v). weights: conv [1,M*W] f32, bias [1,M] or None. See pk_op_conv."""
        _same("conv", "x width", x.cols, "three times the out width", 3 * out.cols)
        tensors = {"x": x, "conv": weights[0], "bias": weights[1], "out": out}
        self._add(abi.pk_op_conv, abi.PK_OP_CONV, tensors, conv_width=conv_width, conv_offset=conv_offset)

    def mamba(self, inputs: tuple[Tensor, Tensor, Tensor], weights: MambaWeights, out: Tensor, shape: MambaShape, eps: float) -> None:
        """out[T,H*P] of xbc[T,C], z[T,H*P], dt[T,H]. See pk_op_mamba. Source: Dao and Gu 2024, section 7."""
        xbc, z, dt = inputs
        _same("mamba", "z width", z.cols, "out width", out.cols)
        _same("mamba", "convolution", weights.conv.cols, "channels times taps", xbc.cols * shape.conv_width)
        tensors = {"xbc": xbc, "z": z, "dt": dt, "conv": weights.conv, "bias": weights.bias, "a_log": weights.a_log, "dt_bias": weights.dt_bias}
        self._add(abi.pk_op_mamba, abi.PK_OP_MAMBA, {**tensors, "d": weights.d, "scale": weights.scale, "out": out}, **asdict(shape), eps=eps)


def _head_fields(heads: Heads) -> dict[str, int]:
    return {
        "k_offset": heads.k_offset,
        "v_offset": heads.v_offset,
        "n_heads": heads.n_heads,
        "n_kv_heads": heads.n_kv_heads,
        "head_width": heads.head_width,
        "v_width": heads.v_width,
        "kv_format": heads.kv_format,
        "parts": heads.parts,
    }


def _stored_gains(heads: Heads) -> Tensor | None:
    n = {abi.PK_PARTS_QKV: 2, abi.PK_PARTS_LATENT: 1, abi.PK_PARTS_Q: 0}[heads.parts]
    return heads.gains[0].columns(0, heads.n_heads + n * heads.n_kv_heads) if heads.gains else None
