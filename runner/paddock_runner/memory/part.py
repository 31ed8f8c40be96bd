"""The part of a device that reads long prompts beside the steps: which models can have one, how large its steps are, and what it takes."""

from __future__ import annotations

from dataclasses import replace

from ..blueprint.blueprint import Blueprint
from .state import StateSizes, device_arrays, pinned_arrays, window_arrays

SHARE = {"cpu": 0.5, "cuda": 0.636}
"""Of a device's processors, where nobody chose."""
PARTED_ARCHS = ("sm_90", "sm_90a")
"""Architectures of GPUs whose kernels were seen to run on parts of one: on others no prompt is read aside unless somebody chooses so."""
MOST_SHARE = 0.9
PART_TOKENS = {"cpu": 128, "cuda": 1664}
"""Tokens of a part's step, or on a GPU at least: enough to keep its processors busy, few enough for a prompt to come back soon. On a GPU more than tall tiles take, which are slower on a part."""
TILE_TOKENS, MOST_TILES = 128, 16
"""Attention of a head takes a GPU's multiprocessor for as long as so many tokens of a step see the prompt; a part's step has no more of those."""
BESIDE_TOKENS = {"cpu": 0, "cuda": 512}
"""Tokens of a step that runs beside a part's, at most: a larger one waits for the part's steps on a GPU, which may be three. 0: as many as of any."""
AHEAD = 3
"""So many steps of a part may be on their way, or have pages of windows."""
OWN = (
    "row_slot", "row_start", "row_position", "row_flags", "token_id", "token_position", "token_row", "token_page",
    "sample_row", "sample_at", "sample_token", "sample_flags", "sample_logprob",
)  # fmt: skip
"""Arrays of the state that a step lays out: a part has its own, all others belong to slots."""


def can_part(blueprint: Blueprint, sizes: StateSizes, kind: str, is_invariant: bool) -> bool:
    """Whether prompts can be read aside: somebody may decode meanwhile, what a chunk leaves belongs to its slot, and no number may depend on how many processors compute it.
    On a GPU: models of attention without windows and of dense feed-forward, whose kernels were seen to run on a part of one."""
    is_plain = blueprint.pooling is None and blueprint.draft is None and not blueprint.needs_whole_prompts
    if kind == "cuda":
        is_plain = is_plain and not sizes.n_window_pages and all(x.kind == "attention" and x.attention.is_plain and x.experts is None and x.ngram is None and not x.has_streams for x in blueprint.layers)
    return is_plain and sizes.n_slots > 1 and not sizes.n_expert_slots and not is_invariant


def part_tokens(blueprint: Blueprint, kind: str, n: int) -> int:
    """Tokens of a step of n processors: on a GPU, where all of them take tiles of attention in turn, more of them if fewer are without one in the last turn."""
    least, n_heads = PART_TOKENS[kind], max((x.attention.n_heads for x in blueprint.layers if x.kind == "attention"), default=0)
    if kind == "cpu" or not n_heads:
        return least
    return min(range(least, MOST_TILES * TILE_TOKENS + 1, TILE_TOKENS), key=lambda tokens: -(-(n_heads * tokens // TILE_TOKENS) // n) / tokens)


def parted(blueprint: Blueprint, sizes: StateSizes, kind: str, n_processors: int, share: float, is_invariant: bool) -> StateSizes:
    """The sizes with a part, where one can be had. share: of the processors."""
    n = min(n_processors - 1, round(share * n_processors))
    if n < 1 or not can_part(blueprint, sizes, kind, is_invariant):
        return sizes
    tokens = min(part_tokens(blueprint, kind, n), sizes.max_step_tokens)
    windows = sizes.n_window_pages + AHEAD * -(-tokens // sizes.page_tokens) if sizes.n_window_pages else 0
    return replace(sizes, part_processors=n, part_tokens=tokens, beside_tokens=BESIDE_TOKENS[kind], n_window_pages=windows)


def part_sizes(sizes: StateSizes) -> StateSizes:
    """Those of the part's own steps: one row that draws nothing."""
    return replace(sizes, max_step_tokens=sizes.part_tokens, max_step_rows=1, n_results=2)


def part_windows(sizes: StateSizes) -> int:
    """Bytes of its own array of the pages of layers with a window; 0: they have none of their own."""
    return window_arrays(part_sizes(sizes)).get("token_page", 0)


def part_arrays(sizes: StateSizes) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of its own arrays in device and pinned memory, by field name."""
    own = part_sizes(sizes)
    arrays = device_arrays(own)
    return {name: arrays[name] for name in OWN}, pinned_arrays(own)
