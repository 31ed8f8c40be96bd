"""Experts in host memory, as a program's records know them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from . import abi
from .tensor import Tensor


@dataclass(frozen=True, slots=True)
class ExpertCache:
    """Where a layer's fetched experts come from and go to: see pk_expert_cache."""

    home: int
    slots: int
    staging: int
    cache: int
    counts: int
    stride: int
    n_bytes: int
    n_slots: int
    n_staging: int
    n_experts: int

    def record(self) -> abi.pk_expert_cache:
        """As the pack takes it."""
        return abi.pk_expert_cache(**asdict(self))


@dataclass(frozen=True, slots=True)
class Cold:
    """Threads of the host that compute experts which the device lacks: see pk_cold. n_threads 0: there are none."""

    n_threads: int
    n_layers: int
    n_computed: int
    copy_us: float
    expert_us: float
    row_us: float
    ask_us: float
    isa: str

    def share(self, n_missing: int) -> int:
        """How many of so many missing experts of one token the host computes."""
        each = self.expert_us + self.row_us
        return min(range(n_missing + 1), key=lambda n: max(self.ask_us + n * each if n else 0.0, (n_missing - n) * self.copy_us))


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is copied for the next layer with experts before it chooses. expected: ids [T,k] that it may choose, best first; n_most of them at most."""

    next: ExpertCache
    expected: Tensor | None = None
    n_most: int = 0
