"""What is served: the model's name, tokenizer, template and limits, and prompts made with them.

Long texts are rendered and tokenized in threads (the tokenizer lets go of the interpreter lock), so that streams go on meanwhile; those
of another order of size in threads of their own, so that nobody's prompt waits for the many seconds that somebody's 20 MB take.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ContextTooLong, UnsupportedError, UsageError
from ..text.answer import AnswerFormat
from ..text.recommended import Recommended
from ..text.template import ChatTemplate
from ..text.tokenizer import Tokenizer, in_parts
from ..text.vectors import VectorForm
from .constrain import Walker
from .steady import steady

INLINE_CHARACTERS = 4096
"""Texts up to this long are handled in the event loop: less work than changing threads."""
LANES = ((256 << 10, 2), (4 << 20, 1), (1 << 62, 1))
"""Texts of fewer characters than this share so many threads."""
SLOW_S = 0.02
"""A template that took longer once is rendered in a thread from then on."""
Result = TypeVar("Result")


@dataclass(slots=True)
class Served:
    """A served model. max_asks: answers of one request that can wait or run. n_rows: rows of its embedding, ids at or above it do not exist. facts: what else /v1/models says. planned: bytes of memory by what they are for.

    is_steady: lines that clients change in each request are left out of prompts (see steady.py).
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    format: AnswerFormat
    max_ctx_tokens: int
    n_rows: int
    max_top: int = 20
    max_bias: int = 512
    max_asks: int = 1 << 31
    is_steady: bool = False
    created_s: int = field(default_factory=lambda: int(time.time()))
    facts: Mapping[str, Any] = field(default_factory=dict)
    planned: Mapping[str, int] = field(default_factory=dict)
    vectors: VectorForm | None = None
    recommended: Recommended = field(default_factory=Recommended)
    walker: Walker = field(init=False)
    _lanes: list[ThreadPoolExecutor] = field(default_factory=lambda: [ThreadPoolExecutor(n, "text") for _, n in LANES])
    _bodies: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "bodies"))
    _is_slow: bool = False

    def __post_init__(self) -> None:
        self.walker = Walker(self.tokenizer, self.n_rows)

    def prepare(self) -> None:
        """Makes the tables of tokens' texts, which the first answers would wait for."""
        for visible in {frozenset[int](), self.format.visible(False), self.format.visible(True)}:
            self.tokenizer.json_texts(visible)

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, how: Mapping[str, Any], size: int = 0
    ) -> tuple[array[int], str]:
        """The ids of a conversation and its text. how: keyword arguments of ChatTemplate.render. size: about so many characters, where that is known.

        Raises: UsageError when the model has no (working) template or refuses the conversation.
        """

        def work() -> tuple[array[int], str]:
            begun = time.monotonic()
            text = self.template.render(steady(messages) if self.is_steady else messages, tools, **how)
            self._is_slow |= time.monotonic() - begun > SLOW_S
            return self.tokenizer.encode(text, add_special=False), text

        size = max(INLINE_CHARACTERS if self._is_slow or tools else 0, size or sum(map(_size, messages)))
        try:
            return await self.run(work, size)
        except UnsupportedError as error:
            raise UsageError(error.message, error.hint, param="messages", **error.facts) from error

    async def text_prompt(self, text: str, add_special: bool = True, parse_special: bool = True) -> array[int]:
        """The ids of a text. Raises: UsageError."""
        return await self.run(lambda: self.tokenizer.encode(text, add_special, parse_special), len(text))

    async def text_prompts(self, texts: Sequence[str], add_special: bool = True) -> list[array[int]]:
        """The ids of several texts, in one go: many short ones are a long one. Raises: UsageError."""
        return await self.run(lambda: [self.tokenizer.encode(text, add_special) for text in texts], sum(map(len, texts)))

    def id_prompt(self, ids: Sequence[int], param: str = "prompt") -> array[int]:
        """Ids that the client made. Raises: UsageError naming an id outside the vocabulary."""
        out = array("i")
        for part in in_parts(ids):
            if not 0 <= min(part) <= max(part) < self.n_rows:
                bad = next(i for i in part if not 0 <= i < self.n_rows)
                raise UsageError(f"token id {bad} does not exist, the model has {self.n_rows}", param=param)
            out.extend(array("i", part))
        return out

    async def id_prompt_of(self, ids: Sequence[int], param: str = "prompt") -> array[int]:
        """The same for any number of ids: of many, in a thread."""
        return await self.run(lambda: self.id_prompt(ids, param), len(ids))

    def require_room(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raises: ContextTooLong with the numbers, when prompt and answer do not fit; UsageError when there is no prompt."""
        if prompt_tokens < 1:
            raise UsageError("the prompt is empty", "send at least one token")
        if prompt_tokens + max(1, max_tokens) > self.max_ctx_tokens:
            raise ContextTooLong(
                f"the prompt has {prompt_tokens} tokens and the answer may have {max_tokens}, the context holds {self.max_ctx_tokens}",
                "shorten the prompt, lower max_tokens, or start the runner with a larger --max-ctx",
                prompt_tokens=prompt_tokens, max_ctx_tokens=self.max_ctx_tokens, max_tokens=max_tokens,
            )  # fmt: skip

    def require_input(self, n_tokens: int, what: str) -> None:
        """Raises: UsageError when an input is empty, ContextTooLong when it has more tokens than the model reads: nothing is cut off."""
        if n_tokens < 1:
            raise UsageError(f"{what} is empty", "send at least one token", param="input")
        if n_tokens > self.max_ctx_tokens:
            raise ContextTooLong(
                f"{what} has {n_tokens} tokens, this model reads at most {self.max_ctx_tokens}", "send it in parts: nothing is cut off here",
                n_tokens=n_tokens, limit=self.max_ctx_tokens, param="input",
            )  # fmt: skip

    def close(self) -> None:
        """Ends the threads."""
        for lane in (*self._lanes, self._bodies):
            lane.shutdown(wait=False, cancel_futures=True)
        self.walker.close()

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """Does work on a text of `size` characters, in a thread when it is long."""
        if size < INLINE_CHARACTERS:
            return work()
        lane = next(i for i, (end, _) in enumerate(LANES) if size < end)
        return await asyncio.get_running_loop().run_in_executor(self._lanes[lane], work)

    async def understand(self, work: Callable[[], Result]) -> Result:
        """Makes out what a large body says: in threads of its own, since texts may take many times as long."""
        return await asyncio.get_running_loop().run_in_executor(self._bodies, work)


def _size(message: Mapping[str, Any]) -> int:
    """Characters of a message: of its content, its thoughts, and its calls' arguments, where they have the usual shape (MCP's have any)."""
    content = message.get("content")
    n = len(content) if isinstance(content, str) else sum(len(p.get("text") or "") for p in content if isinstance(p, Mapping)) if isinstance(content, list) else 0
    thoughts, calls = message.get("reasoning_content"), message.get("tool_calls")
    n += len(thoughts) if isinstance(thoughts, str) else 0
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        n += len(arguments) if isinstance(arguments, str) else INLINE_CHARACTERS * bool(arguments)
    return n
