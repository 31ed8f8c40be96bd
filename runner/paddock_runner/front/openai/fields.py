"""The request bodies of OpenAI's API (with the field's usual extensions), typed, and what they mean as a Wish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import UsageError
from ...turns.usage import Usage
from ...turns.wish import Wish

Probability = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=2147483647)]


class StreamOptions(msgspec.Struct):
    """Whether the last chunk carries the usage; continuous: every chunk does."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What the answer must look like: text, json_object or json_schema."""

    type: str
    json_schema: dict[str, Any] | None = None


class Generation(msgspec.Struct, kw_only=True):
    """The fields that chat and text completions share."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2147483647)] | None = None
    min_p: Share | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    cache_salt: str | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None

    def wish(self, max_tokens: int, n_logprobs: int) -> Wish:
        """These fields in our own words."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Wish(
            n=_or(self.n, 1), max_tokens=max_tokens, min_tokens=_or(self.min_tokens, 0), temperature=self.temperature,
            top_p=self.top_p, top_k=None if self.top_k is None else max(0, self.top_k), min_p=self.min_p,
            typical_p=_or(self.typical_p, 1.0), repetition_penalty=self.repetition_penalty,
            frequency_penalty=_or(self.frequency_penalty, 0.0), presence_penalty=_or(self.presence_penalty, 0.0),
            seed=self.seed, n_logprobs=n_logprobs, stop=stop, stop_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),
            ignore_eos=bool(self.ignore_eos), bias=tuple((self.logit_bias or {}).items()), priority=_or(self.priority, 0),
            n_prompt_logprobs=_or(self.prompt_logprobs, -1), shows_special=self.skip_special_tokens is False, includes_stop=bool(self.include_stop_str_in_output),
        )  # fmt: skip

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a message's content. Only text is understood so far, and what was refused with."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """Its text."""
        return self.refusal if self.type == "refusal" else self.text


class FunctionCall(msgspec.Struct, kw_only=True):
    """What a tool call calls. arguments: JSON text (an object is taken too)."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool call that the model made in an earlier turn."""

    function: FunctionCall
    id: str | None = None
    type: str = msgspec.field(default="function")


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call. parameters: a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool; only functions are understood."""

    type: str
    function: Function | None = None


def functions_of(tools: Sequence[Tool] | None) -> list[Function]:
    """The functions that tools are. Raises: UsageError for a tool that is none."""
    out = []
    for i, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise refuse(f"tools[{i}].type", f"tools of type {tool.type[:40]!r} are not supported; supported: function")
        if tool.function is None:
            raise refuse(f"tools[{i}].function", f"tools[{i}] has no function, which is required")
        out.append(tool.function)
    return out


def tools_of(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Tools as templates take them."""
    return [{"type": t.type, "function": None if t.function is None else msgspec.structs.asdict(t.function)} for t in tools or ()]


class Reasoning(msgspec.Struct, kw_only=True):
    """How much to reason (OpenRouter's field): effort, or a number of tokens."""

    effort: str | None = None
    max_tokens: Count | None = None
    enabled: bool | None = None


class ChatRequest(Generation, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking_token_budget: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    store: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @property
    def effort(self) -> str | None:
        """How hard to reason, under either of its names."""
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning is not None else None)

    @property
    def max_reasoning(self) -> int:
        """Tokens of reasoning, -1: any number."""
        told = self.reasoning.max_tokens if self.reasoning is not None else None
        found: int = _or(self.thinking_token_budget, _or(told, -1))
        return found


class CompletionRequest(Generation, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    add_special_tokens: bool | None = None


def usage_json(usage: Usage) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def refuse(param: str, message: str, hint: str = "") -> UsageError:
    """An error about one field."""
    return UsageError(message, hint, param=param)
