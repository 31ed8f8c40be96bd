"""Token accounting of one turn, in our own words; the vendors' words for it are the front's business."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """Tokens of a turn. A prompt with several answers counts once; cached: its tokens that were not computed again; drafted: guessed ahead, accepted: guessed right."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class Timing:
    """Times of a turn, time.monotonic_ns(); 0: not yet. first_token: when it was written. queued: waiting in the engine."""

    received_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    queued_ns: int = 0

    @property
    def first_token_ms(self) -> float | None:
        """From arrival until the first token was written."""
        return (self.first_token_ns - self.received_ns) / 1e6 if self.first_token_ns else None

    @property
    def prefill_ms(self) -> float | None:
        """What of that was not waiting."""
        return (self.first_token_ns - self.received_ns - self.queued_ns) / 1e6 if self.first_token_ns else None
