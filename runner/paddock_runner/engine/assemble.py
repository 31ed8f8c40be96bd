"""Builds a ready device: pack, weights, state, arena, program. Allocates what memory/ says, and nothing else.

Knows no requests; the loop drives what comes out of here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from .. import log
from ..blueprint.blueprint import Blueprint
from ..blueprint.kv_scales import Pair
from ..errors import PackError, UnsupportedError
from ..files.view import TensorView
from ..memory.arena import Arena, Buffer, arena, pack_scratch_bytes
from ..memory.part import part_arrays, part_sizes, part_windows
from ..memory.state import (
    StateSizes,
    aligned,
    device_arrays,
    layer_formats,
    layer_state,
    page_layout,
    pinned_arrays,
    state_bytes,
    state_layout,
    token_buckets,
    window_arrays,
)
from ..model.decoder import rotations, trace
from ..model.site import Site
from ..model.weights import NOWHERE, Progress, load_weights
from ..pack import abi
from ..pack.device import Device
from ..pack.fetched import ExpertCache
from ..pack.library import load_pack
from ..pack.program import Pages, Program
from ..pack.tensor import ELEMENT_BYTES, S, T, Tensor
from .experts import FetchedExperts, open_cold, put_away, tell_cold
from .scales import digest, gains, lacking, measure
from .scales import stored as stored_scales

START_TOKENS = 1024
"""Tokens of every slot that have pages from the start on a GPU."""
KV_FORMATS = {"f32": abi.PK_F32, "f16": abi.PK_F16, "bf16": abi.PK_BF16, "fp8": abi.PK_FP8_E4M3}


@dataclass(frozen=True, slots=True)
class Kept:
    """How keys and values are kept. format: as joined_format gives it; stored: where the checkpoint's own scales lie, of FP8."""

    format: str
    stored: Mapping[int, Pair] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assembly:
    """What to build: the pack's file, the sizes, the KV format, the device's number and (CPU) threads."""

    pack: Path
    sizes: StateSizes
    kv_format: str = "bf16"
    ordinal: int = 0
    n_threads: int = 0
    max_isa: int = 0
    is_invariant: bool = False


def build_device(
    assembly: Assembly, blueprint: Blueprint, views: Mapping[str, TensorView], progress: Progress | None = None
) -> Device:
    """A device that can step. Raises: PackError, UnsupportedError, FileError; then nothing is left allocated."""
    device = Device(load_pack(assembly.pack), assembly.ordinal, assembly.n_threads, assembly.max_isa, assembly.is_invariant)
    try:
        fill_device(device, assembly.sizes, Kept(assembly.kv_format), blueprint, views, progress)
    except BaseException:
        device.close()
        raise
    return device


def fill_device(
    device: Device, sizes: StateSizes, kept: Kept, blueprint: Blueprint, views: Mapping[str, TensorView],
    progress: Progress | None = None, stages: log.Stages | None = None, cold_experts: str = "copy",
) -> FetchedExperts | None:  # fmt: skip
    """Makes an open device able to step. Returns what is known of experts in host memory, if there are any.

    cold_experts: as in Config. Raises: PackError, UnsupportedError, FileError; then the device is of no use but to be closed.
    """
    free = device.free_bytes()

    def end(stage: str) -> None:
        nonlocal free
        before, free = free, device.free_bytes()
        if stages is not None:
            stages.end(stage, bytes=max(0, before - free))  # on the CPU others take and give memory, too

    away = put_away(device, views, sizes.n_expert_slots) if sizes.n_expert_slots else None
    weights = load_weights(device, blueprint, views, progress, away.away if away else NOWHERE)
    if away is not None:
        away.fill_places(device)
        open_cold(device, cold_experts)
    end("weights")
    load_program(device, sizes, kept, blueprint, weights, away.caches if away else {}, end)
    if away is not None:
        tell_cold(away.cold())
    return away


