"""What a caller wants of a turn, in our own words, checked: sampling, limits, stops. No vendor's names here."""

from __future__ import annotations

import math
import secrets
from array import array
from dataclasses import dataclass

from ..errors import UsageError
from ..wire.messages import MAX_STOP, Ask
from .served import Served

MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What authors recommend."""


@dataclass(slots=True)
class Wish:
    """Sampling parameters and limits of one turn. max_tokens 0: up to the context. seed None: a random one for each choice.

    n_logprobs: -1 none, 0 the chosen token's, k the best k too. bias: (token id, value) pairs. max_reasoning: tokens of reasoning after
    which it is ended, -1: any number. n_prompt_logprobs: as n_logprobs, of the prompt's tokens (but the first). What is None until it is checked
    becomes what the model's authors recommend.
    """

    n: int = 1
    max_tokens: int = 0
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float = 1.0
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    n_logprobs: int = -1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bias: tuple[tuple[int, float], ...] = ()
    priority: int = 0
    max_reasoning: int = -1
    n_prompt_logprobs: int = -1
    shows_special: bool = False
    includes_stop: bool = False

    def check(self, served: Served) -> None:
        """Fills in what is recommended. Raises: UsageError (facts: param) for what this model or this engine cannot do."""
        for name in RECOMMENDED:
            if getattr(self, name) is None:
                setattr(self, name, getattr(served.recommended, name))
        if not 1 <= self.n <= MAX_CHOICES:
            raise _wrong("n", f"n is {self.n}, 1 to {MAX_CHOICES} are possible")
        for what, n in (("top_logprobs", self.n_logprobs), ("prompt_logprobs", self.n_prompt_logprobs)):
            if n > served.max_top:
                raise _wrong(what, f"{n} log-probabilities per token were asked for, the limit is {served.max_top}")
        if len(self.bias) > served.max_bias:
            raise _wrong("logit_bias", f"logit_bias has {len(self.bias)} entries, the limit is {served.max_bias}")
        for token, value in self.bias:
            if not 0 <= token < served.n_rows:
                raise _wrong("logit_bias", f"logit_bias names token {token}, the model has {served.n_rows}")
            if not -100 <= value <= 100:
                raise _wrong("logit_bias", f"the bias of token {token} is {value:g}, -100 to 100 are possible")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _wrong("stop", f"{len(self.stop)} stop strings were given, the limit is {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not text or len(text) > MAX_STOP_CHARACTERS:
                raise _wrong(
                    "stop", f"a stop string has {len(text)} characters, 1 to {MAX_STOP_CHARACTERS} are possible"
                )
        ends = () if self.ignore_eos else served.tokenizer.stop_ids
        if len({*self.stop_ids, *ends}) > MAX_STOP:
            raise _wrong(
                "stop_token_ids",
                f"{len(self.stop_ids)} stop tokens and the model's own {len(ends)} are more than {MAX_STOP}",
            )
        bad = next((i for i in self.stop_ids if not 0 <= i < served.n_rows), None)
        if bad is not None:
            raise _wrong("stop_token_ids", f"stop token {bad} does not exist, the model has {served.n_rows}")
        if self.max_tokens and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        floats = [getattr(self, name) for name in (*RECOMMENDED, "typical_p", "frequency_penalty", "presence_penalty")]
        if not all(map(math.isfinite, floats)):
            raise _wrong("temperature", "a sampling parameter is not a finite number")

    def ask(self, ask_id: int, prompt: array[int], number: int, end: tuple[int, ...]) -> Ask:
        """The ask of choice `number` (0 is the first)."""
        seed = secrets.randbits(63) if self.seed is None else self.seed + number
        is_scored = self.n_prompt_logprobs >= 0 and number == 0
        n_logprobs = max(self.n_logprobs, self.n_prompt_logprobs) if is_scored else self.n_logprobs
        return Ask(
            ask_id, memoryview(prompt), priority=self.priority, max_tokens=self.max_tokens, min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos, typical_p=self.typical_p, frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty, **{name: getattr(self, name) for name in RECOMMENDED}, seed=seed, n_logprobs=n_logprobs, is_scored=is_scored,
            stop=self.stop_ids, end=end, bias=self.bias,
        )  # fmt: skip


def _wrong(param: str, message: str) -> UsageError:
    return UsageError(message, param=param)
