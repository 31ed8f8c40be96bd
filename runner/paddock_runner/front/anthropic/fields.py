"""The request body of Anthropic's messages API, typed, and what it means as messages in OpenAI's shape (as templates take them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import UsageError
from ...turns.usage import Usage

ROLES = ("user", "assistant", "system")
IGNORED_BLOCKS = frozenset({"redacted_thinking"})


class Block(msgspec.Struct, kw_only=True):
    """A block of content: text, thinking, tool_use, tool_result, or a document of text. cache_control may be anywhere and is only a hint."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    source: dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None
    cache_control: dict[str, Any] | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message."""

    role: str
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True):
    """A tool of the client's (with an input_schema), or one that only Anthropic's servers have."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """auto, any, tool (with its name) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether to think: enabled, disabled or adaptive."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """What messages and count_tokens share."""

    model: str = ""
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(Conversation, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=2147483647)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2147483647)] | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    context_management: dict[str, Any] | None = None


def messages_of(body: Conversation) -> list[Mapping[str, Any]]:
    """The conversation as templates take it. Raises: UsageError naming the block that this model cannot take."""
    out: list[Mapping[str, Any]] = []
    system = _system(body)
    if system:
        out.append({"role": "system", "content": system})
    for i, message in enumerate(body.messages):
        if message.role not in ROLES:
            raise refuse(f"messages.{i}.role", f"the role {message.role[:40]!r} is not one of {', '.join(ROLES)}")
        blocks = [Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        out += _assistant(i, blocks) if message.role == "assistant" else _others(i, message.role, blocks)
    return out


def _system(body: Conversation) -> str:
    if isinstance(body.system, str):
        return body.system
    texts = []
    for i, block in enumerate(body.system or ()):
        if block.type != "text" or block.text is None:
            raise refuse(f"system.{i}", f"a system block of type {block.type[:40]!r} is not supported")
        texts.append(block.text)
    return "\n\n".join(texts)


def _others(i: int, role: str, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """A user's message: tool results first, each a message of its own, then the text."""
    out, texts = [], []
    for j, block in enumerate(blocks):
        if block.type == "tool_result":
            text = _result_text(i, j, block)
            out.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": text})
        else:
            texts.append(_text(i, j, block))
    return [*out, {"role": role, "content": "\n\n".join(texts)}] if texts or not out else [*out]


def _assistant(i: int, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for j, block in enumerate(blocks):
        if block.type == "tool_use":
            if not block.name:
                raise refuse(f"messages.{i}.content.{j}.name", "a tool_use block has no name")
            arguments = block.input if isinstance(block.input, dict) else {}
            calls.append(
                {"id": block.id or "", "type": "function", "function": {"name": block.name, "arguments": arguments}}
            )
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type not in IGNORED_BLOCKS:
            texts.append(_text(i, j, block))
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _text(i: int, j: int, block: Block) -> str:
    where = f"messages.{i}.content.{j}"
    if block.type == "document":
        return _document(where, block)
    if block.type != "text":
        raise refuse(where, f"this model takes text, not a block of type {block.type[:40]!r}")
    if block.text is None:
        raise refuse(f"{where}.text", f"{where} has no text")
    return block.text


def _document(where: str, block: Block) -> str:
    """A document's title, context and text. Raises: UsageError for one that is not text."""
    source = block.source or {}
    kind, text = source.get("type"), source.get("data")
    if kind == "content":
        parts = source.get("content")
        found = [p.get("text") if isinstance(p, dict) else None for p in parts] if isinstance(parts, list) else [parts]
        texts = [part for part in found if isinstance(part, str)]
        text = "\n\n".join(texts) if texts and len(texts) == len(found) else None
    if kind not in ("text", "content") or not isinstance(text, str):
        raise refuse(f"{where}.source", f"this model takes documents of text, not of type {str(kind)[:40]!r}")
    return "\n\n".join(part for part in (block.title, block.context, text) if part)


def _result_text(i: int, j: int, block: Block) -> str:
    if isinstance(block.content, str):
        text = block.content
    else:
        texts = []
        for part in block.content or ():
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = str(part.get("type"))[:40]
                raise refuse(
                    f"messages.{i}.content.{j}.content", f"this model takes text, not a block of type {kind!r}"
                )
            texts.append(part["text"])
        text = "\n".join(texts)
    return f"Error: {text}" if block.is_error else text


def tools_of(body: Conversation) -> list[dict[str, Any]]:
    """The client's tools in OpenAI's shape. Tools that only Anthropic's servers have are left out (and named by `left_out`)."""
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    return [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description or "", "parameters": t.input_schema},
        }
        for t in body.tools or ()
        if t.input_schema is not None
    ]


def left_out(body: Conversation) -> list[str]:
    """The tools that cannot be offered to the model, because they have no schema, as field names."""
    return [f"tools.{i}" for i, t in enumerate(body.tools or ()) if t.input_schema is None]


def usage_json(usage: Usage) -> dict[str, Any]:
    """The usage object: input_tokens is the part that was not cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens, "output_tokens": usage.output_tokens,
    }  # fmt: skip


def refuse(param: str, message: str) -> UsageError:
    """An error about one field; Anthropic's errors have no `param`, so the message names it."""
    return UsageError(f"{param}: {message}", param=param)
