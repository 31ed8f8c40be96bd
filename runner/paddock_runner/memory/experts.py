"""Experts in host memory: how an expert's matrices lie together, how many of a layer have a place on the device, and what that takes.

Pure arithmetic; the plan and the loader use the same functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UsageError
from .state import aligned

MATRIX = re.compile(r"(.*\.experts\.)(gate|up|down)\.(\d+)\.weight")
CACHE_HEAD_WORDS, COUNT_BYTES = 16, 256
"""PK_CACHE_HEAD of packs/rare.h (a test compares); of a layer's counts."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One layer's experts. prefix: of their names. offsets: where an expert's gate, up and down begin in its n_bytes."""

    prefix: str
    n_experts: int
    offsets: Mapping[str, int]
    n_bytes: int

    def slots(self, n_slots: int) -> int:
        """Places of this layer where every layer has up to n_slots."""
        return min(n_slots, self.n_experts)

    def cache_bytes(self, n_slots: int) -> int:
        """Of what tells where the experts are."""
        return aligned(4 * (CACHE_HEAD_WORDS + 5 * self.n_experts + 2 * self.slots(n_slots)))


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """All layers with experts. A place of the device takes any of them."""

    layers: tuple[ExpertLayer, ...]

    @property
    def stride(self) -> int:
        """Bytes from one expert to the next, in host memory and on the device."""
        return max((layer.n_bytes for layer in self.layers), default=0)

    @property
    def most(self) -> int:
        """Experts of the layer that has most."""
        return max((layer.n_experts for layer in self.layers), default=0)

    @property
    def host_bytes(self) -> int:
        """Of all experts in host memory, and of the counts."""
        return sum(layer.n_experts for layer in self.layers) * self.stride + COUNT_BYTES * len(self.layers)

    def staging(self, n_slots: int) -> tuple[int, int]:
        """Places that layers share, for the experts of a step that find no place in a layer's own: those of every other layer, and of those
        between, so that one layer's can be filled while another's are in use."""
        even, odd = ([layer.n_experts - layer.slots(n_slots) for layer in self.layers[first::2]] for first in (0, 1))
        return max(even, default=0), max(odd, default=0)

    def device_bytes(self, n_slots: int) -> int:
        """Of the places, the layers' own and the shared ones, and of what tells where the experts are."""
        own = sum(layer.slots(n_slots) for layer in self.layers)
        return (own + sum(self.staging(n_slots))) * self.stride + sum(layer.cache_bytes(n_slots) for layer in self.layers)

    def slots_in(self, n_bytes: int, name: str = "this model") -> int:
        """Places of a layer that so many bytes allow; 0 when all experts find a place, so that none need be in host memory.

        Raises: UsageError when the model has no experts, or the bytes do not hold one expert of each layer and the shared places.
        """
        if not self.layers:
            raise UsageError(f"{n_bytes / (1 << 30):.2f} GiB of device memory were asked for experts, {name} has none", "leave --expert-vram-gib out")
        low, high = 0, self.most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.device_bytes(middle) <= n_bytes else (low, middle - 1)
        if not low:
            gib = (1 << 30) / 1.0
            raise UsageError(
                f"{n_bytes / gib:.2f} GiB of device memory were asked for experts, {name} needs {self.device_bytes(1) / gib:.2f} GiB at the least",
                f"--expert-vram-gib {-(-self.device_bytes(1) * 100 // (1 << 30)) / 100:.2f}, or a smaller quantization",
            )
        return 0 if low >= self.most else low


def expert_layers(sizes: Mapping[str, int]) -> ExpertLayers:
    """The layers among matrices of these packed sizes, by their names; experts of a layer are equal."""
    found: dict[str, dict[str, int]] = {}
    counts: dict[str, int] = {}
    for name, n_bytes in sizes.items():
        if match := MATRIX.fullmatch(name):
            prefix, kind = match[1], match[2]
            kinds = found.setdefault(prefix, {})
            kinds[kind] = max(kinds.get(kind, 0), aligned(n_bytes))
            counts[prefix] = max(counts.get(prefix, 0), int(match[3]) + 1)
    layers = []
    for prefix, kinds in sorted(found.items(), key=lambda item: re.sub(r"\d+", lambda n: n[0].zfill(6), item[0])):
        offsets, at = {}, 0
        for kind in ("gate", "up", "down"):
            if kind in kinds:
                offsets[kind] = at
                at += kinds[kind]
        layers.append(ExpertLayer(prefix, counts[prefix], offsets, at))
    return ExpertLayers(tuple(layers))
