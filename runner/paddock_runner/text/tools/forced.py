"""Grammars that force calls of tools in a model's own dialect, arguments held to the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ...errors import UnsupportedError
from ..grammar import Constraint, check_schema, own_lark
from ..reasoning import ReasoningMarks
from ..tokenizer import Tokenizer
from .dialect import Dialect, Schemas
from .written import json_rule

_NAME, _ARGUMENTS, _KEY, _VALUE = "get_weather", '{"city": "Paris"}', "city", "Paris"


def forced_calls(
    dialect: Dialect,
    schemas: Schemas,
    tokenizer: Tokenizer,
    open_reasoning: ReasoningMarks | None = None,
    is_parallel: bool = True,
) -> Constraint:
    """One call (or, is_parallel, several) of these tools and nothing else, except reasoning that the prompt left open.

    Raises: UnsupportedError for a dialect whose calls are no JSON and no marked-up parameters; UsageError for a bad schema.
    """
    for schema in schemas.values():
        check_schema(schema)
    if dialect.force is not None:
        spell = partial(_text, dialect=dialect, tokenizer=tokenizer)
        rules = [rule for i, (name, schema) in enumerate(schemas.items()) for rule in dialect.force(i, name, schema, spell)]
    elif _ARGUMENTS in dialect.example:
        before, after = dialect.example.split(_ARGUMENTS)
        rules = [f"call_{i}: {_text(before.replace(_NAME, name), dialect, tokenizer)} arguments_{i} "
                 f"{_text(after, dialect, tokenizer)}\narguments_{i}: {json_rule({'type': 'object', **schema})}"
                 for i, (name, schema) in enumerate(schemas.items())]  # fmt: skip
    elif dialect.parameter is not None or (dialect.example.count(_KEY) == 1 and not any(c in dialect.example for c in "({")):
        rules = [_marked_up(i, name, schema, dialect, tokenizer) for i, (name, schema) in enumerate(schemas.items())]
    else:
        raise UnsupportedError(
            f"calls in the dialect '{dialect.name}' cannot be forced", what="tool_choice", supported=[]
        )
    calls = " | ".join(f"call_{i}" for i in range(len(schemas)))
    several = "+" if is_parallel and "" not in dialect.starts else ""
    start = f"start: {_reasoning(open_reasoning, tokenizer)}({calls}){several}"
    return own_lark("\n".join([start, *_reasoning_rules(open_reasoning, tokenizer), *rules]))


def _marked_up(number: int, name: str, schema: Mapping[str, Any], dialect: Dialect, tokenizer: Tokenizer) -> str:
    """A call whose parameters stand one by one: the required ones, the others if wanted, in the schema's order."""
    head, opening, close, tail = _parts(dialect)
    required = schema.get("required") or []
    properties = schema.get("properties") or {}
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    names, rules = [], []
    for i, (key, kind) in enumerate(properties.items()):
        rule = f"call_{number}_{i}"
        names.append(rule + ("" if key in required else "?"))
        spelled = opening.replace(
            f'"{_KEY}" string="true"', f'"{_KEY}" string="{"true" if _is_text(kind) else "false"}"'
        )
        spelled = spelled.replace(_KEY, key)
        closing = close.replace(_KEY, key)
        ends = _text(closing, dialect, tokenizer)
        if _is_text(kind) and ends.startswith("<["):
            rules.append(f"{rule}: {_text(spelled, dialect, tokenizer)} {rule}_text {ends}\n{rule}_text: /(?s:.*)/")
        elif _is_text(kind):
            rules.append(
                f"{rule}: {_text(spelled, dialect, tokenizer)} {rule}_text\n{rule}_text[suffix={_quoted(closing)}]: /(?s:.*)/"
            )
        else:
            rules.append(f"{rule}: {_text(spelled, dialect, tokenizer)} {rule}_value {ends}\n{rule}_value: {json_rule({**definitions, **kind})}")
    body = " ".join([_text(head.replace(_NAME, name), dialect, tokenizer), *names, _text(tail, dialect, tokenizer)])
    return "\n".join([f"call_{number}: {body}", *rules])


def _parts(dialect: Dialect) -> tuple[str, str, str, str]:
    """The example before its one parameter, what stands before and after the value, and the rest."""
    lines = dialect.example
    value = lines.index(_VALUE)
    if dialect.parameter is not None:
        opening, close = dialect.parameter
        return lines[: value - len(opening)], opening, close, lines[value + len(_VALUE) + len(close) :]
    opener = lines.rindex("<" if "<" in lines else "", 0, lines.index(_KEY))
    follow = _parameter_end(lines, value)
    return lines[:opener], lines[opener:value], lines[value + len(_VALUE) : follow], lines[follow:]


def _parameter_end(example: str, value: int) -> int:
    """Where the example's one parameter ends: after the closing mark that follows its value, and a newline."""
    end = example.index(">", value) + 1
    return end + example.startswith("\n", end)


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string" and "enum" not in schema


def _text(text: str, dialect: Dialect, tokenizer: Tokenizer) -> str:
    """Literal text in Lark; special tokens in it by their ids."""
    marks = sorted(
        {m for m in (*dialect.starts, *dialect.hidden) if m and _special(m, tokenizer) is not None},
        key=len,
        reverse=True,
    )
    return " ".join(_literals(text, marks, tokenizer)) or '""'


def _literals(text: str, marks: list[str], tokenizer: Tokenizer) -> Iterable[str]:
    while text:
        found = min(((text.find(m), -len(m), m) for m in marks if m in text), default=None)
        at = found[0] if found is not None else len(text)
        if at:
            yield _quoted(text[:at])
        if found is None:
            return
        yield f"<[{_special(found[2], tokenizer)}]>"
        text = text[at + len(found[2]) :]


def _special(mark: str, tokenizer: Tokenizer) -> int | None:
    token_id = tokenizer.id_of(mark)
    return token_id if token_id is not None and tokenizer.is_special(token_id) else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _reasoning(marks: ReasoningMarks | None, tokenizer: Tokenizer) -> str:
    if marks is None:
        return ""
    end = _special(marks.end, tokenizer)
    return "reasoning /\\n{0,2}/ " if end is None else f"reasoning <[{end}]> /\\n{{0,2}}/ "


def _reasoning_rules(marks: ReasoningMarks | None, tokenizer: Tokenizer) -> list[str]:
    if marks is None:
        return []
    if _special(marks.end, tokenizer) is not None:
        return ["reasoning: /(?s:.*)/"]
    return [f"reasoning[suffix={_quoted(marks.end)}]: /(?s:.*)/"]
