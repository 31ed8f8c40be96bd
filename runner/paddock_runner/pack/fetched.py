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
class Ahead:
    """What is copied for the next layer with experts before it chooses. expected: ids [T,k] that it may choose, best first; n_most of them at most."""

    next: ExpertCache
    expected: Tensor | None = None
    n_most: int = 0
