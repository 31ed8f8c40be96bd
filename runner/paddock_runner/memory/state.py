"""The arrays of pk_state and the layout of a KV page: how many bytes each takes. The plan sums them, the device allocates them."""

from __future__ import annotations

from dataclasses import dataclass

from ..blueprint.blueprint import Blueprint, Layer
from .kinds import StateBytes, delta_net_bytes, mamba2_bytes, short_conv_bytes, split_format, stored_bytes

KV_BYTES = {name: stored_bytes(1, name) for name in ("f32", "f16", "bf16", "fp8")}
ALIGN_BYTES = 256
TILE_TOKENS = 128
"""Of products on a GPU."""
AHEAD_TOKENS = 256
"""Tokens for which a decoding request gets pages at a time, while there are plenty."""
SAMPLING_BYTES, RESULT_BYTES, TOP_BYTES, BIAS_BYTES = (
    136,
    24,
    8,
    8,
)  # sizeof the structs in packs/pack.h (a test compares)


def aligned(n_bytes: int) -> int:
    """Rounded up to the allocation alignment."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes of everything that varies from step to step. n_pages counts the scratch page 0."""

    n_slots: int
    max_ctx_tokens: int  # a multiple of page_tokens
    page_tokens: int
    n_pages: int
    n_vocab: int
    max_step_tokens: int
    max_step_rows: int
    max_bias: int = 512
    max_top: int = 20
    n_results: int = 8
    recurrent_bytes: int = 0  # of one slot's recurrent states
    n_snapshots: int = 0  # copies of a slot's recurrent states that the prefix cache may keep
    lookback_tokens: int = 0  # tokens that a step reads before its own: they must be there though their keys are cached
    max_guesses: int = 0  # guessed tokens of a row that recurrent states can take back
    n_expert_slots: int = 0  # places of every layer for experts, which lie in host memory; 0: all lie on the device
    window_tokens: int = 0  # tokens that layers with a window see, where their keys and values have pages of their own
    n_window_pages: int = 0  # those pages, scratch page 0 included
    part_processors: int = 0  # of the device, which read long prompts beside the steps; 0: none, and all run every step
    part_tokens: int = 0  # of their steps, at most
    beside_tokens: int = 0  # of a step that runs beside theirs, at most; 0: as many as of any

    @property
    def slot_pages(self) -> int:
        """Pages of a full context."""
        return self.max_ctx_tokens // self.page_tokens

    @property
    def window_back(self) -> int:
        """Pages before a page's first token that layers with a window see from there."""
        return pages_back(self.window_tokens, self.page_tokens)

    @property
    def pages_ahead(self) -> int:
        """Pages that a decoding request gets at a time, while there are plenty."""
        return pages_ahead(self.slot_pages, self.page_tokens)

    @property
    def mask_words(self) -> int:
        """32-bit words of one grammar mask."""
        return -(-self.n_vocab // 32)


def device_arrays(sizes: StateSizes) -> dict[str, int]:
    """Bytes of each pk_state array in device memory, by field name (KV pages and workspace are apart)."""
    slots, rows, tokens = sizes.n_slots, sizes.max_step_rows, sizes.max_step_tokens
    states = {"recurrent": slots * sizes.recurrent_bytes} if sizes.recurrent_bytes else {}
    return {
        **states,
        "tokens": 4 * slots * (sizes.max_ctx_tokens + 1),
        "length": 4 * slots,
        "alive": 4 * slots,
        "page_table": 4 * slots * sizes.slot_pages,
        "sampling": SAMPLING_BYTES * slots,
        "bias": BIAS_BYTES * slots * sizes.max_bias,
        "mask": 4 * (slots + rows) * sizes.mask_words,
        "row_slot": 4 * rows,
        "row_start": 4 * (rows + 1),
        "row_position": 4 * rows,
        "row_flags": 4 * rows,
        "token_id": 4 * tokens,
        "token_position": 4 * tokens,
        "token_row": 4 * tokens,
        "token_page": 4 * tokens,
        "sample_row": 4 * rows,
        "sample_at": 4 * rows,
        "sample_token": 4 * rows,
        "sample_flags": 4 * rows,
        "sample_logprob": 4 * rows,
    }


def window_arrays(sizes: StateSizes) -> dict[str, int]:
    """Bytes of the arrays that go with pages of layers with a window, by field name of pk_op_pool."""
    return {"page_table": 4 * sizes.n_slots * sizes.slot_pages, "token_page": 4 * sizes.max_step_tokens} if sizes.n_window_pages else {}


def pinned_arrays(sizes: StateSizes) -> dict[str, int]:
    """Bytes of each host-visible pk_state array, by field name."""
    block = sizes.n_results * sizes.max_step_rows
    return {"results": RESULT_BYTES * block, "top": TOP_BYTES * block * sizes.max_top, "done": 8}


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where each layer's keys and values lie in a page. offsets: per layer (k, v) in bytes from the page's start; index_offsets: its index keys, or 0.

    is_windowed: per layer, whether the page is one of the windows' pool, whose pages have window_page_bytes (0: there is no such pool).
    """

    offsets: tuple[tuple[int, int], ...]
    page_bytes: int
    index_offsets: tuple[int, ...] = ()
    is_windowed: tuple[bool, ...] = ()
    window_page_bytes: int = 0


def token_buckets(max_step_tokens: int) -> list[int]:
    """Token counts for which launches are prepared: powers of two up to 8, then steps of half an octave; whole tiles where there is more than one. Five
    tiles, too: so many has a step of four short prompts beside 128 rows, and products of the next count's tiles would take a tenth longer."""
    buckets, n = [1, 2, 4, 8], 16
    while n < max_step_tokens:
        buckets += [n, n + n // 2]
        n *= 2
    whole = [b for b in buckets if b < TILE_TOKENS or b % TILE_TOKENS == 0]
    return [b for b in sorted([*whole, 5 * TILE_TOKENS]) if b < max_step_tokens] + [max_step_tokens]


def windowed_layers(blueprint: Blueprint) -> tuple[bool, ...]:
    """Which layers' keys and values could lie in pages that are given back behind the window: those that nobody sees from further away."""
    layers = [layer.attention for layer in blueprint.all_layers]
    found = [a.window > 0 and a.causal and a.index is None and a.n_kv_heads > 0 for a in layers]
    if blueprint.needs_whole_prompts or any(layer.delta or layer.conv or layer.mamba for layer in blueprint.layers):
        return (False,) * len(layers)
    for a, is_windowed in zip(layers, found, strict=True):
        if a.kv_from is not None and not is_windowed:
            found[a.kv_from] = False
    return tuple(found[i if a.kv_from is None else a.kv_from] for i, a in enumerate(layers))


def layer_formats(blueprint: Blueprint, kv_format: str) -> tuple[str, ...]:
    """The format of every layer's keys and values; of a layer that reads another's, that one's."""
    plain, of_windows = split_format(kv_format)
    layers = [layer.attention for layer in blueprint.all_layers]
    sources = [a if a.kv_from is None else layers[a.kv_from] for a in layers]
    return tuple(of_windows if a.window > 0 else plain for a in sources)


def has_half_keys(blueprint: Blueprint, kv_format: str) -> bool:
    """Whether some layer of plain attention keeps keys in F16: activations of 16 bits would round them before they are rotated, so its projections are F32."""
    layers = zip(blueprint.all_layers, layer_formats(blueprint, kv_format), strict=True)
    return any(f == "f16" and x.kind == "attention" and x.attention.is_plain for x, f in layers)


def scale_bytes(blueprint: Blueprint, kv_format: str) -> int:
    """Bytes of what keeps heads of FP8 keys and values in its range: a number for every head that is stored, and for every head that attends."""
    layers = zip(blueprint.all_layers, layer_formats(blueprint, kv_format), strict=True)
    return sum(4 * (2 * a.n_heads + 2 * a.n_kv_heads) for a, format in ((x.attention, f) for x, f in layers) if format == "fp8" and a.n_kv_heads)


def largest_window(blueprint: Blueprint) -> int:
    """Tokens that the widest of those layers sees; 0: there are none."""
    return max((x.attention.window for x, is_windowed in zip(blueprint.all_layers, windowed_layers(blueprint), strict=True) if is_windowed), default=0)


def pages_back(window: int, page_tokens: int) -> int:
    """Pages before a page's first token that a layer with that window sees from there."""
    return -(-(window - 1) // page_tokens) if window else 0


def pages_ahead(slot_pages: int, page_tokens: int) -> int:
    """Pages that a decoding request gets at a time, while there are plenty: at most an eighth of what it may have."""
    return max(1, min(AHEAD_TOKENS // page_tokens, slot_pages // 8))


def window_pages(window: int, n_slots: int, slot_pages: int, page_tokens: int, max_step_tokens: int) -> int:
    """Pages of the windows' pool, scratch page included, that let every slot go on at any time: of each what its window sees, the page that it writes,
    one that is half behind, and those it has ahead; and what one step reads of prompts. More of them keep what prefixes can be gone on from."""
    running = pages_back(window, page_tokens) + 3 + pages_ahead(slot_pages, page_tokens)
    return 1 + n_slots * running + -(-max_step_tokens // page_tokens)


def page_layout(blueprint: Blueprint, kv_format: str, page_tokens: int, has_windows: bool = False) -> PageLayout:
    """One page holds `page_tokens` tokens of every layer: K [K, B, D] then V [K, B, Dv], each aligned to 64 bytes; latent attention has no V, and a layer
    that reads another's keys and values lies where that one does. Index keys [B, W] follow V. has_windows: layers with a window have pages of their own."""
    is_windowed = windowed_layers(blueprint) if has_windows else (False,) * len(blueprint.all_layers)
    ends, formats = [0, 0], layer_formats(blueprint, kv_format)
    offsets: list[tuple[int, int]] = []
    index_offsets: list[int] = []
    for layer, pool, format in zip(blueprint.all_layers, is_windowed, formats, strict=True):
        a = layer.attention
        at = ends[pool]
        if a.kv_from is not None:
            offsets.append(offsets[a.kv_from])
            index_offsets.append(0)
            continue
        k_bytes = stored_bytes(a.n_kv_heads * page_tokens * a.head_width, format)
        v_bytes = 0 if a.latent is not None else stored_bytes(a.n_kv_heads * page_tokens * a.values_width, format)
        v_at = at + -(-k_bytes // 64) * 64
        offsets.append((at, v_at))
        at = v_at + -(-v_bytes // 64) * 64
        index_offsets.append(at if a.index is not None else 0)
        at += -(-stored_bytes(page_tokens * a.index.width, format) // 64) * 64 if a.index is not None else 0
        ends[pool] = at
    least = 1 if ends[1] else 0  # pages of models whose layers all have windows hold nothing, but are there
    return PageLayout(tuple(offsets), aligned(max(least, ends[0])), tuple(index_offsets), is_windowed, aligned(ends[1]))


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where each layer's recurrent state lies in a slot's. offsets: per layer (matrix states, convolution's tail), or None; ngram_offsets: the tail of
    its n-grams' convolution, or 0; kept_offsets: of what a layer needs to take guesses back: its state of before, and its inputs since; or None."""

    offsets: tuple[tuple[int, int] | None, ...]
    slot_bytes: int
    ngram_offsets: tuple[int, ...] = ()
    kept_offsets: tuple[tuple[int, int] | None, ...] = ()


def state_layout(blueprint: Blueprint) -> StateLayout:
    """f32 states of every layer of kind delta, conv or mamba, each part aligned to 256 bytes."""
    at = 0
    offsets: list[tuple[int, int] | None] = []
    for layer in blueprint.layers:
        need = layer_state(layer)
        if need is None:
            offsets.append(None)
            continue
        offsets.append((at, at + aligned(need.state)))
        at += state_bytes(need)
    ngram_offsets = []
    for layer in blueprint.layers:
        ngram_offsets.append(at if layer.ngram is not None else 0)
        rows = (layer.ngram.conv_width - 1) * layer.ngram.n_tokens if layer.ngram is not None else 0
        at += aligned(4 * rows * blueprint.n_streams * blueprint.model_width)
    kept_offsets: list[tuple[int, int] | None] = []
    for layer in blueprint.layers:
        need = layer_state(layer)
        if need is None or not blueprint.max_guesses:
            kept_offsets.append(None)
            continue
        rows = at + state_bytes(need)
        kept_offsets.append((at, rows))
        at = rows + aligned(4 * (blueprint.max_guesses + 1) * _n_inputs(layer))
    return StateLayout(tuple(offsets), at, tuple(ngram_offsets), tuple(kept_offsets))


def layer_state(layer: Layer) -> StateBytes | None:
    """A layer's matrix states and its convolution's tail; None: it has neither."""
    if layer.conv is not None:
        return short_conv_bytes(layer.conv.width, layer.conv.conv_width)
    if (y := layer.mamba) is not None:
        return mamba2_bytes(y.n_heads, y.head_width, y.state_width, y.n_groups, y.conv_width)
    if (x := layer.delta) is not None:
        return delta_net_bytes(x.n_k_heads, x.n_v_heads, x.k_width, x.v_width, x.conv_width)
    return None


def state_bytes(need: StateBytes) -> int:
    """States and tail as they lie, one after the other."""
    return aligned(need.state) + aligned(need.tail)


def _n_inputs(layer: Layer) -> int:
    """Numbers of a token that the layer's state is computed from."""
    if layer.conv is not None:
        return 3 * layer.conv.width
    if layer.mamba is not None:
        return layer.mamba.n_channels + layer.mamba.n_heads
    return layer.delta.n_channels + 2 * layer.delta.n_v_heads if layer.delta is not None else 0
