"""The scheduler's constants, each with its unit and reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

CUTS_CONTEXTS = ("cuda:sm_90",)
"""Architectures whose attention of few tokens behind a long context is cut along it, and takes time in proportion to them ..."""
WHOLE_CONTEXTS_TOKENS = 384
"""... and how many such tokens it takes elsewhere before fewer would take no less: they do not fill the device."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the scheduler weighs. Defaults suit one device that serves chats and agents."""

    max_queue: int = 1024
    """Requests that may wait. When it is full, the client with the most waiting ones loses."""
    steady_ratio: float = 1.2
    """A step with prefill may last this many times a step without, as long as prefill lasts: gaps stay below 1.25 times."""
    burst_ratio: float = 3.0
    """The same while burst credit is left, or when two prompts or more are to be read, of a step without as such were measured last: a queue must drain faster than it fills."""
    packed_ratio: float = 3.2
    """The same for short prompts (packed_tokens in the mean): with an 8B's shape and 128 streams that is room for five of 128 tokens, which take 6 % less each than four (LOG S42)."""
    packed_tokens: int = 256
    blind_burst_ratio: float = 4.0
    """The same where contexts of decode rows have no price of their own: such steps were measured with others, and perhaps shorter ones."""
    burst_step_ms: float = 12.0
    """Such a step may last this long in any case: on a quick device a multiple of very little starves prompts, and nobody sees 80 Hz."""
    burst_ms: float = 250.0
    """Burst credit: prefill time beyond the steady ratio that decoding streams put up with at once; refills as they decode.

    It is for prompts that fit into it: a long one would only spend it, and be hardly quicker.
    """
    lead_ms: float = 1.0
    """A step is launched that long before the one before it is expected to end, while someone may still come; 0: at once."""
    gather_ms: float = 12.0
    """Prompts that come together wait that long at most for more of them, on devices with run-ahead, ..."""
    quiet_ms: float = 1.2
    """... and no longer than this after the last that came."""
    long_gaps: float = 64.0
    """Gaps between tokens of streams that may be long (without limit), to begin with: prompts that come together are then read at once. Where nobody decodes, they are anyway.

    A light client's prompt may take as many more, which later gaps pay for before a burst gets any."""
    long_gap_share: float = 0.009
    """One part of a stream's gaps may be long: below one in a hundred."""
    split_tokens: int = 2304
    """What waits of a burst that has begun is read at once when it has fewer: a part more would cost the rest as much as it gives."""
    tile_tokens: int = 128
    """On devices with run-ahead: matrix products come in tiles of so many tokens."""
    deep_tokens: int = 8192
    """There, attention over a context of so many tokens takes most of the time, ..."""
    deep_chunk_tokens: int = 32
    """... and comes in tiles of so many (of four heads each): a chunk is a multiple of that. What products of a tile that is not full lose is less than what a step loses that ends early."""
    long_delay: float = 1.4
    """There, a prompt for which the steady pace leaves no time gets chunks so large that it takes this many times as long as alone, ..."""
    rest_steps: float = 1.03
    """... and so many steps of decode rows alone follow each: what prefill takes is lost to the streams sooner or later, but most of their gaps stay as they were."""
    min_chunk_tokens: int = 16
    """Prefill goes on with at least this many tokens a step: smaller chunks waste the matrix kernels."""
    share_tokens: int = 64
    """A request waits for another that computes at least this many tokens of its own prefix."""
    state_every_tokens: int = 8192
    """A long prefill saves its recurrent states at least every so many tokens."""
    ageing_tokens_per_ms: float = 8.0
    """A request that has waited a millisecond longer may be this much longer and still go first (within one client)."""
    head_start_tokens: int = 8192
    """A client that comes (back) is served so many tokens before those who were there have their turn again."""
    priority_tokens: int = 100_000
    """How many tokens of head start one level of priority gives."""
    oldest_every: int = 16
    """Every so many admissions the oldest waiting request goes first, whatever its client has had: nobody starves."""
    whole_prompts: bool = False
    """A prompt runs in one step or waits for the next, and shares nothing: models whose tokens see later ones, or whose vectors are means."""
    draft_tokens: tuple[int, ...] = (2, 4, 8, 16)
    """How many tokens may be guessed at a time."""
    draft_rows: int = 16
    """Nobody is guessed for while more requests than this decode: a step is full anyway."""
    draft_gain: float = 1.1
    """Guessing begins when it is expected to be worth so many times a step without."""
    draft_head: bool = False
    """The model guesses one token by a layer of its own (MTP) in every step; what came before is not looked up."""
    head_rate: float = 0.7
    """What is believed of such guesses before any was made, and again every so often."""
    draft_gap_us: float = 100.0
    """What it costs a step of a device with run-ahead that the next one cannot be enqueued before it has been read."""
    idle_release_s: float = 300.0
    """After so long without a request, memory of the page pool that holds nothing goes back to the device; 0: never."""
    device_timeout_s: float = 120.0
    """A step that takes longer has hung."""

    def on(self, arch: str) -> Policy:
        """The same on a device of this architecture."""
        return self if arch.startswith(CUTS_CONTEXTS) else replace(self, deep_chunk_tokens=WHOLE_CONTEXTS_TOKENS)
