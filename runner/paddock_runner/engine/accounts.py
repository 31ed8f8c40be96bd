"""The page accounts of an engine, as the plan's sizes want them."""

from __future__ import annotations

from ..cache.ledger import Ledger
from ..cache.pages import PagePool
from ..cache.states import StatePool
from ..cache.windows import WindowPool
from ..memory.state import StateSizes
from .device import StepDevice
from .policy import Policy

GROW_PAGES = 64
"""Pages that get memory at a time."""


def open_ledger(sizes: StateSizes, device: StepDevice, policy: Policy) -> Ledger:
    """A ledger of the device's pages, of snapshots of recurrent states, and of pages of layers with a window, where the model has such."""
    pool = PagePool(sizes.n_pages, min(sizes.n_pages, device.grow_pages(min(sizes.n_pages, 1 + GROW_PAGES))))
    states = StatePool(sizes.n_snapshots) if sizes.n_snapshots else None
    windows = WindowPool(sizes.n_window_pages, sizes.window_tokens, sizes.page_tokens, sizes.window_back) if sizes.n_window_pages else None
    return Ledger(pool, sizes.page_tokens, device.grow_pages, is_shared(sizes, policy), states, windows)


def is_shared(sizes: StateSizes, policy: Policy) -> bool:
    """Whether computed prefixes are kept: pages of a model with recurrent layers are of no use without its states, nor those of one that reads whole prompts."""
    return (sizes.n_snapshots > 0 or not sizes.recurrent_bytes) and not policy.whole_prompts
