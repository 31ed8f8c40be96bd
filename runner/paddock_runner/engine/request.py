"""A request as the engine knows it: its states, the legal moves between them, and its numbers."""

from __future__ import annotations

from enum import IntEnum

from ..cache.fetching import Fetch
from ..cache.ledger import Holding
from ..errors import PaddockError
from ..wire.messages import SAMPLING, AskView
from .guess import Guess


class Phase(IntEnum):
    """Where a request stands."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    ENDED = 3


LEGAL = frozenset(
    {
        (Phase.WAITING, Phase.PREFILL),
        (Phase.WAITING, Phase.ENDED),
        (Phase.PREFILL, Phase.DECODE),
        (Phase.PREFILL, Phase.WAITING),
        (Phase.PREFILL, Phase.ENDED),
        (Phase.DECODE, Phase.WAITING),
        (Phase.DECODE, Phase.ENDED),
    }
)
"""Admission, end before start, last chunk launched, preemption, end, preemption, end."""


class IllegalMove(PaddockError):
    """The engine tried to move a request where it cannot go (facts: ask_id, state, wanted)."""

    code = "illegal_move"


NEVER = 1 << 62


class Request:
    """One ask in the engine. Lengths in tokens, times in ns of the monotonic clock. goes_on: the rest of an answer that has begun."""

    __slots__ = (
        "arrival_ns",
        "aside_seq",
        "ask_id",
        "bias",
        "cached_tokens",
        "charged_tokens",
        "client",
        "deadline_ns",
        "done_tokens",
        "draw_index",
        "end_length",
        "entry",
        "fetch",
        "fetch_until_ns",
        "fetch_version",
        "first_ns",
        "first_seq",
        "goes_on",
        "guess",
        "guessed",
        "holding",
        "is_poisoned",
        "is_queued",
        "is_scored",
        "kept",
        "key",
        "last_seq",
        "marks",
        "masks",
        "max_length",
        "n_bias",
        "n_draws",
        "n_late",
        "n_logprobs",
        "n_preempted",
        "n_tokens",
        "needs_history",
        "order",
        "phase",
        "place",
        "port",
        "priority",
        "prompt_tokens",
        "queued_ns",
        "received_ns",
        "run_tokens",
        "salt",
        "sampling",
        "slot",
        "started_ns",
        "stop",
        "sure",
        "tokens",
        "uncached_tokens",
        "use_mask",
        "wait_for",
        "wait_tokens",
        "walk_index",
        "walked",
        "wary_draws",
        "weight",
    )

    def __init__(self, ask: AskView, port: int, arrival_ns: int, max_length: int, sampling: bytes) -> None:
        self.port = port
        self.ask_id = ask.ask_id
        self.client = ask.client
        self.salt = ask.salt
        self.priority = ask.priority
        self.weight = max(1, ask.weight)
        self.deadline_ns = ask.deadline_ns
        self.arrival_ns = arrival_ns
        self.received_ns = ask.received_ns or arrival_ns
        self.prompt_tokens = ask.prompt_tokens
        self.goes_on, self.max_length = bool(ask.goes_on), max_length
        self.sampling = sampling
        self.bias = ask.bias
        self.n_bias = ask.n_bias
        self.tokens = ask.prompt
        """What prefill has to compute: the prompt, after a preemption also the answer so far. int32."""
        self.n_tokens = ask.prompt_tokens
        fields = SAMPLING.unpack(sampling)
        self.n_logprobs: int = fields[12]
        self.use_mask = bool(fields[14])
        self.needs_history = fields[4] != 1.0
        """The repetition penalty looks at the whole prompt, cached or not."""
        self.masks: dict[int, bytes] = {}
        """Masks that have come, by output index."""
        self.sure: dict[int, int] = {}
        """Tokens that its grammar is certain of, by output index."""
        self.run_tokens = 0
        """How many of them its last row ran without drawing them."""
        self.draw_index = self.n_draws = 0
        """Which output token its last row drew first under a mask; how many a row of guesses could draw, 0 where it was none."""
        self.walk_index = -1
        """The output token from which on tokens were guessed that its grammar has not seen come."""
        self.guessed = b""
        """Those tokens, int32."""
        self.walked: dict[int, int | bytes] | None = None
        """What may come behind guessed tokens, by output index: a token that is certain, or a mask. None while the front has not said."""
        self.stop: tuple[int, ...] = fields[16 : 16 + fields[15]]
        self.n_late = self.wary_draws = 0
        """What the next late mask would cost, and how many draws still need their mask before the row runs."""
        self.is_scored = bool(ask.is_scored)
        """The prompt's tokens are rated while it is computed, which has still to be done."""
        self.phase = Phase.WAITING
        self.slot = -1
        self.aside_seq = 0
        """Read aside: the step that the device must have done before."""
        self.first_seq = self.last_seq = NEVER
        """The step that draws its first token in its slot: earlier results of that slot are another's. The last one that has a row of it, once its answer is as long as it may be."""
        self.holding: Holding | None = None
        self.done_tokens = 0
        """Tokens whose prefill has been launched or was cached."""
        self.cached_tokens = 0
        self.uncached_tokens = ask.prompt_tokens
        """Tokens that were not cached when it came."""
        self.charged_tokens = 0
        """Length up to which the client has been charged."""
        self.end_length = -1
        """Tokens in the slot when the device ended it, -1 while it has not."""
        self.is_poisoned = False
        """Its logits held a NaN: what it computed is not kept."""
        self.guess = Guess()
        self.kept: list[tuple[int, int]] = []
        """States of its own that were saved while it decoded: (tokens, place), shortest first."""
        self.marks: list[int] = []
        """Lengths at which its prefill is to stop for a moment, so that the states can be saved, shortest first."""
        self.key = 0.0
        self.is_queued = False
        self.place = self.entry = 0
        """In the queue: where it stands among those that came, and the number of the entry that counts."""
        self.order = 0
        """Number of its (first) admission: larger is newer."""
        self.wait_for: Request | None = None
        self.wait_tokens = 0
        self.fetch: Fetch | None = None
        """Its pages on disk that it waits for, or has waited for."""
        self.fetch_version = 0
        self.fetch_until_ns = 0
        """While it is held: when pages from disk are no longer waited for. -1: they were waited for once."""
        self.n_preempted = 0
        self.queued_ns = self.started_ns = self.first_ns = 0

    @property
    def remaining_tokens(self) -> int:
        """Tokens of prefill not yet launched."""
        remaining: int = self.n_tokens - self.done_tokens
        return remaining

    @property
    def is_coming(self) -> bool:
        """Some of its pages have still to come from host memory."""
        return self.holding is not None and self.holding.arrives >= 0

    @property
    def unscored_tokens(self) -> int:
        """Tokens of the prompt whose successors have still to be rated."""
        return max(0, self.prompt_tokens - 1 - self.done_tokens) if self.is_scored else 0

    def has_mask(self, index: int) -> bool:
        """Output token `index` can be drawn."""
        return index in self.masks or index in self.sure

    def sure_from(self, index: int) -> list[int]:
        """Tokens that its grammar is certain of from output token `index` on."""
        found: list[int] = []
        while (token := self.sure.get(index + len(found))) is not None:
            found.append(token)
        return found

    def place_of(self, index: int) -> int | bytes | None:
        """What may come as output token `index`, a token or a mask, as far as that is known."""
        for known in (self.sure, self.masks, self.walked or {}):
            if (place := known.get(index)) is not None:
                return place
        return None

    def pass_by(self, index: int) -> None:
        """Its row of guesses drew the tokens before output token `index`: what was known of them is forgotten, and what only guesses could have led to."""
        for known in (self.sure, self.masks):
            for at in [at for at in known if at < index]:
                del known[at]
        self.walk_index, self.walked = -1, None

    def move(self, phase: Phase) -> None:
        """Raises: IllegalMove."""
        if (self.phase, phase) not in LEGAL:
            raise IllegalMove(
                f"request {self.ask_id} cannot go from {self.phase.name} to {phase.name}",
                ask_id=self.ask_id,
                state=self.phase.name,
                wanted=phase.name,
            )
        self.phase = phase