def load_program(
    device: Device, sizes: StateSizes, kept: Kept, blueprint: Blueprint, weights: dict[str, Tensor], caches: Mapping[str, ExpertCache],
    end: Callable[[str], None] = lambda stage: None,
) -> None:  # fmt: skip
    """All that is there beside weights. end: is told of every stage that is over. Raises: as fill_device."""
    site = _site(device, sizes, kept.format, blueprint, weights, caches)
    part = _part(device, sizes) if sizes.part_tokens else None
    end("state")
    scratch = _scratch(device, sizes, blueprint)
    if "fp8" in layer_formats(blueprint, kept.format):
        site = _scaled(device, sizes, kept, blueprint, site, scratch)
        end("kv scales")
    _load(device, trace(blueprint, site), sizes.max_step_tokens, scratch)
    # Attaching memory takes a GPU's driver a moment: the first prompts of every slot find it there.
    device.need_pages(1 if device.facts.is_host else min(sizes.n_pages, 1 + sizes.n_slots * START_TOKENS // sizes.page_tokens))
    if part is not None:
        _load_part(device, part, sizes, kept.format, blueprint, site)
    end("program")


def _part(device: Device, sizes: StateSizes) -> Device | None:
    """The part that reads long prompts aside; None where the device or its driver has none, and steps of prompts and of answers take turns.

    A slice of a GPU (MIG, MPS) may have fewer processors than the driver said of all of it, by which the part was planned.
    """
    n, there = sizes.part_processors, device.facts.n_processors
    if n >= there:
        log.event("aside", off=f"{n} processors were to read long prompts aside, {there} are there in all")
        return None
    try:
        return device.part(n)
    except UnsupportedError as error:
        log.event("aside", off=str(error))
        return None


def format_ids(blueprint: Blueprint, kv_format: str) -> tuple[int, ...]:
    """The pk_format of every layer's keys and values."""
    return tuple(KV_FORMATS[name] for name in layer_formats(blueprint, kv_format))


def _site(
    device: Device, sizes: StateSizes, kv_format: str, blueprint: Blueprint, weights: dict[str, Tensor], caches: Mapping[str, ExpertCache]
) -> Site:
    layout = page_layout(blueprint, kv_format, sizes.page_tokens, sizes.n_window_pages > 0)
    device.kv_format = kv_format
    device.reserve_kv(sizes.n_pages, layout.page_bytes)
    device.set_state(_scalars(sizes, layout.page_bytes), device_arrays(sizes), pinned_arrays(sizes))
    device.windows = windows_of(device, sizes, layout.window_page_bytes)
    device.alloc_snapshots(sizes.n_snapshots)
    plan = arena(blueprint, sizes.max_step_tokens, sizes.max_step_rows, ELEMENT_BYTES[device.facts.activation], kv_format)
    buffers = place(device, plan, sizes)
    device.vectors = buffers.get("vectors")
    return Site(
        weights,
        buffers,
        layout.offsets,
        format_ids(blueprint, kv_format),
        rotations(device, blueprint, sizes.max_ctx_tokens),
        state_layout(blueprint).offsets,
        layout.index_offsets,
        state_layout(blueprint).ngram_offsets,
        kept_places(blueprint),
        caches,
        device.windows,
        layout.is_windowed,
    )


def _scaled(device: Device, sizes: StateSizes, kept: Kept, blueprint: Blueprint, site: Site, scratch: tuple[int, int]) -> Site:
    """The same with what keeps FP8 keys and values in its range; says where that comes from."""
    found = stored_scales(kept.stored, blueprint)
    is_stored = not lacking(blueprint, kept.format, found)
    if not is_stored:
        found = {**measure(device, blueprint, site, sizes, scratch), **found}
    device.kv_format = f"{kept.format} {digest(found)}"
    sizes_of = {name: np.concatenate([getattr(s, name) for s in found.values()]) for name in ("k", "v")}
    spans = {name: f"{x.min():g}-{x.max():g}" for name, x in sizes_of.items()}
    log.event("kv", format=kept.format, scales="stored" if is_stored else "measured", **spans)
    return replace(site, gains=gains(device, blueprint, kept.format, found))


def windows_of(device: Device, sizes: StateSizes, page_bytes: int) -> Pages | None:
    """Memory for pages of layers with a window, where they have their own."""
    if not sizes.n_window_pages:
        return None
    arrays = [device.alloc(aligned(n), "windows") for n in window_arrays(sizes).values()]
    return Pages(device.alloc(aligned(sizes.n_window_pages * page_bytes), "windows"), page_bytes, *arrays)


def kept_places(blueprint: Blueprint) -> tuple[tuple[int, int, int] | None, ...]:
    """Where layers keep what takes guesses back, and bytes of their state; () where nobody does."""
    kept = state_layout(blueprint).kept_offsets if blueprint.max_guesses else ()
    return tuple(
        (*at, state_bytes(need)) if at is not None and (need := layer_state(layer)) is not None else None
        for at, layer in zip(kept, blueprint.layers, strict=bool(kept))
    )


def place(device: Device, plan: Arena, sizes: StateSizes) -> dict[str, Tensor]:
    """Allocates the arena and names its buffers."""
    base = device.alloc(plan.n_bytes, "activations")
    found = {}
    for name, buffer in plan.buffers.items():
        found[name] = Tensor(base + buffer.offset, S if buffer.is_sampled else T, buffer.cols, element_format(buffer, device.facts.activation))
    return found


def element_format(buffer: Buffer, activation: int) -> int:
    """The pk_format of a buffer's elements."""
    return abi.PK_I32 if buffer.is_i32 else abi.PK_F32 if buffer.is_f32 else abi.PK_F16 if buffer.is_f16 else activation


def _load_part(device: Device, part: Device, sizes: StateSizes, kv_format: str, blueprint: Blueprint, site: Site) -> None:
    """The same program for the part that reads long prompts, with rows and activations of its own; run once, so that the first prompt finds all in place."""
    own = part_sizes(sizes)
    arrays, pinned = part_arrays(sizes)
    part.set_state(_scalars(own, device.kv_page_bytes), arrays, pinned, device)
    plan = arena(blueprint, own.max_step_tokens, own.max_step_rows, ELEMENT_BYTES[device.facts.activation], kv_format)
    site = replace(site, buffers=place(device, plan, own))
    if site.windows is not None:
        site = replace(site, windows=replace(site.windows, token_page=device.alloc(aligned(part_windows(sizes)), "windows")))
    _load(part, trace(blueprint, site), own.max_step_tokens, _scratch(device, own, blueprint))
    part.run(own.max_step_tokens, 1)


def _scratch(device: Device, sizes: StateSizes, blueprint: Blueprint) -> tuple[int, int]:
    """Address and bytes of the packs' scratch, as planned."""
    n_processors = device.facts.n_processors
    planned = pack_scratch_bytes(
        blueprint, sizes.max_step_tokens, sizes.max_step_rows, n_processors, sizes.max_ctx_tokens, device.facts.is_host
    )
    return device.alloc(planned, "scratch"), planned


def _load(device: Device, program: Program, max_step_tokens: int, scratch: tuple[int, int]) -> None:
    need, planned = device.workspace_bytes(program), scratch[1]
    if need > planned:
        raise PackError(
            f"kernel pack {device.pack.path.name} wants {need} bytes of scratch, the plan has {planned}",
            "report this: the plan's formula is wrong",
        )
    device.load(program, token_buckets(max_step_tokens), scratch)


def _scalars(sizes: StateSizes, page_bytes: int) -> dict[str, int]:
    return {
        "n_slots": sizes.n_slots,
        "max_ctx_tokens": sizes.max_ctx_tokens,
        "page_tokens": sizes.page_tokens,
        "slot_pages": sizes.slot_pages,
        "n_vocab": sizes.n_vocab,
        "max_step_tokens": sizes.max_step_tokens,
        "max_step_rows": sizes.max_step_rows,
        "max_bias": sizes.max_bias,
        "max_top": sizes.max_top,
        "n_results": sizes.n_results,
        "kv_page_stride": page_bytes,
        "recurrent_stride": sizes.recurrent_bytes,
    }
