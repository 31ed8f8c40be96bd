"""What a request wants the answer to be, in any vendor's words, as a guide of its turn; errors name the request's field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import UnsupportedError, UsageError
from ..text import grammar
from ..text.fitting import Fitting
from ..text.grammar import Constraint
from ..text.prelude import guarded, held
from ..text.tools import Schemas, Takes
from ..turns.constrain import Guide
from ..turns.turn import Reading
from ..turns.wish import Wish
from .http import Exchange
from .service import Front

Make = Callable[[], Constraint]


@dataclass(frozen=True, slots=True)
class Held:
    """What an answer must be. content: None when the text is free. calls: tools that may be called then, by name.

    must_call: whether it must be a call. param: the field to blame. is_chat: whether reasoning may come first.
    is_strict: calls that the model begins by itself are held to their schemas too.
    """

    content: Make | None = None
    calls: Schemas = field(default_factory=dict)
    must_call: bool = False
    is_parallel: bool = True
    param: str = "response_format"
    is_chat: bool = True
    is_strict: bool = False

    @property
    def is_free(self) -> bool:
        """Whether there is nothing to hold the answer to."""
        return self.content is None and not self.must_call and not self._is_guarded

    @property
    def _is_guarded(self) -> bool:
        return (
            self.content is None
            and not self.must_call
            and bool(self.calls)
            and (self.is_strict or not self.is_parallel)
        )

    async def reading(self, front: Front, exchange: Exchange, wish: Wish, prompt: str) -> Reading:
        """How the answers to a rendered prompt are read, and what they are held to. Raises: UsageError that names the field."""
        reading = Reading.of(front.served, prompt, self.calls, takes=self._takes(front))
        if self.is_free:
            return reading
        try:
            return replace(reading, guide=await self.guide(front, wish, prompt))
        except UnsupportedError as error:
            if not self._is_guarded:
                raise UsageError(error.message, error.hint, **{"param": self.param, **error.facts}) from error
        exchange.ignored += ["tools.strict"] * self.is_strict + ["parallel_tool_calls"] * (not self.is_parallel)
        return reading

    def _takes(self, front: Front) -> Callable[[], Takes] | None:
        """Which calls without markers are calls: those that may be made, where the rest of the answer is free."""
        if not self.is_free and not self._is_guarded:
            return None
        return lambda: Fitting(front.served.walker.grammars, self.calls if self.is_strict else {}, self.is_parallel)

    async def guide(self, front: Front, wish: Wish, prompt: str, n_prompts: int = 1) -> Guide | None:
        """The guide of a turn. prompt: the rendered prompt. Raises: UsageError that names the field, UnsupportedError."""
        if self.is_free:
            return None
        if wish.ignore_eos or wish.min_tokens:
            if self._is_guarded:
                raise UnsupportedError("calls are not held where the end is", what="strict", supported=[])
            what = "ignore_eos" if wish.ignore_eos else "min_tokens"
            raise UsageError(f"{what} does not go with {self.param}: a whole answer ends where it is whole", param=what)
        served = front.served

        def make() -> Constraint:
            if self._is_guarded:
                return guarded(served.format, served.tokenizer, prompt, self.calls, self.is_parallel)
            content = None if self.must_call or self.content is None else self.content()
            if not self.is_chat and content is not None:
                return content
            return held(served.format, served.tokenizer, prompt, content, self.calls, self.is_parallel)

        try:
            return await served.walker.guide(make, wish.n * n_prompts)
        except UsageError as error:
            raise UsageError(error.message, error.hint, **{"param": self.param, **error.facts}) from error


def of_schema(schema: Any, is_lenient: bool = False) -> Make:
    """JSON of a schema: an object, or JSON text."""

    def make() -> Constraint:
        found = schema
        if isinstance(schema, str):
            try:
                found = grammar.parsed(schema)
            except ValueError as error:
                raise UsageError(f"the JSON schema is no JSON: {error}") from None
        return grammar.json_schema(found, is_lenient)

    return make


def callable_schemas(schemas: Schemas, name: str | None, param: str) -> Mapping[str, Mapping[str, Any]]:
    """The tools that must be called: one of them by its name, or any. Raises: UsageError."""
    if not schemas:
        raise UsageError("a tool call is required, but no tools were sent", param=param)
    if name is None:
        return schemas
    if name not in schemas:
        raise UsageError(f"the tool {name[:100]!r} that must be called is not among the tools", param=param)
    return {name: schemas[name]}
