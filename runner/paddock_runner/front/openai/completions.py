"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ...turns.choice import End, Prob, Top
from ...turns.collect import Answer
from ...turns.turn import PLAIN, Reading, Turn
from ..http import Exchange
from ..service import Front, Shape
from ..sse import EventStream
from ..work import Work
from .chunks import FINISH, Head, TextChunks
from .fields import CompletionRequest, refuse, usage_json
from .fill import Fill
from .probs import echoed, prompt_entries, text_logprobs
from .structured import held_text

SHAPE = Shape(CompletionRequest)
SHAPES = {"post_completions": CompletionRequest}
DEFAULT_MAX_TOKENS = 16
"""What OpenAI's API answers when max_tokens is not given."""
MAX_PROMPTS = 256


async def post_completions(front: Front, exchange: Exchange) -> None:
    """POST /v1/completions"""
    body = await SHAPE.read(front, exchange)
    front.require_ready()
    front.require_model(body.model)
    _check(body)
    fill = Fill.of(front.served.tokenizer) if body.suffix else None
    prompts = await _prompts(front, body, fill, await front.understand(exchange, lambda: _inputs(body)))
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    n_logprobs = -1 if body.logprobs is None else body.logprobs
    wish = body.wish(max_tokens, n_logprobs)
    if fill is not None:
        wish.stop_ids = (*wish.stop_ids, *fill.marks)
    n = len(prompts) * wish.n
    head = Head(
        "cmpl-" + secrets.token_hex(12), int(time.time()), front.served.name, n, body.wants_usage, n_logprobs >= 0
    )
    echo = _echoes(front, body, prompts, wish.n)
    if body.echo and body.logprobs is not None:
        wish.n_prompt_logprobs = max(wish.n_prompt_logprobs, n_logprobs)
    if max_tokens == 0 and wish.n_prompt_logprobs < 0:
        choices = [_choice(front, i, Answer(texts=[text]), None) for i, text in enumerate(echo)]
        usage = {
            "prompt_tokens": sum(map(len, prompts)),
            "completion_tokens": 0,
            "total_tokens": sum(map(len, prompts)),
        }
        await exchange.answer_json({**head.fields("text_completion"), "choices": choices, "usage": usage})
        return
    reading = PLAIN
    wants = held_text(body, body.response_format)
    if not wants.is_free:
        reading = Reading(guide=await wants.guide(front, wish, "", len(prompts)))
    work = Work(front, exchange, prompts, wish, reading, body.cache_salt)
    if body.stream:
        stream = EventStream(exchange)
        is_rated = bool(echo) and wish.n_prompt_logprobs >= 0
        chunks = TextChunks(stream, head, front.served.tokenizer, echo, is_rated)
        turn = work.turn(chunks)
        if wish.n_prompt_logprobs >= 0:
            chunks.ratings = _Shown(front, body, turn, echo).ratings
        await work.stream(stream, turn, lambda: chunks.close(turn.usage))
        return
    if max_tokens == 0:
        wish.max_tokens = 1  # the engine draws at least one; it is left out
    turn, answers = await work.collect()
    usage = usage_json(turn.usage)
    if max_tokens == 0:
        answers = [Answer(end=End("length")) for _ in answers]
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    shown = _Shown(front, body, turn, echo)
    choices = [shown.choice(i, a) for i, a in enumerate(answers)]
    await exchange.answer_json({**head.fields("text_completion"), "choices": choices, "usage": usage})


