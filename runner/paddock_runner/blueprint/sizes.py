"""The numbers that every dense family shares, read from GGUF metadata or from a Hugging Face config."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from ..errors import FileError, UnsupportedError
from ..files.checkpoint import Checkpoint
from ..files.fields import Fields
from .blueprint import Rope
from .rope import Scaling, gguf_scaling, hf_scaling

MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a dense decoder, checked. n_kv_heads and ff_widths: one entry per layer."""

    arch: str
    fields: Fields
    n_layers: int
    n_vocab: int
    model_width: int
    max_ctx_tokens: int
    n_heads: int
    n_kv_heads: tuple[int, ...]
    head_width: int
    v_width: int
    ff_widths: tuple[int, ...]
    norm_eps: float
    rope_width: int
    theta: float
    scaling: Scaling
    tied_head: bool
    name: str
    notes: tuple[str, ...] = ()
    n_draft_layers: int = 0

    def rope(self, layout: str = "neox") -> Rope:
        """The rope that the checkpoint describes, with that layout of pairs."""
        s = self.scaling
        return Rope(self.theta, self.rope_width, layout, s.factors, s.magnitude, s.long_factors, s.original_ctx_tokens)


def gguf_sizes(checkpoint: Checkpoint, arch: str, may_have_experts: bool = False, is_mixed: bool = False) -> Sizes:
    """Sizes from the keys "<arch>.*". is_mixed: layers may have their own numbers of heads (n_heads is the largest), or lack parts (0).

    Raises: FileError naming the key, UnsupportedError (experts in a dense family).
    """
    f = checkpoint.fields
    if not may_have_experts and f.integer(f"{arch}.expert_count", 0) > 0:
        raise UnsupportedError(
            f"{checkpoint.path}: {arch} with {f[f'{arch}.expert_count']} experts is not supported; only dense models are",
            what=f"{arch} mixture of experts",
            supported=["dense"],
        )
    n_blocks, n_draft = f.integer(f"{arch}.block_count", low=1, high=MAX_LAYERS), f.integer(f"{arch}.nextn_predict_layers", 0)
    if n_draft >= n_blocks:
        raise f.error(f"{arch}.nextn_predict_layers", f"is {n_draft} of {n_blocks} blocks")
    n_layers = n_blocks - n_draft
    width = f.integer(f"{arch}.embedding_length", low=1, high=1 << 20)
    heads = f.integers(f"{arch}.attention.head_count", n_layers, high=4096)
    if len(set(heads)) != 1 and not is_mixed:
        raise UnsupportedError(
            f"{checkpoint.path}: {arch} with different numbers of heads per layer is not supported",
            what="heads per layer",
        )
    n_heads = max(heads)
    if not n_heads:
        raise f.error(f"{arch}.attention.head_count", "is 0, expected 1 or more")
    head_width = f.integer(f"{arch}.attention.key_length", max(width // n_heads, 2), low=2, high=4096)
    ctx = f.integer(f"{arch}.context_length", low=1, high=1 << 31)
    theta = rope_base(f, f"{arch}.rope.freq_base", 10000.0)
    rope_width = f.integer(f"{arch}.rope.dimension_count", head_width, low=2, high=4096)
    notes: tuple[str, ...] = ()
    if "rope_factors_long.weight" in checkpoint.tensors:
        scaling, notes = _stored_longrope(checkpoint, f, arch, rope_width, ctx)
    else:
        scaling = gguf_scaling(f, arch, theta, rope_width, ctx)
    if "rope_freqs.weight" in checkpoint.tensors:
        factors, notes = _stored_factors(checkpoint, "rope_freqs.weight", rope_width)
        scaling = replace(scaling, factors=factors)
    sizes = Sizes(
        arch, f, n_layers, _embedding_rows(checkpoint, "token_embd.weight"), width, ctx, n_heads,
        f.integers(f"{arch}.attention.head_count_kv", n_layers, n_heads, high=4096),
        head_width, f.integer(f"{arch}.attention.value_length", head_width, low=1, high=4096),
        f.integers(f"{arch}.feed_forward_length", n_layers, 1 if may_have_experts else None, high=1 << 24),
        f.number(f"{arch}.attention.layer_norm_rms_epsilon"), rope_width, theta, scaling,
        "output.weight" not in checkpoint.tensors, f.text("general.name", ""), notes, n_draft,
    )  # fmt: skip
    return _checked(sizes, is_mixed)


def hf_sizes(checkpoint: Checkpoint, fields: Fields, tied_default: bool = False, rope_key: str = "") -> Sizes:
    """Sizes from config.json (or its text_config). rope_key: which entry of rope_parameters is meant. Raises: FileError."""
    f = fields
    n_layers = f.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    width = f.integer("hidden_size", low=1, high=1 << 20)
    n_heads = f.integer("num_attention_heads", low=1, high=4096)
    head_width = f.integer("head_dim", max(width // n_heads, 2), low=2, high=4096)
    ctx = f.integer("max_position_embeddings", low=1, high=1 << 31)
    rope = (
        f.section("rope_parameters")
        if "rope_parameters" in f
        else f.section("rope_scaling")
        if "rope_scaling" in f
        else None
    )
    if rope is not None and rope_key and rope_key in rope:
        rope = rope.section(rope_key)
    theta = rope_base(rope if rope is not None and "rope_theta" in rope else f, "rope_theta", 10000.0)
    share = f.number("partial_rotary_factor", rope.number("partial_rotary_factor", 1.0) if rope is not None else 1.0)
    if not 0 < share <= 1:
        raise f.error("partial_rotary_factor", f"is {share}, expected more than 0, at most 1")
    rope_width = int(head_width * share)
    scaling = hf_scaling(rope, f, theta, rope_width)
    sizes = Sizes(
        f.text("model_type", ""), f, n_layers, f.integer("vocab_size", low=1, high=1 << 24), width, ctx, n_heads,
        f.integers("num_key_value_heads", n_layers, n_heads, high=4096),
        head_width, head_width, f.integers("intermediate_size", n_layers, high=1 << 24),
        f.number("rms_norm_eps", 1e-6), rope_width, theta, scaling,
        f.flag("tie_word_embeddings", tied_default), checkpoint.path.name, n_draft_layers=f.integer("num_nextn_predict_layers", 0, high=MAX_LAYERS),
    )  # fmt: skip
    return _checked(sizes)


def _checked(s: Sizes, is_mixed: bool = False) -> Sizes:
    """Refuses sizes that cannot be: they would only fail later, in a kernel."""
    if any(n == 0 for n in s.n_kv_heads) and not is_mixed:
        raise UnsupportedError(
            f"{s.fields.where}: layer {s.n_kv_heads.index(0)} has no key-value heads: {s.arch} with layers other than attention is not supported",
            what="layers without attention",
        )
    for i, n in enumerate(s.n_kv_heads):
        if not is_mixed and s.n_heads % n:
            raise FileError(
                f"{s.fields.where}: layer {i} has {s.n_heads} heads and {n} key-value heads, expected a multiple",
                field="head_count_kv",
            )
    if any(n == 0 for n in s.ff_widths) and not is_mixed:
        raise FileError(
            f"{s.fields.where}: layer {s.ff_widths.index(0)} has a feed-forward width of 0", field="feed_forward_length"
        )
    if s.rope_width > s.head_width or s.rope_width % 2:
        raise FileError(
            f"{s.fields.where}: rope turns {s.rope_width} of {s.head_width} dimensions, expected an even number of at most that",
            field="rope.dimension_count",
        )
    if not 0 < s.norm_eps < 1:
        raise FileError(
            f"{s.fields.where}: the norm epsilon is {s.norm_eps}, expected between 0 and 1",
            field="layer_norm_rms_epsilon",
        )
    return s


def rope_base(fields: Fields, key: str, default: float) -> float:
    """The rope base, checked before anything takes its logarithm."""
    theta = fields.number(key, default)
    if theta <= 1:
        raise fields.error(key, f"is {theta}, expected more than 1")
    return theta


def _embedding_rows(checkpoint: Checkpoint, name: str) -> int:
    """The vocabulary as the embedding has it: padded, where the tokenizer's list is not."""
    view = checkpoint.tensors.get(name)
    if view is None:
        raise FileError(f"{checkpoint.path}: tensor {name} is missing", path=str(checkpoint.path), field=name)
    if len(view.shape) != 2 or view.shape[0] < 1:
        raise FileError(
            f"{view.path}: tensor {name} has the shape {list(view.shape)}, expected [vocabulary, width]",
            path=str(view.path),
            field=name,
        )
    return view.shape[0]


def _stored_factors(checkpoint: Checkpoint, name: str, rope_width: int) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """The divisors in that tensor; none, with a note, where only a header is at hand."""
    view = checkpoint.tensors[name]
    if view.format != "f32" or view.n_elements != rope_width // 2:
        raise FileError(
            f"{view.path}: tensor {name} is {view.format} {list(view.shape)}, expected f32 [{rope_width // 2}]",
            path=str(view.path),
            field=view.name,
        )
    try:
        values = struct.unpack(f"<{view.n_elements}f", checkpoint.read(view))
    except UnsupportedError:
        return (), ("rope factors are in a tensor that was not read",)
    if not all(0 < v < 1e31 for v in values):
        raise FileError(
            f"{view.path}: tensor {name} holds {min(values)} to {max(values)}, expected positive divisors",
            path=str(view.path),
            field=view.name,
        )
    return tuple(values), ()


def _stored_longrope(
    checkpoint: Checkpoint, f: Fields, arch: str, rope_width: int, ctx: int
) -> tuple[Scaling, tuple[str, ...]]:
    """The two sets of divisors in rope_factors_short and rope_factors_long."""
    long, notes = _stored_factors(checkpoint, "rope_factors_long.weight", rope_width)
    short: tuple[float, ...] = ()
    if "rope_factors_short.weight" in checkpoint.tensors:
        short, _ = _stored_factors(checkpoint, "rope_factors_short.weight", rope_width)
    original = f.integer(f"{arch}.rope.scaling.original_context_length", ctx, low=2)
    return Scaling(short, f.number(f"{arch}.rope.scaling.attn_factor", 1.0), long, original), notes
