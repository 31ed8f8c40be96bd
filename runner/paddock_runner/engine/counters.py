"""What the engine has done so far, as plain counters."""

from __future__ import annotations

from ..wire.messages import Reason, RefusedCode


class Counters:
    """Totals since the start. Tokens are of all requests together that were begun; those that were refused have none."""

    __slots__ = (
        "cached_tokens",
        "ended",
        "late_masks",
        "output_tokens",
        "preempted",
        "prefill_tokens",
        "prompt_tokens",
        "refused",
        "requests",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.prefill_tokens = 0
        self.output_tokens = 0
        self.preempted = 0
        self.late_masks = 0
        self.ended = dict.fromkeys(Reason, 0)
        self.refused = dict.fromkeys(RefusedCode, 0)

    def begun(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request has got its first slot."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    @property
    def n_ended(self) -> int:
        """Requests that were taken and have ended."""
        return sum(self.ended.values())
