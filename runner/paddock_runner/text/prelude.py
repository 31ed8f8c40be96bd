"""A constraint as one model can obey it: what the answer must be, behind the reasoning and the headers that the model writes first."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..errors import UnsupportedError
from .answer import AnswerFormat
from .grammar import WHITE_SPACE, Constraint, own_lark
from .reasoning import HARMONY, ReasoningMarks
from .tokenizer import Tokenizer
from .tools import Schemas
from .tools.forced import forced_calls

TAIL_CHARACTERS = 256


def held(
    answer: AnswerFormat, tokenizer: Tokenizer, prompt: str, content: Constraint | None, calls: Schemas, is_parallel: bool = True
) -> Constraint:
    """What an answer to the rendered `prompt` must match so that its content matches `content`, or it calls one of `calls`.

    content None: it must call. calls empty: it may not. Raises: UnsupportedError where this model's way of writing cannot be
    held; UsageError for a bad schema.
    """
    if answer.messages is not None:
        return _messages(answer, tokenizer, content, calls)
    choices = [] if content is None else [content]
    if calls:
        if answer.dialect is None:
            raise UnsupportedError("this model's template has no tool calls", what="tool_choice", supported=[])
        choices.append(forced_calls(answer.dialect, calls, tokenizer, None, is_parallel))
    before = _reasoning(answer.marks, prompt, tokenizer)
    if not before and len(choices) == 1:
        return choices[0]
    bodies, rules = _bodies(choices)
    return own_lark("\n".join([f"start: {'pre ' if before else ''}({bodies})", *rules, *before]))


def guarded(answer: AnswerFormat, tokenizer: Tokenizer, prompt: str, calls: Schemas, is_parallel: bool = True) -> Constraint:
    """Free text in which every call that the model begins is one of `calls` with valid arguments; one call at most, or any number.

    Raises: UnsupportedError where a call's beginning cannot be told from text; UsageError for a bad schema.
    """
    dialect = answer.dialect
    if dialect is None or "" in dialect.starts or answer.messages is not None:
        raise UnsupportedError("calls of this model cannot be told from text in time", what="strict", supported=[])
    _, *rules = forced_calls(dialect, calls, tokenizer, None, False).text.split("\n")
    marks = {_quoted(mark)[:-1]: f"trigger_{i}" for i, mark in enumerate(dialect.starts)}
    out = []
    for rule in rules:
        head, colon, body = rule.partition(": ")
        if head.startswith("call_") and head.removeprefix("call_").isdigit():
            found = next((m for m in marks if body.startswith(m)), None)
            if found is None and not body.startswith("<["):
                raise UnsupportedError("calls of this model cannot be told from text in time", what="strict", supported=[])
            body = f"TEXT {body}" if found is None else f'{marks[found]} "{body[len(found) :]}'
        out.append(head + colon + body)
    triggers = [f'{name}[lazy]: TEXT {mark}"' for mark, name in marks.items() if any(name in rule for rule in out)]
    names = " | ".join(f"call_{i}" for i in range(len(calls)))
    before = _reasoning(answer.marks, prompt, tokenizer)
    body = f"({names})* TEXT" if is_parallel else rf"TEXT | ({names}) /[ \n]{{0,4}}/"
    return own_lark("\n".join([f"start: {'pre ' if before else ''}({body})", "TEXT: /(?s:.*)/", *triggers, *out, *before]))


def _reasoning(marks: ReasoningMarks | None, prompt: str, tokenizer: Tokenizer) -> list[str]:
    """Rules `pre`: the rest of reasoning that the prompt left open, or a block of it if the model wants; [] after a closed one."""
    tail = prompt[-TAIL_CHARACTERS:].rstrip()
    if marks is None or tail.endswith(marks.end):
        return []
    end = _special(marks.end, tokenizer)
    thought = "thought: THOUGHT " + end if end else f"thought[suffix={_quoted(marks.end)}]: THOUGHT"
    rules = [thought, "THOUGHT: /(?s:.*)/", r"GAP: /[ \n]{0,4}/"]
    if tail.endswith(marks.start):
        return ["pre: thought GAP", *rules]
    start = _special(marks.start, tokenizer) or _quoted(marks.start)
    return [f"pre: ({start} thought GAP)?", *rules]


def _messages(answer: AnswerFormat, tokenizer: Tokenizer, content: Constraint | None, calls: Schemas) -> Constraint:
    """Harmony: messages of the channel analysis, then one of the channel final, or one to a function."""
    if answer.messages is not HARMONY:
        raise UnsupportedError("answers of this model cannot be held to a grammar", what="grammar", supported=[])
    mark = {name: _special(f"<|{name}|>", tokenizer) for name in ("start", "channel", "message", "end", "constrain")}
    missing = [name for name, spelled in mark.items() if not spelled and name != "constrain"]
    if missing:
        raise UnsupportedError(f"the tokenizer has no <|{missing[0]}|>", what="grammar", supported=[])
    kind = f'(" "? {mark["constrain"]} "json" | " json")?' if mark["constrain"] else '(" json")?'
    ends: list[str] = []
    rules: list[str] = []
    if content is not None:
        bodies, rules = _bodies([content])
        ends.append(f'"final" {kind} {mark["message"]} {bodies}')
    for i, (name, schema) in enumerate(calls.items()):
        ends.append(f'{_quoted("commentary to=functions." + name)} {kind} {mark["message"]} arguments_{i}')
        rules.append(f"arguments_{i}: {_json({'type': 'object', **schema}, True)}")
    thought = f'thought: {mark["channel"]} "analysis" {mark["message"]} THOUGHT {mark["end"]} {mark["start"]} "assistant"'
    last = f"last: {mark['channel']} ({' | '.join(ends)})"
    return own_lark("\n".join(["start: thought* last", thought, "THOUGHT: /(?s:.*)/", last, *rules]))


def _bodies(choices: Sequence[Constraint]) -> tuple[str, list[str]]:
    """The names of rules for these constraints, as alternatives, and the rules."""
    names, rules = [], []
    for i, constraint in enumerate(choices):
        names.append(f"body_{i}")
        if constraint.kind == "json_schema":
            rules.append(f"body_{i}: {_json(json.loads(constraint.text), constraint.is_lenient)}")
        elif constraint.kind == "regex":
            rules.append(f"body_{i}: BODY_{i}\nBODY_{i}: /{_slashed(constraint.text)}/")
        else:
            rules.append(f"body_{i}: %lark {{\n{constraint.text}\n}}")
    return " | ".join(names), rules


def _json(schema: object, is_lenient: bool) -> str:
    told = schema if isinstance(schema, dict) else {} if schema is True else {"enum": []}
    return "%json " + json.dumps({**told, "x-guidance": {"whitespace_pattern": WHITE_SPACE, "lenient": is_lenient}})


def _slashed(pattern: str) -> str:
    """A regular expression between slashes: those inside escaped, line ends written out."""
    out, is_escaped = [], False
    for char in pattern:
        if char == "/" and not is_escaped:
            out.append("\\")
        out.append({"\n": "\\n", "\r": "\\r"}.get(char, char))
        is_escaped = char == "\\" and not is_escaped
    return "".join(out)


def _special(mark: str, tokenizer: Tokenizer) -> str:
    """A special token by its id, in Lark; "" when the text is none."""
    token_id = tokenizer.id_of(mark)
    return f"<[{token_id}]>" if token_id is not None and tokenizer.is_special(token_id) else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
