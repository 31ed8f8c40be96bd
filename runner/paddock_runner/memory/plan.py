"""The memory plan: what a runner will allocate for a model, line by line. The allocator uses the same functions.

Pure arithmetic over a blueprint and tensor headers: works on a model that is not here. Opens no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..blueprint.blueprint import Blueprint, Layer
from ..blueprint.unit import unit_norms
from ..errors import UsageError
from ..files.view import TensorView
from ..formats import cuda
from ..formats.table import packed_bytes
from .arena import arena, pack_scratch_bytes
from .experts import MATRIX, ExpertLayers, expert_layers
from .kinds import kv_token_bytes, latent_token_bytes, split_format, stored_bytes
from .part import PARTED_ARCHS, SHARE, part_arrays, part_sizes, part_windows, parted
from .state import (
    KV_BYTES,
    StateSizes,
    aligned,
    device_arrays,
    largest_window,
    layer_formats,
    page_layout,
    pages_back,
    pinned_arrays,
    scale_bytes,
    state_layout,
    token_buckets,
    window_arrays,
    window_pages,
)

MIB = 1 << 20
CPU_GRANULE_BYTES = 2 * MIB
CUDA_GRANULE_BYTES = 32 * MIB
ENGINE_PROCESS_BYTES = 45 * MIB
FRONT_BYTES, FRONT_BYTES_PER_TOKEN = 60 * MIB, 832
"""Of the processes beside the engine's, and for each token of the vocabulary: tokenizer and tables of structured output. They count where the device's
memory is the host's. Measured with vocabularies of 49k, 152k and 262k tokens: 87, 177 and 258 MiB."""
CUDA_CONTEXT_BYTES_PER_PROCESSOR = 4 * MIB + 320 * 1024
"""Of the driver, the pack's code and what its kernels spill, for each multiprocessor. Measured on an H200's 132 with the models of
bench/fit_matrix.py (driver 580): 517 to 560 MiB."""
HOST_BYTES_PER_MAPPED_BYTE = 200
"""Pinned host memory of which the driver keeps a byte of tables on the device. Measured once: 54 MiB for the 12.9 GB of an OLMoE's experts, one in 230."""
GRAPH_BYTES_PER_LAYER = 42 * 1024
"""Of one launch graph, for each layer with attention of its own heads and a dense feed-forward. Measured on an H200: 1.45 MB for 36 layers."""
GRAPH_BYTES_PER_PART = 20 * 1024
"""What each other part of a layer adds: experts, a shared expert, a delta rule, an index, n-grams. Measured: 8 to 22 KiB."""
GRAPH_BYTES_PER_PANEL_LAUNCH, PANEL_TOKENS = 2355, 256
"""What a launch of a product with unpacked weights adds, in graphs of more tokens. Measured: 1.6 to 2.9 KB (8B and 32B in Q4_K_M, a 36B in Q8_0)."""
INVARIANT_ROWS, PRODUCTS_PER_LAYER = 128, 6
"""Rows of a launch of a product where a row's numbers depend on the row alone; products that a layer has at most, but for those of heads and experts."""
BESIDE_COUNTER_BYTES = 256 * 1024 + 256
"""Counters of the graphs that run beside it, and what stands in front of them."""
PARTS_BYTES = 8 * MIB
"""Of the driver, for both parts of a device. Measured on an H200: 8.4 MB."""
GRAPH_BYTES_PER_STREAM = 35 * 1024
"""What each stream of the residual adds: ten launches. From GRAPH_BYTES_PER_LAYER's dozen of launches, not measured."""
GRAPH_BYTES_PER_LATENT_HEAD = 11 * 1024
"""What a head of latent attention adds: products of its own, into the latent's space and out of it. Measured: 9.9 KiB of 16 heads, 10.8 of 128."""

