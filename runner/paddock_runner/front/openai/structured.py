"""OpenAI's and vLLM's ways to ask for structured output and for tool calls, as what an answer is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...errors import UsageError
from ...text import grammar
from ...text.tools import Schemas
from .. import misfit
from ..held import Held, Make, callable_schemas, of_schema
from .fields import ChatRequest, Generation, ResponseFormat, Tool, functions_of, refuse

MAX_GRAMMAR_CHARACTERS = 64 << 10
CHOICES = ("none", "auto", "required")


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's field: one of these."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def held_text(body: Generation, response_format: ResponseFormat | None) -> Held:
    """What the fields of a request say of the answer's text. Raises: UsageError when two of them do."""
    make = formatted(response_format, "response_format")
    found = ([] if make is None else [("response_format", make)]) + _guided(body)
    if len(found) > 1:
        raise refuse(found[1][0], f"{found[0][0]} and {found[1][0]} both say what the answer must be: send one")
    if not found:
        return Held(is_chat=False)
    return Held(found[0][1], param=found[0][0], is_chat=False)


def held_chat(body: ChatRequest) -> Held:
    """The same with the tools that may or must be called."""
    text = held_text(body, body.response_format)
    schemas = schemas_of(body.tools or ())
    allowed, must_call = chosen(body.tool_choice, schemas)
    is_parallel = body.parallel_tool_calls is not False
    param = "tool_choice" if must_call else text.param
    is_strict = any(function.strict for function in functions_of(body.tools))
    return Held(text.content, allowed, must_call, is_parallel, param, is_strict=is_strict)


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Parameters of the tools by name."""
    return {function.name: function.parameters or {} for function in functions_of(tools)}


def chosen(choice: str | Mapping[str, Any] | None, schemas: Schemas) -> tuple[Schemas, bool]:
    """The tools that may be called, and whether one must be. Raises: UsageError (param: tool_choice)."""
    if choice is None or isinstance(choice, str):
        if choice not in (None, *CHOICES):
            raise refuse("tool_choice", f"the tool choice {str(choice)[:40]!r} is not one of {', '.join(CHOICES)}")
        if choice == "required":
            return callable_schemas(schemas, None, "tool_choice"), True
        return ({} if choice == "none" else schemas), False
    kind = choice.get("type")
    if kind in ("function", "custom", "tool"):
        inner = choice.get(str(kind))
        name = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
        if not isinstance(name, str):
            raise refuse("tool_choice", "the tool choice names no function")
        return callable_schemas(schemas, name, "tool_choice"), True
    if kind == "allowed_tools":
        return _allowed(choice, schemas)
    raise refuse("tool_choice", f"the tool choice {str(kind)[:40]!r} is not supported")


def _allowed(choice: Mapping[str, Any], schemas: Schemas) -> tuple[Schemas, bool]:
    inner = choice.get("allowed_tools")
    told: Mapping[str, Any] = inner if isinstance(inner, Mapping) else choice
    tools, names = told.get("tools"), []
    for tool in tools if isinstance(tools, list) else ():
        inner = tool.get("function") if isinstance(tool, Mapping) else None
        name = (
            inner.get("name") if isinstance(inner, Mapping) else tool.get("name") if isinstance(tool, Mapping) else None
        )
        if not isinstance(name, str) or name not in schemas:
            raise refuse("tool_choice", f"the allowed tool {str(name)[:100]!r} is not among the tools")
        names.append(name)
    allowed = {name: schemas[name] for name in names}
    must_call = told.get("mode") == "required"
    return (callable_schemas(allowed, None, "tool_choice") if must_call else allowed), must_call


def formatted(wanted: ResponseFormat | None, param: str) -> Make | None:
    """What a response format says of the text; None: nothing. Raises: UsageError naming `param`."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return grammar.json_object
    if wanted.type != "json_schema":
        raise refuse(param, f"{param} {wanted.type[:40]!r} is not one of text, json_object, json_schema")
    told = wanted.json_schema
    if told is None or "schema" not in told:
        raise refuse(param, f"{param} json_schema needs a schema")
    return of_schema(told["schema"], told.get("strict") is False)


def _guided(body: Generation) -> list[tuple[str, Make]]:
    told = body.structured_outputs
    found: list[tuple[str, Make]] = []
    sources = [("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)]
    if told is not None:
        try:
            more = msgspec.convert(told, StructuredOutputs)
        except msgspec.ValidationError as error:
            raise misfit.of(error, told, "structured_outputs") from None
        sources.append(("structured_outputs.", more.json, more.regex, more.choice, more.grammar))
        if more.json_object:
            found.append(("structured_outputs.json_object", grammar.json_object))
    for prefix, schema, pattern, choice, text in sources:
        if schema is not None:
            found.append((prefix + "json", of_schema(schema)))
        if pattern is not None:
            found.append((prefix + "regex", _later(grammar.regex, pattern)))
        if choice is not None:
            found.append((prefix + "choice", _later(grammar.choice, choice)))
        if text is not None:
            found.append((prefix + "grammar", _later(_grammar, text)))
    return found


def _later(make: Any, value: Any) -> Make:
    return lambda: make(value)


def _grammar(text: str) -> grammar.Constraint:
    """Lark, or the GBNF that xgrammar and llama.cpp speak."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise UsageError(f"the grammar has {len(text)} characters, the limit is {MAX_GRAMMAR_CHARACTERS}")
    return grammar.lark(grammar.lark_of(text))
