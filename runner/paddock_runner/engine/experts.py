"""Experts in host memory: allocates their home, their places on the device and what tells which are there; reads the counts back.

Knows no kernels: packs/rare.h says what fetching does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .. import log
from ..errors import UnsupportedError
from ..files.view import TensorView
from ..memory.experts import CACHE_HEAD_WORDS, COUNT_BYTES, MATRIX, ExpertLayer, ExpertLayers, expert_layers
from ..model.weights import Away, source_of
from ..pack.device import Device
from ..pack.fetched import Cold, ExpertCache


@dataclass(frozen=True, slots=True)
class FetchedExperts:
    """Experts of a device: away: where their matrices lie in host memory; caches: of each layer, by the prefix of its experts' names; cold: what is
    known of the host's threads that compute some."""

    away: Away
    caches: Mapping[str, ExpertCache]
    counts: memoryview
    layers: ExpertLayers
    n_slots: int
    cold: Callable[[], Cold]

    def fill_places(self, device: Device) -> None:
        """Copies the first experts of every layer to its places, as if a step had used them: nobody's first request finds them empty. Raises: PackError."""
        for layer in self.layers.layers:
            c = self.caches[layer.prefix]
            numbers = list(range(1, c.n_slots + 1))
            head, slot_of = [1, *[0] * (CACHE_HEAD_WORDS - 1)], numbers + [0] * (c.n_experts - c.n_slots)
            words = array("i", [*head, *slot_of, *[0] * (4 * c.n_experts), *numbers, *[1] * c.n_slots])
            device.copy(c.slots, c.home, (c.n_slots - 1) * c.stride + c.n_bytes)
            device.write(c.cache, words.tobytes())

    def report(self) -> dict[str, float]:
        """Since the start, over all layers: experts that steps found on the device, copied to places of their own, copied to shared ones, and that
        were copied before a layer chose; bytes copied; what share was found; and what the host's threads computed, by what rates."""
        words = self.counts.cast("Q")
        step = COUNT_BYTES // 8
        found, kept, passed, ahead = (sum(words[i * step + k] for i in range(len(self.layers.layers))) for k in (0, 1, 2, 4))
        n_bytes = sum((words[i * step + 1] + words[i * step + 2] + words[i * step + 4]) * layer.n_bytes for i, layer in enumerate(self.layers.layers))
        cold = self.cold()
        wanted = found + kept + passed + cold.n_computed
        return {
            "slots": self.n_slots, "of": self.layers.most, "found_total": found, "kept_total": kept, "passed_total": passed, "ahead_total": ahead,
            "copied_bytes_total": n_bytes, "found_share": round(found / wanted, 4) if wanted else 0.0,
            "computed_total": cold.n_computed, "threads": cold.n_threads, "copy_us": round(cold.copy_us, 1),
            "compute_us": round(cold.expert_us + cold.row_us, 1), "ask_us": round(cold.ask_us, 1),
        }  # fmt: skip


def put_away(device: Device, views: Mapping[str, TensorView], n_slots: int) -> FetchedExperts:
    """Room for all experts in pinned host memory and for n_slots of each layer on the device. Raises: PackError, UnsupportedError."""
    layers = expert_layers({name: device.packed_bytes(source_of(view)) for name, view in views.items() if MATRIX.fullmatch(name)})
    stride, (even, odd) = layers.stride, layers.staging(n_slots)
    n_own = sum(x.slots(n_slots) for x in layers.layers)
    home = device.alloc(layers.host_bytes, "host experts", is_pinned=True)
    room = device.alloc(layers.device_bytes(n_slots), "experts")
    shared, cache = (room + n_own * stride, room + (n_own + even) * stride), room + (n_own + even + odd) * stride
    counts = home + layers.host_bytes - COUNT_BYTES * len(layers.layers)
    view = device.host_view(counts, COUNT_BYTES * len(layers.layers))
    places: dict[str, int] = {}
    caches: dict[str, ExpertCache] = {}
    for i, x in enumerate(layers.layers):
        n = x.slots(n_slots)
        staging = shared[i % 2] if x.n_experts > n else 0
        caches[x.prefix] = ExpertCache(home, room, staging, cache, counts + i * COUNT_BYTES, stride, x.n_bytes, n, x.n_experts - n, x.n_experts)
        places.update(_places(x, home, stride))
        home, room, cache = home + x.n_experts * stride, room + n * stride, cache + x.cache_bytes(n_slots)
    return FetchedExperts(Away(places, stride), caches, view, layers, n_slots, device.cold)


def _places(x: ExpertLayer, home: int, stride: int) -> dict[str, int]:
    """Where every matrix of a layer's experts lies."""
    return {f"{x.prefix}{kind}.{e}.weight": home + e * stride + at for e in range(x.n_experts) for kind, at in x.offsets.items()}


def open_cold(device: Device, cold_experts: str) -> None:
    """Has threads of the host compute what it is worth, where the device's pack can; says so where it cannot. Raises: UnsupportedError when they were asked for."""
    if cold_experts == "copy" or (cold_experts == "auto" and (device.facts.is_host or device.is_invariant)):
        return
    try:
        device.open_cold(cold_experts == "cpu")
    except UnsupportedError as error:
        if cold_experts == "cpu":
            raise
        log.warning("experts.copied", why=str(error))


def tell_cold(cold: Cold) -> None:
    """A line in the log: who computes experts that are missing, and by what rates that was decided."""
    if not cold.n_threads:
        log.event("experts.cold", computed_by="the device", missing="all copied")
        return
    log.event(
        "experts.cold", threads=cold.n_threads, isa=cold.isa, layers=cold.n_layers, copy_us=cold.copy_us, compute_us=cold.expert_us + cold.row_us, ask_us=cold.ask_us,
        of_4_missing=cold.share(4), of_8_missing=cold.share(8),
    )  # fmt: skip