@dataclass(frozen=True, slots=True)
class _Shown:
    """How the answers of a turn are shown. echo: the text of each one's prompt, () when it is not wanted."""

    front: Front
    body: CompletionRequest
    turn: Turn
    echo: Sequence[str]

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One answer with its prompt before it, and the log-probabilities that were asked for."""
        probs: dict[str, Any] | None = None
        if self.body.logprobs is not None:
            before = self._before(index) if self.echo else []
            probs = text_logprobs(self.front.served.tokenizer, [*before, *answer.probs], 0)
        if self.echo:
            answer.texts.insert(0, self.echo[index])
        return {**_choice(self.front, index, answer, probs), **self._rated(index)}

    def ratings(self, prompt: int) -> list[dict[str, Any]]:
        """The fields of the chunks that tell, for each of a prompt's answers, what comes before it."""
        out = []
        for index in range(prompt * self.turn.wish.n, (prompt + 1) * self.turn.wish.n):
            probs = text_logprobs(self.front.served.tokenizer, self._before(index), 0) if self.echo and self.body.logprobs is not None else None
            choice = {"index": index, "text": self.echo[index] if self.echo else "", "logprobs": probs, "finish_reason": None}
            out.append({"choices": [{**choice, **self._rated(index)}]})
        return out

    def _before(self, index: int) -> list[Prob | tuple[int, None, Top]]:
        """The tokens of an answer's prompt, as far as they are in what is echoed."""
        tokenizer, prompt = self.front.served.tokenizer, index // self.turn.wish.n
        ids = self.turn.prompts[prompt]
        has_added = tokenizer.is_special(ids[0]) and not self.echo[index].startswith(tokenizer.decode(ids[:1], False))
        return echoed(ids, self.turn.prompt_probs(prompt), self.body.logprobs or 0, has_added)

    def _rated(self, index: int) -> dict[str, Any]:
        """vLLM's field, where it was asked for."""
        if self.body.prompt_logprobs is None:
            return {}
        prompt = index // self.turn.wish.n
        return {"prompt_logprobs": prompt_entries(self.front.served.tokenizer, self.turn.prompts[prompt], self.turn.prompt_probs(prompt))}


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refuse("best_of", "best_of is supported only where it equals n")
    if body.max_tokens == 0 and (not body.echo or body.stream):
        raise refuse("max_tokens", "max_tokens is 0, at least 1 is needed (0 only with echo, unstreamed)")


def _inputs(body: CompletionRequest) -> Sequence[Any]:
    """The prompts: texts, or lists of ids."""
    given = body.prompt
    if isinstance(given, list) and set(map(type, given)) == {int}:
        given = [cast("list[int]", given)]
    items: Sequence[Any] = given if isinstance(given, list) else [given]
    if any(isinstance(item, int) for item in items):
        raise refuse(
            "prompt", "token ids and texts are mixed: send a text, ids, a list of texts or a list of lists of ids"
        )
    if not 1 <= len(items) <= MAX_PROMPTS:
        raise refuse("prompt", f"{len(items)} prompts were sent, 1 to {MAX_PROMPTS} are possible")
    return items


async def _prompts(front: Front, body: CompletionRequest, fill: Fill | None, items: Sequence[Any]) -> list[array[int]]:
    texts = [item for item in items if isinstance(item, str)] if fill is None else []
    out, made = [], iter(await front.served.text_prompts(texts, body.add_special_tokens is not False))
    for item in items:
        if fill is not None:
            before = item if isinstance(item, str) else await front.served.id_prompt_of(item)
            out.append(await front.served.run(lambda b=before: fill.prompt(b, body.suffix or ""), len(item)))  # type: ignore[misc]
        elif isinstance(item, str):
            out.append(next(made))
        else:
            out.append(await front.served.id_prompt_of(item))
    return out


def _echoes(front: Front, body: CompletionRequest, prompts: Sequence[array[int]], n: int) -> list[str]:
    if not body.echo:
        return []
    given = body.prompt if isinstance(body.prompt, list) and len(body.prompt) == len(prompts) else [body.prompt]
    tokenizer = front.served.tokenizer
    texts = [g if isinstance(g, str) else tokenizer.decode(p, False) for g, p in zip(given, prompts, strict=False)]
    return [text for text in texts for _ in range(n)]


def _choice(front: Front, index: int, answer: Answer, probs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "index": index, "text": answer.text, "logprobs": probs, "finish_reason": FINISH[answer.end.reason],
        "stop_reason": answer.end.stop,
    }  # fmt: skip
