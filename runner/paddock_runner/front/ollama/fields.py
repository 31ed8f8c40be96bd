"""The request bodies of Ollama's API, typed, and what they mean as messages and a Wish."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...text import grammar
from ...turns.wish import Wish
from .. import misfit
from ..held import Make, of_schema
from ..openai.fields import Tool, refuse
from ..service import plain_field

ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})
Integer = Annotated[int, Meta(ge=-2147483648, le=2147483647)]


class Options(msgspec.Struct, kw_only=True):
    """Sampling. num_predict -1: up to the context."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Integer | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: int | None = None
    num_predict: Integer | None = None
    stop: str | list[str] | None = None

    def wish(self) -> Wish:
        """In our own words; what is not given is as in Ollama."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        seed = self.seed if self.seed is not None and self.seed >= 0 else secrets.randbits(63)
        return Wish(
            max_tokens=max(0, self.num_predict or 0), temperature=_or(self.temperature, 0.8), top_p=_or(self.top_p, 0.9),
            top_k=max(0, _or(self.top_k, 40)), min_p=_or(self.min_p, 0.0), typical_p=_or(self.typical_p, 1.0),
            repetition_penalty=_or(self.repeat_penalty, 1.1), presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0), seed=seed, stop=stop,
        )  # fmt: skip


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


class Generation(msgspec.Struct, kw_only=True):
    """What chat and generate share. think: true, false or an effort. keep_alive has no effect on a runner: the model stays."""

    model: str = ""
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None

    def sampling(self) -> tuple[Options, list[str]]:
        """The options, and the names of those without effect. Raises: UsageError."""
        given = self.options or {}
        try:
            options = msgspec.convert(given, Options)
        except msgspec.ValidationError as error:
            raise misfit.of(error, given, "options") from None
        known = {f.encode_name for f in msgspec.structs.fields(Options)}
        names = [name for name in given if name not in known]
        kept = [] if self.keep_alive is None else ["keep_alive"]
        return options, [*kept, *(f"options.{plain_field(name)}" for name in names)]

    @property
    def n_logprobs(self) -> int:
        """How many of the likeliest tokens are told beside each one, -1: no log-probabilities. Raises: UsageError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs", "top_logprobs needs logprobs to be true")
        return self.top_logprobs or 0 if self.logprobs else -1

    def held(self) -> Make | None:
        """What `format` says of the text: "json" or a schema. Raises: UsageError."""
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return grammar.json_object
        if isinstance(self.format, str):
            raise refuse("format", f"the format {self.format[:40]!r} is neither json nor a schema")
        return of_schema(self.format)


class OllamaFunction(msgspec.Struct, kw_only=True):
    """A call in a message: its arguments are an object here."""

    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaCall(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    function: OllamaFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One message. images: not understood."""

    role: str
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None


class OllamaChat(Generation, kw_only=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] = []
    tools: list[Tool] | None = None


class OllamaGenerate(Generation, kw_only=True):
    """POST /api/generate. raw: the prompt is not put into the template."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    context: list[int] | None = None


class OllamaShow(msgspec.Struct, kw_only=True):
    """POST /api/show."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None


def messages_of(messages: Sequence[OllamaMessage]) -> list[Mapping[str, Any]]:
    """Messages as templates take them. Raises: UsageError naming the message."""
    out: list[Mapping[str, Any]] = []
    n_calls = n_results = 0
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise refuse(
                f"messages[{i}].role", f"the role {message.role[:40]!r} is not one of {', '.join(sorted(ROLES))}"
            )
        if message.images:
            raise refuse(f"messages[{i}].images", "this model takes text, not images")
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            plain["tool_calls"] = []
            for call in message.tool_calls:
                function = {"name": call.function.name, "arguments": call.function.arguments or {}}
                plain["tool_calls"].append({"id": f"call_{n_calls}", "type": "function", "function": function})
                n_calls += 1
        if message.role == "tool":
            plain["tool_call_id"] = f"call_{n_results}"
            n_results += 1
            if message.tool_name:
                plain["name"] = message.tool_name
        out.append(plain)
    return out


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