STATE_CACHE_SHARE = 10
"""Where nobody chose, snapshots of recurrent states take at most one part in so many of the free memory."""
WINDOW_CACHE_SHARE = 20
"""Pages of layers with a window that only the prefix cache has take at most one part in so many of the free memory."""
SLOT_GUESSES, STEP_GUESSES = 16, 64
"""Guessed tokens that a step has room for: of one slot, and in all."""
KV_FORMAT = {"cpu": "f16", "cuda": "bf16"}
"""The KV cache's format where nobody chose one: the one that the device's attention reads without converting."""
BIASED_KEYS = ("f16", "projections of its keys have a bias, beside which the bits of BF16 are few")
"""The same on a GPU for models of which that is so, and why."""
STEP_TOKENS = {"cpu": 512, "cuda": 2560}
"""Tokens of the largest step where nobody chose: enough to keep the matrix units busy and for more than half of 32 prompts of 128, few enough for a step to stay short."""
AWAY_STEP_TOKENS = 8192
"""The same where experts lie in host memory: a step of a long prompt copies nearly all that are missing, however many tokens it has."""


def chosen_format(blueprint: Blueprint, kind: str) -> tuple[str, str]:
    """The KV cache's format where nobody chose one, and why it is not what a device of that kind usually has ("": it is)."""
    attentions = [x.attention for x in blueprint.all_layers if x.kind == "attention"]
    is_biased = kind == "cuda" and any(a.qkv_bias and a.causal and a.is_plain for a in attentions)
    return BIASED_KEYS if is_biased else (KV_FORMAT[kind], "")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the plan must know of a device. kind: "cpu" or "cuda". n_processors: threads, or multiprocessors.

    activation_bytes: of one element of an activation. process_bytes: what a process takes on the device before it has a model, as
    process_source says ("table", or "measured" on this machine). prefill_share: of the processors, for the part that reads long prompts aside where nobody chose.
    """

    kind: str
    n_processors: int
    activation_bytes: int
    granule_bytes: int
    process_bytes: int
    memory_bytes: int = 0
    free_bytes: int = 0
    name: str = ""
    process_source: str = "table"
    prefill_share: float = 0.0


def cpu_facts(n_threads: int, memory_bytes: int = 0, free_bytes: int = 0) -> DeviceFacts:
    """The CPU pack with that many threads."""
    return DeviceFacts("cpu", n_threads, 4, CPU_GRANULE_BYTES, ENGINE_PROCESS_BYTES, memory_bytes, free_bytes, "cpu", prefill_share=SHARE["cpu"])


def cuda_facts(n_processors: int, memory_bytes: int = 0, free_bytes: int = 0, name: str = "", arch: str = "") -> DeviceFacts:
    """A CUDA device with that many multiprocessors. arch: its own, or that of its kernel pack."""
    context = n_processors * CUDA_CONTEXT_BYTES_PER_PROCESSOR
    share = SHARE["cuda"] if arch in PARTED_ARCHS else 0.0
    return DeviceFacts("cuda", n_processors, 2, CUDA_GRANULE_BYTES, context, memory_bytes, free_bytes, name, prefill_share=share)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for. n_pages: pages of the pool, scratch page included; None: enough for every slot's full context.

    expert_bytes: of the device for experts, the others lie in host memory; None: all lie on the device.
    has_windows: layers with a window have pages of their own, which are given back behind it, where that takes less.
    is_invariant: as in pk_open_config; a product of many rows is several launches then.
    prefill_share: of the processors, for the part that reads long prompts beside the steps; None: what suits the device.
    state_cache_bytes: for snapshots of recurrent states; None: two per slot and eight more, at most a tenth of the free memory. An empty kv_format and a max_step_tokens of 0 become what suits the device.
    """

    max_ctx_tokens: int
    max_batch: int
    device: DeviceFacts
    kv_format: str = ""
    max_step_tokens: int = 0
    page_tokens: int = 32
    n_pages: int | None = None
    state_cache_bytes: int | None = None
    expert_bytes: int | None = None
    has_windows: bool = True
    is_invariant: bool = False
    prefill_share: float | None = None

    @property
    def chose_share(self) -> bool:
        """Whether somebody did choose that part."""
        return self.prefill_share is not None

    @property
    def share(self) -> float:
        """The part of the processors that reads long prompts aside."""
        return self.device.prefill_share if self.prefill_share is None else self.prefill_share

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_format", self.kv_format or KV_FORMAT[self.device.kind])
        is_away = self.expert_bytes is not None and self.device.kind == "cuda"
        object.__setattr__(self, "max_step_tokens", self.max_step_tokens or (AWAY_STEP_TOKENS if is_away else STEP_TOKENS[self.device.kind]))


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One cost. group: "weights", "experts", "host experts", "vectors", "kv", "windows", "state", "snapshots", "pinned", "activations", "scratch" (the allocator's names), "graphs", "process" or "front".

    source: "header" (from the file), "planner" (a formula that the allocator shares), "table" (measured once, elsewhere), "measured" (here).
    """

    name: str
    n_bytes: int
    source: str
    group: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every line, and the numbers people ask for. load_bytes: one tensor's staging buffer, gone before the state is allocated. host_bytes: of experts
    in pinned host memory, beside the device's lines."""

    lines: tuple[PlanLine, ...]
    sizes: StateSizes
    kv_format: str
    kv_token_bytes: int
    page_bytes: int
    load_bytes: int
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All lines together: what is held while serving."""
        return sum(line.n_bytes for line in self.lines)

    @property
    def peak_bytes(self) -> int:
        """The most that is ever held: while serving, or (large tensors, small state) while loading."""
        loaded = sum(line.n_bytes for line in self.lines if line.group in ("weights", "experts", "host experts", "process", "front"))
        return max(self.total_bytes, loaded + self.load_bytes)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the page pool holds over all requests."""
        return (self.sizes.n_pages - 1) * self.sizes.page_tokens

    def group_bytes(self, group: str) -> int:
        """Bytes of one group of lines."""
        return sum(line.n_bytes for line in self.lines if line.group == group)

    @property
    def groups(self) -> dict[str, int]:
        """Bytes of every group of lines."""
        return {line.group: self.group_bytes(line.group) for line in self.lines}

    def as_json(self) -> dict[str, Any]:
        """For --json: bytes everywhere."""
        return {
            "lines": [{"name": x.name, "bytes": x.n_bytes, "source": x.source, "group": x.group} for x in self.lines],
            "total_bytes": self.total_bytes,
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.host_bytes,
            "n_expert_slots": self.sizes.n_expert_slots,
            "max_ctx_tokens": self.sizes.max_ctx_tokens,
            "max_batch": self.sizes.n_slots,
            "kv_format": self.kv_format,
            "kv_token_bytes": self.kv_token_bytes,
            "page_tokens": self.sizes.page_tokens,
            "n_pages": self.sizes.n_pages,
            "pool_tokens": self.pool_tokens,
        }


def plan(blueprint: Blueprint, tensors: Mapping[str, TensorView], request: PlanRequest) -> MemoryPlan:
    """The plan for these tensors (by our names, as blueprint/names.py gives them).

    Raises: UsageError (context over the model's, no slots, a pool below one context), UnsupportedError (a format).
    """
    return complete(blueprint, weight_sizes(blueprint, tensors, request.device.kind), largest_tensor_bytes(tensors), request)


def state_sizes(blueprint: Blueprint, request: PlanRequest) -> StateSizes:
    """The sizes of the step state for a request: the runner builds its device with these. Raises: UsageError."""
    ctx, page = request.max_ctx_tokens, request.page_tokens
    if ctx < 1 or request.max_batch < 1 or request.max_step_tokens < 1 or page < 1:
        raise UsageError(
            f"context {ctx}, batch {request.max_batch}, step {request.max_step_tokens} and page {page} must all be at least 1"
        )
    if ctx > blueprint.max_ctx_tokens:
        raise UsageError(
            f"a context of {ctx} tokens was asked for, {blueprint.name or blueprint.family} was made for {blueprint.max_ctx_tokens}",
            f"ask for {blueprint.max_ctx_tokens} or fewer",
            max_ctx_tokens=ctx,
            limit=blueprint.max_ctx_tokens,
        )
    for format in split_format(request.kv_format):
        if format not in KV_BYTES:
            raise UsageError(f"KV format {format} is not known; known: {', '.join(KV_BYTES)}")
    # The end of a sequence that gives a vector counts as one token more.
    slot_pages = -(-(ctx + (blueprint.pooling is not None)) // page)
    step = max(request.max_step_tokens, request.max_batch, ctx if blueprint.needs_whole_prompts else 0)
    all_pages = request.max_batch * slot_pages
    if blueprint.needs_whole_prompts:
        all_pages = min(all_pages, -(-step // page) + request.max_batch + slot_pages)  # a sequence holds pages for one step only
    n_pages = request.n_pages if request.n_pages is not None else all_pages + 1
    if n_pages < slot_pages + 1:
        raise UsageError(
            f"a pool of {n_pages} pages cannot hold one context of {slot_pages} pages and the scratch page"
        )
    states = state_layout(blueprint).slot_bytes
    window = largest_window(blueprint) if request.has_windows else 0
    n_window_pages = window_pages(window, request.max_batch, slot_pages, page, step) + _kept_pages(blueprint, request, window) if window else 0
    if n_window_pages >= n_pages:
        window = n_window_pages = 0
    return StateSizes(
        request.max_batch, slot_pages * page, page, n_pages, blueprint.n_ids, step, min(step, request.max_batch + _guess_rows(blueprint, request.max_batch)),
        recurrent_bytes=states, n_snapshots=_snapshots(request, states), lookback_tokens=blueprint.lookback_tokens, max_guesses=blueprint.max_guesses,
        window_tokens=window, n_window_pages=n_window_pages,
    )  # fmt: skip


def _kept_pages(blueprint: Blueprint, request: PlanRequest, window: int) -> int:
    """Pages of layers with a window that the prefix cache may keep: what is seen from the ends of two prefixes per request and of eight more, at most a part
    of the free memory, at least one such."""
    layout = page_layout(blueprint, request.kv_format, request.page_tokens, has_windows=True)
    n_each, n, free = pages_back(window, request.page_tokens) + 1, 2 * request.max_batch + 8, request.device.free_bytes
    return n_each * (max(1, min(n, free // WINDOW_CACHE_SHARE // (n_each * layout.window_page_bytes))) if free else n)


def _guess_rows(blueprint: Blueprint, max_batch: int) -> int:
    """Draws of a step beyond one a slot: those of guessed tokens."""
    if blueprint.pooling is not None or (blueprint.has_states and not blueprint.max_guesses):
        return 0
    return min(max_batch * (1 if blueprint.draft is not None else blueprint.max_guesses or SLOT_GUESSES), STEP_GUESSES)


def _snapshots(request: PlanRequest, state_bytes: int) -> int:
    """How many recurrent states the prefix cache may keep. Raises: UsageError when the cache that was asked for holds none."""
    if not state_bytes:
        return 0
    asked = request.state_cache_bytes
    if asked is None:
        n = 2 * request.max_batch + 8
        free = request.device.free_bytes
        return min(n, free // STATE_CACHE_SHARE // state_bytes) if free else n
    if 0 < asked < state_bytes:
        raise UsageError(
            f"a state cache of {asked} bytes holds no state of this model, one has {state_bytes}", "give it more, or 0 for none"
        )
    return asked // state_bytes


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Weights as a pack holds them. matrices: bytes by format, without those of experts, which stand apart; experts: how they lie in host memory;
    panel_launches: of all layers' products whose weights a GPU unpacks panel by panel."""

    name: str
    matrices: Mapping[str, int]
    expert_matrices: Mapping[str, int]
    vectors: int
    experts: ExpertLayers
    panel_launches: float = 0

    def n_expert_slots(self, expert_bytes: int | None) -> int:
        """Places of a layer for experts when the device has so many bytes for them; 0: all experts lie on the device. Raises: UsageError."""
        return self.experts.slots_in(expert_bytes, self.name) if expert_bytes is not None else 0

    def lines(self, n_slots: int = 0, is_host: bool = False) -> tuple[PlanLine, ...]:
        """One line per format of matrices, one for all vectors; with experts in host memory a line for their places on the device, and, where
        that is host memory too, one for them."""
        matrices = dict(self.matrices)
        for name, n in self.expert_matrices.items() if not n_slots else ():
            matrices[name] = matrices.get(name, 0) + n
        x, lines = self.experts, [PlanLine(f"weights {name}", n, "header", "weights") for name, n in sorted(matrices.items(), key=lambda m: -m[1])]
        if n_slots:
            lines.append(PlanLine(f"experts, {n_slots} of {x.most} a layer and {sum(x.staging(n_slots))} shared", x.device_bytes(n_slots), "header", "experts"))
        if n_slots and is_host:
            lines.append(PlanLine("experts in host memory", x.host_bytes, "header", "host experts"))
        return (*lines, PlanLine("norms and biases", self.vectors, "header", "vectors"))


def weight_sizes(blueprint: Blueprint, tensors: Mapping[str, TensorView], kind: str = "cpu") -> WeightSizes:
    """Weights as the pack of that kind ("cpu" or "cuda") holds them."""
    matrices: dict[str, int] = {}
    experts: dict[str, int] = {}
    packed: dict[str, int] = {}
    vectors, panels = 0, 0.0
    for name, view in tensors.items():
        if len(view.shape) == 2 and name.endswith(".weight"):
            rows, cols = view.shape
            if kind == "cuda":
                packed[name] = aligned(cuda.packed_bytes(view.format, rows, cols, view.scales.kind if view.scales else ""))
                if name.startswith("layers.") and ".experts." not in name:
                    panels += cuda.panel_launches(view.format, rows, cols, name.endswith((".gate.weight", ".up.weight")))
            else:
                packed[name] = aligned(packed_bytes(view.format, rows, cols))
            group = experts if MATRIX.fullmatch(name) else matrices
            group[view.format] = group.get(view.format, 0) + packed[name]
        else:
            vectors += aligned(4 * view.n_elements)
    ropes = {layer.attention.rope for layer in blueprint.layers}
    vectors += sum(aligned(4 * (rope.width // 2)) for rope in ropes if rope is not None)
    vectors += sum(aligned(4 * n) for n in set(unit_norms(blueprint).values()))
    return WeightSizes(blueprint.name or blueprint.family, matrices, experts, vectors, expert_layers(packed), panels)


def largest_tensor_bytes(tensors: Mapping[str, TensorView]) -> int:
    """What the loader holds while it repacks the largest tensor: its bytes, and its scales as f32."""
    return max((view.n_bytes + (4 * view.scales.view.n_elements if view.scales else 0) for view in tensors.values()), default=0)


def complete(blueprint: Blueprint, weights: WeightSizes, load_bytes: int, request: PlanRequest) -> MemoryPlan:
    """The plan once the weights are summed: solve.py calls this many times. Raises: UsageError."""
    n_slots = weights.n_expert_slots(request.expert_bytes)
    sizes, device = replace(state_sizes(blueprint, request), n_expert_slots=n_slots), request.device
    sizes = parted(blueprint, sizes, device.kind, device.n_processors, request.share, request.is_invariant)
    layout = page_layout(blueprint, request.kv_format, sizes.page_tokens, sizes.n_window_pages > 0)
    windows = aligned(sizes.n_window_pages * layout.window_page_bytes) + sum(aligned(n) for n in window_arrays(sizes).values())
    pool = -(-sizes.n_pages * layout.page_bytes // device.granule_bytes) * device.granule_bytes
    arrays, pinned, scales = device_arrays(sizes), pinned_arrays(sizes), scale_bytes(blueprint, request.kv_format)
    histories = sum(aligned(arrays.get(name, 0)) for name in ("tokens", "page_table"))
    sampling = sum(aligned(arrays[name]) for name in ("sampling", "bias", "mask"))
    states = aligned(arrays.get("recurrent", 0))
    snapshots = sizes.n_snapshots * sizes.recurrent_bytes
    rest = sum(aligned(n) for n in arrays.values()) - histories - sampling - states
    activations = arena(blueprint, sizes.max_step_tokens, sizes.max_step_rows, device.activation_bytes, request.kv_format)
    logits = 4 * sizes.max_step_rows * (blueprint.vector_width or blueprint.n_vocab)
    is_host = device.kind == "cpu"
    scratch = pack_scratch_bytes(blueprint, sizes.max_step_tokens, sizes.max_step_rows, device.n_processors, sizes.max_ctx_tokens, is_host)
    host_bytes = weights.experts.host_bytes if n_slots and not is_host else 0
    lines = (
        *weights.lines(n_slots, is_host),
        PlanLine(
            f"kv {request.kv_format}, {sizes.n_pages - 1} pages of {sizes.page_tokens} tokens", pool, "planner", "kv"
        ),
        *([PlanLine(f"kv of windows, {sizes.n_window_pages - 1} pages of {sizes.page_tokens} tokens", windows, "planner", "windows")] if windows else []),
        *([PlanLine("scales of keys and values", aligned(scales), "planner", "vectors")] if scales else []),
        *([PlanLine("recurrent states", states, "planner", "state")] if states else []),
        *([PlanLine(f"state snapshots, {sizes.n_snapshots}", snapshots, "planner", "snapshots")] if snapshots else []),
        PlanLine("token histories and page tables", histories, "planner", "state"),
        PlanLine("sampling state and masks", sampling, "planner", "state"),
        PlanLine("step rows", rest, "planner", "state"),
        *([PlanLine("results", sum(aligned(n) for n in pinned.values()), "planner", "pinned")] if is_host else []),
        PlanLine("activations", activations.n_bytes - logits, "planner", "activations"),
        PlanLine("vectors" if blueprint.pooling else "logits", logits, "planner", "activations"),
        PlanLine("kernel scratch", scratch, "planner", "scratch"),
        *_part_lines(blueprint, sizes, request),
        *([] if is_host else [PlanLine("launch graphs", graph_bytes(blueprint, sizes, weights.panel_launches, request.is_invariant), "table", "graphs")]),
        *([PlanLine("tables of experts in host memory", host_bytes // HOST_BYTES_PER_MAPPED_BYTE, "table", "graphs")] if host_bytes else []),
        PlanLine("process" if is_host else "CUDA context", device.process_bytes, device.process_source, "process"),
        *([PlanLine("front and tokenizer", FRONT_BYTES + FRONT_BYTES_PER_TOKEN * blueprint.n_vocab, "table", "front")] if is_host else []),
    )
    attentions = [
        (layer.attention, format)
        for layer, is_windowed, format in zip(blueprint.all_layers, layout.is_windowed, layer_formats(blueprint, request.kv_format), strict=True)
        if layer.attention.kv_from is None and not is_windowed
    ]  # fmt: skip
    token_bytes = sum(
        latent_token_bytes(a.latent.rank, a.latent.rope_width, format)
        if a.latent is not None
        else kv_token_bytes(a.n_kv_heads, a.head_width, a.values_width, format)
        + (stored_bytes(a.index.width, format) if a.index is not None else 0)
        for a, format in attentions
    )
    return MemoryPlan(lines, sizes, request.kv_format, token_bytes, layout.page_bytes, load_bytes if is_host else 0, host_bytes)


def _part_lines(blueprint: Blueprint, sizes: StateSizes, request: PlanRequest) -> tuple[PlanLine, ...]:
    """What the part that reads long prompts takes beside its launch graphs."""
    if not sizes.part_tokens:
        return ()
    device, own, is_host = request.device, part_sizes(sizes), request.device.kind == "cpu"
    arrays, pinned = part_arrays(sizes)
    activations = arena(blueprint, own.max_step_tokens, own.max_step_rows, device.activation_bytes, request.kv_format).n_bytes
    scratch = pack_scratch_bytes(blueprint, own.max_step_tokens, own.max_step_rows, device.n_processors, own.max_ctx_tokens, is_host)
    lines = (("activations", activations), ("scratch", scratch), ("state", sum(map(aligned, arrays.values()))), *([("windows", aligned(part_windows(sizes)))] if sizes.n_window_pages else []), *([("pinned", sum(map(aligned, pinned.values())))] if is_host else []))
    return tuple(PlanLine(f"long prompts aside: {group}", n, "planner", group) for group, n in lines)


def graph_bytes(blueprint: Blueprint, sizes: StateSizes, panel_launches: float = 0, is_invariant: bool = False) -> int:
    """What the driver takes for the launch graphs of a GPU: one of mixed steps for every bucket, one of decode where all rows fit, and one of
    decode with shared prefixes where there are two rows to share. A layer with experts in host memory has a dozen launches more. Steps of many
    tokens unpack weights, panel by panel; with is_invariant they have a launch for every 128 rows of a product instead. Where long prompts are read aside, steps that may run beside have their graphs twice, and
    the part has graphs of its own: of mixed steps, and one of decode, since it has one row."""
    buckets = token_buckets(sizes.max_step_tokens)
    beside = [n for n in buckets if n <= sizes.beside_tokens and sizes.part_tokens]
    of_part = token_buckets(sizes.part_tokens) if sizes.part_tokens else []
    n_graphs = sum(1 + (n <= sizes.n_slots) + (2 <= n <= sizes.n_slots) for n in buckets + beside) + sum(1 + (n == 1) for n in of_part)
    away = len(blueprint.layers) if sizes.n_expert_slots else 0
    launches = sum(n > PANEL_TOKENS for n in buckets + beside + of_part) * panel_launches
    if is_invariant:
        launches = sum((n - 1) // INVARIANT_ROWS for n in buckets) * PRODUCTS_PER_LAYER * len(blueprint.layers)
    panels = int(launches * GRAPH_BYTES_PER_PANEL_LAUNCH)
    streams = sum(layer.has_streams for layer in blueprint.layers) * blueprint.n_streams
    layers = sum(_layer_graph_bytes(layer) for layer in blueprint.layers)
    return n_graphs * (layers + streams * GRAPH_BYTES_PER_STREAM + away * GRAPH_BYTES_PER_LAYER) + panels + (BESIDE_COUNTER_BYTES + PARTS_BYTES if sizes.part_tokens else 0)


def _layer_graph_bytes(layer: Layer) -> int:
    """Of one layer in one launch graph."""
    heads = layer.attention.n_heads if layer.attention.latent is not None else 0
    has_shared = layer.experts is not None and layer.feed_forward.width > 0
    parts = (layer.experts, has_shared or None, layer.delta, layer.attention.index, layer.ngram)
    return GRAPH_BYTES_PER_LAYER + sum(x is not None for x in parts) * GRAPH_BYTES_PER_PART + heads * GRAPH_BYTES_PER_LATENT_HEAD


def with_pages(request: PlanRequest, n_pages: int | None) -> PlanRequest:
    """The same request with another page pool."""
    return replace(request, n_pages=n_pages)
