"""Tool-call dialects and reasoning: the parts of an answer do not depend on how its text was split, and nothing is lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddock_runner.text.answer import AnswerFormat
from paddock_runner.text.events import Answer, CallArguments, CallEnd, gather
from paddock_runner.text.feed import Feed
from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf
from paddock_runner.text.reasoning import HARMONY, MARKS, MUSE, MessageSplitter, ReasoningSplitter
from paddock_runner.text.tools import DIALECTS, Dialect, ToolParser

from tests.unit.text.small import byte_level_metadata

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
SCHEMAS = {"get_weather": WEATHER, "python": {"type": "object"}}
BY_NAME = {d.name: d for d in DIALECTS}
named = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)


def _read(dialect: Dialect, text: str, cuts: list[int] | None = None) -> Answer:
    parser = ToolParser(dialect, SCHEMAS)
    return _gather(parser, text, cuts)


def _gather(parser, text: str, cuts: list[int] | None = None) -> Answer:
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts or [])})
    events = [e for a, b in itertools.pairwise(edges) for e in parser.push(text[a:b])]
    return gather(events + parser.finish())


@named
def test_the_example_of_each_dialect_is_read_at_every_split(dialect: Dialect) -> None:
    text = dialect.example if "" in dialect.starts else f"Let me look.\n{dialect.example}\n"
    whole = _read(dialect, text)
    assert [(c.name, json.loads(c.arguments), c.is_complete) for c in whole.calls] == [("get_weather", {"city": "Paris"}, True)]
    assert whole.text == ("" if "" in dialect.starts else "Let me look.")
    assert all(_read(dialect, text, [i]) == whole for i in range(len(text)))
    assert _read(dialect, text, list(range(len(text)))) == whole


@named
def test_an_answer_cut_off_anywhere_is_the_same_at_every_split(dialect: Dialect) -> None:
    for end in range(len(dialect.example)):
        text = dialect.example[:end]
        whole = _read(dialect, text)
        assert _read(dialect, text, list(range(len(text)))) == whole
        assert len(whole.calls) <= 1
        if not whole.calls:
            assert whole.text == text
        elif not whole.calls[0].is_complete:
            assert whole.text == ""


def _pieces(dialect: Dialect) -> list[str]:
    marks = [m for m in (*dialect.starts, *dialect.hidden) if m]
    return [*marks, *(m[:-1] for m in marks), dialect.example, '"', "{", "}", "[", "]", ",", ":", "\n", " ", "\\", "get_weather",
            '"name"', '"arguments"', "{}", "1", "true", "city", "x é", "<", "=", ">", "(", ")"]  # fmt: skip


@named
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_text_gives_the_same_answer_at_every_split(dialect: Dialect, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(_pieces(dialect)), max_size=12)))
    whole = _read(dialect, text)
    assert _read(dialect, text, data.draw(st.lists(st.integers(0, 500), max_size=6))) == whole
    assert _read(dialect, text, list(range(len(text)))) == whole
    if not whole.calls:
        assert whole.text == text


@named
def test_text_without_calls_passes_unchanged(dialect: Dialect) -> None:
    for text in ("", " ", "Hello,\n  world! \n", "a < b && c > d\n\n", "{not json", '{"name": "Bob", "age": 3}'):
        assert _read(dialect, text) == Answer("", text, [])


def test_arguments_are_told_as_they_come() -> None:
    for name in ("hermes", "qwen3-coder", "mistral", "glm", "gemma-4", "deepseek", "kimi"):
        text = BY_NAME[name].example.replace("Paris", "Paris " * 40)
        parser = ToolParser(BY_NAME[name], SCHEMAS)
        deltas = [e for i in range(0, len(text), 5) for e in parser.push(text[i : i + 5]) if isinstance(e, CallArguments)]
        assert len(deltas) > 20, name


def test_several_calls_and_the_white_space_between_them() -> None:
    call = '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>'
    answer = _read(BY_NAME["hermes"], f"Two:\n\n{call}\n{call}\n\nDone.")
    assert [c.name for c in answer.calls] == ["a", "a"] and answer.text == "Two:Done."
    two = BY_NAME["qwen3-coder"].example.replace("</tool_call>", "<function=b>\n</function>\n</tool_call>")
    assert [(c.name, c.arguments) for c in _read(BY_NAME["qwen3-coder"], two).calls] == [
        ("get_weather", '{"city": "Paris"}'),
        ("b", "{}"),
    ]


def test_parameters_take_their_types_from_the_schema() -> None:
    body = "<parameter=city>\n7\n</parameter>\n<parameter=days>\n7\n</parameter>\n<parameter=note>\n  a\n\"b\"\n</parameter>\n"
    text = f"<tool_call>\n<function=get_weather>\n{body}</function>\n</tool_call>"
    (call,) = _read(BY_NAME["qwen3-coder"], text).calls
    assert json.loads(call.arguments) == {"city": "7", "days": 7, "note": '  a\n"b"'}


def test_arguments_before_the_name_or_as_text_are_understood() -> None:
    for body in (
        '{"arguments": {"city": "Paris"}, "name": "get_weather"}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}',
        '[{"name": "get_weather", "parameters": {"city": "Paris"}}]',
    ):
        (call,) = _read(BY_NAME["hermes"], f"<tool_call>{body}</tool_call>").calls
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


def test_a_bare_object_is_a_call_only_for_a_tool_that_was_given() -> None:
    for text, n in (
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', 1),
        ('{"name": "martian", "parameters": {}}', 0),
        ('[get_weather(city="Paris"), get_weather(city="Rome", days=[1, {"a": None}])]', 2),
        ("[martian(1)]", 0),
        ('<|python_tag|>{"name": "get_weather", "parameters": {}}', 1),
        ("<|python_tag|>print('hi')", 1),
        ("The answer is [1, 2].", 0),
    ):
        answer = _read(BY_NAME["llama"], text)
        assert len(answer.calls) == n and (n > 0 or answer.text == text), text


def _loose(text: str, cuts: list[int] | None = None) -> Answer:
    return _gather(ToolParser(BY_NAME["hermes"], SCHEMAS, takes=lambda name, arguments: True), text, cuts)


def test_a_bare_call_of_a_loose_dialect_is_one_where_nothing_holds_calls() -> None:
    bare, marked = '{"name": "get_weather", "arguments": {"city": "Paris"}}', BY_NAME["hermes"].example
    calls = [(bare, 1, ""), (f"\n{bare}\n{bare}\n", 2, ""), (marked, 1, ""), (f"{bare} and more", 1, "and more"), (f"{bare}\n{marked}", 2, "")]
    fenced = f"```json\n{bare}\n```"
    calls += [(fenced, 1, ""), (f"```\n{bare}```\n", 1, ""), (f"{fenced}\n{fenced}", 2, ""), (f"{fenced}\nand more", 1, "and more"), (f"```json\n{bare}", 1, ""), (f"```json\n{bare}\n{bare}\n```", 2, "")]
    texts = ["```python\nprint(1)\n```", "```json\n{\"a\": 1}\n```", "``", "```js", '{"name": "martian", "arguments": {}}', '{"city": 1}', f"So: {bare}", bare[:-1], bare.replace(": {", " {"), '{"name": "python", "arguments": 5}', "{", ""]
    for text, n, rest in [*calls, *((text, 0, text) for text in texts)]:
        answer = _loose(text)
        assert len(answer.calls) == n and answer.text == rest and all(call.is_complete for call in answer.calls), text
        assert all(_loose(text, [i]) == answer for i in range(len(text))) and _loose(text, list(range(len(text)))) == answer, text
    assert _read(BY_NAME["hermes"], bare) == Answer("", bare, [])
    assert _gather(ToolParser(BY_NAME["hermes"], SCHEMAS, takes=lambda name, arguments: "Oslo" in arguments), bare) == Answer("", bare, [])


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_text_of_a_loose_dialect_gives_the_same_answer_at_every_split(data: st.DataObject) -> None:
    pieces = [*_pieces(BY_NAME["hermes"]), '{"name": "get_weather", "arguments": {"city": "x"}}', '{"name": "get_weather", ']
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    whole = _loose(text)
    assert _loose(text, data.draw(st.lists(st.integers(0, 500), max_size=6))) == whole == _loose(text, list(range(len(text))))
    assert whole.calls or whole.text == text


def test_a_kimi_call_keeps_its_id() -> None:
    (call,) = _read(BY_NAME["kimi"], BY_NAME["kimi"].example).calls
    assert (call.name, call.id) == ("get_weather", "functions.get_weather:0")


@pytest.mark.parametrize("marks", MARKS, ids=lambda m: m.start)
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_is_split_at_every_split_of_the_text(marks, is_open: bool) -> None:
    text = ("" if is_open else marks.start) + f"\nHmm.\n\nYes. \n{marks.end}\n\n4 {marks.start} x\n"
    want = Answer("Hmm.\n\nYes.", f"4 {marks.start} x\n", [])
    for i in range(len(text)):
        assert _gather(ReasoningSplitter(marks, is_open), text, [i]) == want
    assert _gather(ReasoningSplitter(marks, is_open), text, list(range(len(text)))) == want
    assert _gather(ReasoningSplitter(marks, False), " just text") == Answer("", " just text", [])
    assert _gather(ReasoningSplitter(marks, True), "never closed ") == Answer("never closed", "", [])


HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)


def test_harmony_messages_become_thoughts_text_and_calls() -> None:
    want = _gather(MessageSplitter(HARMONY, True), HARMONY_ANSWER)
    assert (want.thought, want.text) == ("Let me see.", "Looking.")
    assert [(c.name, c.arguments, c.is_complete) for c in want.calls] == [("get_weather", '{"city": "Paris"}', True)]
    for i in range(len(HARMONY_ANSWER)):
        assert _gather(MessageSplitter(HARMONY, True), HARMONY_ANSWER, [i]) == want
    cut = _gather(MessageSplitter(HARMONY, True), HARMONY_ANSWER.removesuffix("<|call|>"))
    assert cut == want
    assert not _gather(MessageSplitter(HARMONY, True), HARMONY_ANSWER[:-10]).calls[0].is_complete
    final = "<|channel|>final<|message|>Four.\n"
    assert _gather(MessageSplitter(HARMONY, False), final) == Answer("", "Four.\n", [])
    assert _gather(MessageSplitter(HARMONY, False), "no header at all", [3, 7]) == Answer("", "no header at all", [])


def test_muse_messages_go_by_recipient() -> None:
    text = " to=self<|message|>Add.<|eom|><|start|>assistant to=user<|message|>4<|eot|>"
    for i in range(len(text)):
        assert _gather(MessageSplitter(MUSE, True), text, [i]) == Answer("Add.", "4", [])


def _format(template: str, *special: str) -> AnswerFormat:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += list(special)
    metadata["tokenizer.ggml.token_type"] += [3] * len(special)
    return AnswerFormat(template, tokenizer_from_gguf(metadata))


def test_reasoning_then_a_call_in_one_answer() -> None:
    form = _format("... <think> ... <tool_call> tools ...", "<think>", "</think>")
    assert len(form.visible(True)) == 2
    text = "Look.\n</think>\n\n" + BY_NAME["hermes"].example
    for i in range(len(text)):
        answer = _gather(form.parser("<|im_start|>assistant\n<think>\n", SCHEMAS), text, [i])
        assert answer.thought == "Look." and answer.text == "" and [c.name for c in answer.calls] == ["get_weather"]


def test_without_tools_in_the_request_nothing_is_a_call() -> None:
    form = _format("<tool_call> tools")
    text = BY_NAME["hermes"].example
    parser = form.parser("prompt", None)
    assert parser.is_plain and _gather(parser, text) == Answer("", text, [])


def test_a_prompt_that_closed_the_reasoning_leaves_all_to_the_text() -> None:
    form = _format("<think> </think>")
    assert form.parser("<think>\n\n</think>\n\n").is_plain
    assert not form.parser("assistant\n").is_plain


def test_text_passes_once_reasoning_has_ended_unless_calls_are_looked_for() -> None:
    form = _format("... <think> ... <tool_call> tools ...", "<think>", "</think>")
    prompt = "<|im_start|>assistant\n<think>\n"
    for schemas, passes in ((None, True), (SCHEMAS, False)):
        parser = form.parser(prompt, schemas)
        assert not parser.passes
        parser.push("Look.\n</think>\n\nIt is")
        assert parser.passes == passes and [e.text for e in parser.push(" so.")] == [" so."]  # type: ignore[union-attr]
    assert not form.parser("assistant\n").passes, "reasoning may come"


def test_a_call_that_was_cut_off_is_complete_only_with_an_object() -> None:
    for told, is_complete in (('{"a": 1}', True), ("{}", True), ("12", False), ('"x"', False), ("[1]", False), ('{"a": NaN}', False), ('{"a": -Infinity}', False), ("", False)):
        feed = Feed()
        feed.start_call("look")
        feed.arguments(told)
        feed.break_call()
        assert feed.take()[-1] == CallEnd(0, is_complete), told
