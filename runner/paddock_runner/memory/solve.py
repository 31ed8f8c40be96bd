"""The plan turned round: the largest context at a batch, the largest batch at a context, the pages that fit, what would fit instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..blueprint.blueprint import Blueprint
from ..errors import WontFit
from ..files.view import TensorView
from .kinds import split_format
from .plan import (
    MemoryPlan,
    PlanRequest,
    WeightSizes,
    complete,
    largest_tensor_bytes,
    state_sizes,
    weight_sizes,
    with_pages,
)
from .state import KV_BYTES

MAX_BATCH = 1024
PART_PAGES = 32
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Solver:
    """A model and the bytes there are for it. Weights are summed once."""

    blueprint: Blueprint
    weights: WeightSizes
    load_bytes: int
    free_bytes: int

    def plan(self, request: PlanRequest) -> MemoryPlan:
        """The plan of a request. Raises: UsageError."""
        return complete(self.blueprint, self.weights, self.load_bytes, request)

    def fits(self, request: PlanRequest) -> bool:
        """True when the plan's peak is within the free bytes."""
        return self.plan(request).peak_bytes <= self.free_bytes

    def largest_ctx_tokens(self, request: PlanRequest) -> int:
        """The largest context (whole pages, at most the model's) at which every slot has its full context; 0 when none fits."""
        page, limit = request.page_tokens, self.blueprint.max_ctx_tokens
        best = _largest(
            lambda n: self.fits(replace(request, max_ctx_tokens=min(n * page, limit), n_pages=None)), -(-limit // page)
        )
        return min(best * page, limit)

    def largest_batch(self, request: PlanRequest, limit: int = MAX_BATCH) -> int:
        """The most slots that all have their full context; 0 when not even one fits."""
        return _largest(lambda n: self.fits(replace(request, max_batch=n, n_pages=None)), limit)

    def most_pages(self, request: PlanRequest) -> int:
        """Pages of the largest pool that fits, at most what full contexts of all slots need; 0 when one context does not fit."""
        sizes = state_sizes(self.blueprint, replace(request, n_pages=None))
        full, least = sizes.n_pages, sizes.slot_pages + 1
        extra = _largest(lambda n: self.fits(replace(request, n_pages=least + n - 1)), full - least + 1)
        return least + extra - 1 if extra else 0

    def shrunk(self, request: PlanRequest) -> PlanRequest | None:
        """The request with the largest pool that fits; None when one context does not. Where nobody chose how much of the device reads long prompts aside, no part of it does
        so if its memory would take more than one page in PART_PAGES."""
        pages = self.most_pages(request)
        if request.chose_share:
            return with_pages(request, pages) if pages else None
        alone = replace(request, prefill_share=0.0)
        most = self.most_pages(alone)
        if pages * PART_PAGES < most * (PART_PAGES - 1):
            request, pages = alone, most
        return with_pages(request, pages) if pages else None

    def most_expert_bytes(self, request: PlanRequest) -> int:
        """The largest room for experts on the device (whole hundredths of a GiB) with which it fits, the others in host memory; 0 when none does."""
        experts = self.weights.experts
        if not experts.layers:
            return 0
        least = self.plan(_away(request, experts.device_bytes(1)))
        hundredths = (self.free_bytes - least.peak_bytes + experts.device_bytes(1)) * 100 // GIB
        n_bytes = int(round(hundredths / 100, 2) * GIB)  # as a flag with two digits says it
        return n_bytes if n_bytes >= experts.device_bytes(1) else 0

    def _split(self, request: PlanRequest) -> dict[str, Any]:
        """Experts in host memory, as many on the device as fit: as an alternative, empty when there is none."""
        n_bytes = self.most_expert_bytes(request) if request.expert_bytes is None else 0
        if not n_bytes:
            return {}
        found = self.plan(_away(request, n_bytes))
        if not found.sizes.n_expert_slots:
            return {}
        return {
            "change": "expert_vram_gib", "expert_vram_gib": round(n_bytes / GIB, 2), "n_expert_slots": found.sizes.n_expert_slots, "n_experts": self.weights.experts.most, "host_bytes": found.host_bytes
        }  # fmt: skip

    def alternatives(self, request: PlanRequest) -> list[dict[str, Any]]:
        """Requests that do fit, closest first: a smaller KV format, fewer slots, a shorter context, experts in host memory. Each is itself a solution."""
        found: list[dict[str, Any]] = []
        size = max(KV_BYTES[name] for name in split_format(request.kv_format))
        for name in sorted((k for k, n in KV_BYTES.items() if n < size and k != "f16"), key=lambda k: -KV_BYTES[k]):
            if self.fits(replace(request, kv_format=name, n_pages=None)):
                found.append({"change": "kv_format", "kv_format": name})
        batch = self.largest_batch(request, request.max_batch)
        if batch:
            found.append({"change": "max_batch", "max_batch": batch})
        ctx = self.largest_ctx_tokens(request)
        if ctx:
            found.append({"change": "max_ctx_tokens", "max_ctx_tokens": min(ctx, request.max_ctx_tokens)})
        if split := self._split(request):
            found.append(split)
        if not found:
            ctx = self.largest_ctx_tokens(replace(request, max_batch=1))
            if ctx:
                found.append({"change": "both", "max_batch": 1, "max_ctx_tokens": min(ctx, request.max_ctx_tokens)})
            elif split := self._split(replace(request, max_batch=1)):
                found.append({**split, "max_batch": 1})
        return found


def solver(blueprint: Blueprint, tensors: Mapping[str, TensorView], free_bytes: int, kind: str = "cpu") -> Solver:
    """A solver for these tensors and that many bytes of a device of that kind ("cpu" or "cuda")."""
    return Solver(blueprint, weight_sizes(blueprint, tensors, kind), largest_tensor_bytes(tensors), free_bytes)


def require_fit(answer: Solver, request: PlanRequest) -> MemoryPlan:
    """The plan, when it fits. Raises: WontFit with both numbers, the plan, and alternatives that fit."""
    found = answer.plan(request)
    if found.peak_bytes <= answer.free_bytes:
        return found
    others = answer.alternatives(request)
    need, have = found.peak_bytes / (1 << 30), answer.free_bytes / (1 << 30)
    hint = (
        "; or ".join(_words(other) for other in others)
        if others
        else "the weights alone are too large: choose a smaller quantization"
    )
    raise WontFit(
        f"{answer.blueprint.name or answer.blueprint.family} at a context of {request.max_ctx_tokens} x {request.max_batch} needs {need:.2f} GiB, {have:.2f} GiB are free",
        hint,
        plan=found.as_json(),
        need_bytes=found.peak_bytes,
        free_bytes=answer.free_bytes,
        alternatives=others,
    )


def _away(request: PlanRequest, expert_bytes: int) -> PlanRequest:
    """The request with so many bytes of the device for experts, and with the steps that suit that."""
    return replace(request, expert_bytes=expert_bytes, max_step_tokens=0)


def _words(other: dict[str, Any]) -> str:
    """An alternative as a hint."""
    parts = []
    if "kv_format" in other:
        parts.append(f"KV in {other['kv_format']}")
    if "max_batch" in other:
        parts.append(f"batch {other['max_batch']}")
    if "max_ctx_tokens" in other:
        parts.append(f"context {other['max_ctx_tokens']}")
    if "expert_vram_gib" in other:
        slots, most, host = other["n_expert_slots"], other["n_experts"], other["host_bytes"] / GIB
        parts.append(f"--expert-vram-gib {other['expert_vram_gib']:.2f} ({slots} of {most} experts of a layer on the device, {host:.2f} GiB of host memory)")
    return "it fits with " + " and ".join(parts)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n in 1..limit for which fits(n), 0 when there is none. fits must be monotone."""
    if limit < 1 or not fits(1):
        return 0
    if fits(limit):
        return limit
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
