"""The request body of OpenAI's Responses API, typed, and its items and tools in the shape that chat templates take."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .fields import Count, Probability, Share, refuse

ROLES = frozenset({"user", "assistant", "system", "developer"})
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})
SEALED = "paddock1:"
SEPARATOR = "__"
_encode = msgspec.json.Encoder().encode


class Reasoning(msgspec.Struct, kw_only=True):
    """How much to think. summary is accepted; the reasoning itself is sent, not a summary of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """What the text must be: format is text, json_object or json_schema (name, schema, strict)."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2147483647)] | None = None
    max_tool_calls: int | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2147483647)] | None = None
    min_p: Share | None = None
    min_tokens: Count | None = None
    seed: int | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """A tool as the client knows it. is_custom: its input is free text, which the model writes as the one argument `input`."""

    name: str
    is_custom: bool = False
    namespace: str | None = None


@dataclass(slots=True)
class Tools:
    """The tools of a request: for the template, for the parser, and what each call becomes. ignored: those that nobody here runs."""

    functions: list[dict[str, Any]]
    schemas: dict[str, Mapping[str, Any]]
    called: dict[str, Called]
    ignored: list[int]


def tools_of(given: Sequence[Mapping[str, Any]]) -> Tools:
    """The tools, flattened. Raises: UsageError for one without a name."""
    tools = Tools([], {}, {}, [])
    for i, tool in enumerate(given):
        if tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            for inner in tool["tools"]:
                if not isinstance(inner, Mapping) or not _add(tools, i, inner, str(tool.get("name") or "")):
                    raise refuse(f"tools[{i}].tools", "a namespace holds tools of type function or custom")
        elif not _add(tools, i, tool, None):
            tools.ignored.append(i)
    return tools


def _add(tools: Tools, i: int, tool: Mapping[str, Any], namespace: str | None) -> bool:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        return False
    name = tool.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        raise refuse(f"tools[{i}].name", "a tool needs a name of 1 to 256 characters")
    text = tool.get("description")
    description = text if isinstance(text, str) else ""
    if kind == "function":
        schema = tool.get("parameters")
        if schema is not None and not isinstance(schema, dict):
            raise refuse(f"tools[{i}].parameters", "parameters is no JSON schema")
        schema = schema or {}
    else:
        description = f"{description}{_format_text(tool.get('format'))}"
        schema = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        }
    known = name if namespace is None else namespace + SEPARATOR + name
    tools.functions.append(
        {"type": "function", "function": {"name": known, "description": description, "parameters": schema}}
    )
    tools.schemas[known] = schema
    tools.called[known] = Called(name, kind == "custom", namespace)
    return True


def _format_text(wanted: object) -> str:
    """A custom tool's grammar, told to the model: it is a description here, not enforced."""
    if isinstance(wanted, Mapping) and wanted.get("type") == "grammar" and isinstance(wanted.get("definition"), str):
        return f"\nThe input must match this {wanted.get('syntax', 'lark')} grammar:\n{wanted['definition']}"
    return ""


def items_of(given: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The input as items."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given)


def messages_of(items: Sequence[Mapping[str, Any]], instructions: str | None) -> list[Mapping[str, Any]]:
    """Items as chat messages: reasoning, text and calls that follow each other are one message of the assistant.

    Raises: UsageError naming the item.
    """
    out: list[dict[str, Any]] = []
    if instructions:
        out.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        kind = item.get("type") or "message"
        if kind == "message":
            _message(out, i, item)
        elif kind in ("function_call", "custom_tool_call"):
            _call(out, i, item, kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            text = output if isinstance(output, str) else _text(f"input[{i}].output", output)
            out.append({"role": "tool", "tool_call_id": _word(item, "call_id"), "content": text})
        elif kind == "reasoning":
            thought = _thought(i, item)
            if thought:
                message = _assistant(out)
                message["reasoning_content"] = "\n\n".join(t for t in (message.get("reasoning_content"), thought) if t)
        else:
            raise refuse(f"input[{i}].type", f"an item of type {str(kind)[:40]!r} is not supported")
    return list(out)


def _message(out: list[dict[str, Any]], i: int, item: Mapping[str, Any]) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"input[{i}].role", f"the role {str(role)[:40]!r} is not one of {', '.join(sorted(ROLES))}")
    text = _text(f"input[{i}].content", item.get("content"))
    if role == "assistant":
        message = _assistant(out)
        if message.get("tool_calls"):
            message = {"role": "assistant", "content": ""}
            out.append(message)
        message["content"] = "\n\n".join(t for t in (message["content"], text) if t)
    else:
        out.append({"role": role, "content": text})


def _call(out: list[dict[str, Any]], i: int, item: Mapping[str, Any], is_custom: bool) -> None:
    name = _word(item, "name")
    if not name:
        raise refuse(f"input[{i}].name", "a call names its tool")
    namespace = _word(item, "namespace")
    arguments = _encode({"input": _word(item, "input")}).decode() if is_custom else _word(item, "arguments") or "{}"
    call = {
        "id": _word(item, "call_id") or _word(item, "id"), "type": "function",
        "function": {"name": namespace + SEPARATOR + name if namespace else name, "arguments": arguments},
    }  # fmt: skip
    _assistant(out).setdefault("tool_calls", []).append(call)


def _assistant(out: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being put together."""
    if not out or out[-1]["role"] != "assistant":
        out.append({"role": "assistant", "content": ""})
    return out[-1]


def _word(item: Mapping[str, Any], name: str) -> str:
    found = item.get(name)
    return found if isinstance(found, str) else ""


def _text(param: str, content: object) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for j, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = (part.get("text") if kind != "refusal" else part.get("refusal")) if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in TEXT_PARTS or not isinstance(text, str):
            raise refuse(
                f"{param}[{j}]" if isinstance(content, list) else param,
                f"this model takes text, not {str(kind)[:40]!r}",
            )
        texts.append(text)
    return "\n".join(texts)


def _thought(i: int, item: Mapping[str, Any]) -> str:
    """The reasoning of an item: its content, else what we sealed in encrypted_content, else its summary."""
    content, sealed = item.get("content"), item.get("encrypted_content")
    if content:
        return _text(f"input[{i}].content", content)
    if isinstance(sealed, str) and sealed.startswith(SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise refuse(f"input[{i}].encrypted_content", "this is not what was sent") from None
    return _text(f"input[{i}].summary", item["summary"]) if item.get("summary") else ""


def sealed(thought: str) -> str:
    """Reasoning as `encrypted_content`: for clients that keep nothing else of it. It is encoded, not secret."""
    return SEALED + base64.b64encode(thought.encode()).decode()
