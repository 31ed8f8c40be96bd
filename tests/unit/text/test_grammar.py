"""Constrained generation: whatever the model would choose, the result matches; hostile grammars are refused in time."""

from __future__ import annotations

import json
import random
import re
import time

import jsonschema
import pytest
from paddock_runner.errors import UsageError
from paddock_runner.text import grammar
from paddock_runner.text.events import gather
from paddock_runner.text.fitting import Fitting
from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf
from paddock_runner.text.grammar import Constraint, Grammars
from paddock_runner.text.reasoning import marks_of
from paddock_runner.text.tools import DIALECTS, ToolParser
from paddock_runner.text.tools.forced import forced_calls

from tests.unit.text.small import byte_level_metadata

pytest.importorskip("llguidance")
SMALL = tokenizer_from_gguf(byte_level_metadata())
N_ROWS = SMALL.n_vocab + 45
GRAMMARS = Grammars(SMALL, N_ROWS)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _generate(constraint: Constraint, seed: int, max_tokens: int = 4000) -> str:
    """What a model that chooses at random among the allowed tokens (ends first, then short texts) writes."""
    chance = random.Random(seed)
    matcher = GRAMMARS.matcher(constraint)
    ids: list[int] = []
    for _ in range(max_tokens):
        if matcher.is_stopped:
            return SMALL.decode(ids, skip_special=False)
        mask = matcher.mask()
        allowed = [i for i in range(N_ROWS) if mask[i >> 5] >> (i & 31) & 1]
        assert allowed and max(allowed) < SMALL.n_vocab
        ends = [i for i in allowed if i in SMALL.stop_ids]
        closers = [i for i in allowed if SMALL.pieces[i] in (b'"', b"}", b"]", b"<", b"/")]
        token = chance.choice(ends or (closers if closers and chance.random() < 0.5 else allowed))
        if token in SMALL.stop_ids:
            return SMALL.decode(ids, skip_special=False)
        assert matcher.accept(token)
        ids.append(token)
    raise AssertionError(f"no end after {max_tokens} tokens: {SMALL.decode(ids)[:200]}")


@pytest.mark.parametrize("seed", range(12))
def test_every_finished_answer_validates_against_its_schema(seed: int) -> None:
    value = json.loads(_generate(grammar.json_schema(PERSON), seed))
    assert set(value) <= {"name", "age", "tags"} and isinstance(value["name"], str) and 0 <= value["age"] <= 120
    assert all(t in ("a", "b") for t in value.get("tags", []))


def test_schema_of_a_tool_that_is_refused_is_told_without_our_grammar_around_it() -> None:
    forced = grammar.own_lark('start: "<tool_call>" call\ncall: %json {"$ref": "http://x/y"}')
    with pytest.raises(UsageError) as caught:
        GRAMMARS.matcher(forced)
    with pytest.raises(UsageError) as alone:
        GRAMMARS.matcher(grammar.json_schema({"$ref": "http://x/y"}))
    assert caught.value.message == alone.value.message and "x/y' is not present" in caught.value.message
    with pytest.raises(UsageError, match=r"1 \| start"):
        GRAMMARS.matcher(grammar.lark('start: "a" (b'))  # of a grammar that was sent the place is shown


def test_schema_that_nothing_matches_is_told_as_that() -> None:
    with pytest.raises(UsageError, match=r"no text matches it \(does it refer to nothing but itself\?\)"):
        GRAMMARS.matcher(grammar.json_schema({"$ref": "#"})).mask()


def test_object_of_three_thousand_keys_is_followed() -> None:
    wide = {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(3000)}}
    matcher = GRAMMARS.matcher(grammar.json_schema(wide))
    for token in SMALL.encode('{"k1": 1, "k2999": 2}'):
        matcher.mask()
        assert matcher.accept(token)
    assert matcher.is_accepting and matcher.refusal() is None


def test_grammar_that_becomes_too_costly_is_told_from_a_token_that_was_not_allowed() -> None:
    wide = {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(6000)}}
    costly, strict = GRAMMARS.matcher(grammar.json_schema(wide)), GRAMMARS.matcher(grammar.json_schema({"type": "integer"}))
    (opening,) = SMALL.encode("{")
    assert not costly.accept(opening) and not strict.accept(opening)
    refusal = costly.refusal()
    assert refusal is not None and "cannot be followed" in refusal.message and strict.refusal() is None


def test_json_object_regex_and_choice() -> None:
    assert isinstance(json.loads(_generate(grammar.json_object(), 3)), dict)
    assert re.fullmatch(r"(ab|c){2}\d", _generate(grammar.regex(r"(ab|c){2}[0-9]"), 1))
    for seed in range(5):
        assert _generate(grammar.choice(["yes", "no", 'may"be\n']), seed) in ("yes", "no", 'may"be\n')
    assert _generate(grammar.lark('start: "a" start "b" | "c"'), 5).count("c") == 1


def test_a_mask_has_one_bit_a_row_and_none_beyond_the_vocabulary() -> None:
    mask = GRAMMARS.matcher(grammar.choice(["the", "in"])).mask()
    assert len(mask) == GRAMMARS.n_words == (N_ROWS + 31) // 32
    allowed = {SMALL.pieces[i] for i in range(N_ROWS) if mask[i >> 5] >> (i & 31) & 1}
    assert allowed == {b"t", b"th", b"the", b"i", b"in"}


def test_a_token_that_is_not_allowed_is_not_accepted_and_a_copy_goes_ahead_by_itself() -> None:
    matcher = GRAMMARS.matcher(grammar.choice(["abab"]))
    a, b = (SMALL.encode(c, False)[0] for c in "ab")
    assert matcher.accept(a) and matcher.accept(b)
    ahead = matcher.copy()
    assert ahead.accept(a) and ahead.accept(b) and ahead.is_accepting
    assert matcher.accept(a) and not matcher.accept(a)


@pytest.mark.parametrize("seed", range(8))
def test_a_matcher_is_the_same_whatever_its_copies_have_taken(seed: int) -> None:
    """Random ways through random schemas, copies sent ahead at every token, some into errors: masks and certain tokens are those of a matcher without copies."""
    chance = random.Random(seed)
    schemas = [PERSON, {"type": "array", "items": {"type": ["string", "number", "null"]}, "maxItems": 4}, {"enum": ["abc", "abd", 17, None]}]
    made = (grammar.json_schema(chance.choice(schemas)), grammar.regex("(ab|ac)*d{1,3}[a-f]?"), grammar.choice(["abab", "abba", "the end"]))
    constraint = made[min(seed // 3, 2)]
    matcher, twin = GRAMMARS.matcher(constraint), GRAMMARS.matcher(constraint)
    for _ in range(120):
        for _ in range(chance.randrange(3)):
            ahead = matcher.copy()
            for _ in range(chance.randrange(1, 12)):
                mask = ahead.mask().tobytes() if not ahead.is_stopped else b""
                allowed = [i for i in range(SMALL.n_vocab) if mask and mask[i >> 3] >> (i & 7) & 1]
                wanted = chance.choice(allowed) if allowed and chance.random() < 0.9 else chance.randrange(SMALL.n_vocab)
                if chance.random() < 0.5:
                    ahead.forced()
                if (ahead.accept if chance.random() < 0.3 else lambda token, ahead=ahead: ahead.accept_some([token]))(wanted) != 1:
                    break
        mask = matcher.mask().tobytes()
        assert mask == twin.mask().tobytes() and matcher.forced() == twin.forced() and matcher.is_stopped == twin.is_stopped and matcher.is_accepting == twin.is_accepting
        allowed = [i for i in range(SMALL.n_vocab) if mask[i >> 3] >> (i & 7) & 1 and i not in SMALL.stop_ids]
        if matcher.is_stopped or not allowed:
            return
        token = chance.choice(allowed)
        assert matcher.accept(token) and twin.accept(token)


def test_matchers_of_one_grammar_do_not_share_their_state() -> None:
    first, second = (GRAMMARS.matcher(grammar.choice(["ab"])) for _ in range(2))
    a = SMALL.encode("a", False)[0]
    assert first.accept(a) and second.accept(a)


def _deep(n: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


HOSTILE = {
    "not a schema": lambda: grammar.json_schema([1]),  # type: ignore[arg-type]
    "unknown type": lambda: grammar.json_schema({"type": "martian"}),
    "unsupported keyword": lambda: grammar.json_schema({"type": "object", "not": {"required": ["x"]}}),
    "deep schema": lambda: grammar.json_schema(_deep(100)),
    "large schema": lambda: grammar.json_schema({"enum": ["x" * 40 + str(i) for i in range(20_000)]}),
    "bad pattern": lambda: grammar.json_schema({"type": "string", "pattern": "("}),
    "pattern that repeats": lambda: grammar.json_schema({"type": "string", "pattern": "(a{1000}){1000}"}),
    "broken regex": lambda: grammar.regex("(a"),
    "empty regex": lambda: grammar.regex(""),
    "nested repeats": lambda: grammar.regex("(a{1000}){1000}"),
    "nested repeats with bounds": lambda: grammar.regex("((a{1,50}){1,50}){1,50}"),
    "one long repeat": lambda: grammar.regex("a{100000}"),
    "repeats after a class": lambda: grammar.regex(r"([\]()]{300}\p{L}{300}){300}"),
    "nested groups": lambda: grammar.regex("(" * 500 + "a" + ")*" * 500),
    "broken lark": lambda: grammar.lark("start: ("),
    "lark that repeats": lambda: grammar.lark('start: B{1000}\nB: A{1000}\nA: "a"'),
    "lark that repeats a regex": lambda: grammar.lark("start: A\nA: B{300}\nB: /(ab){300}/"),
    "no choice": lambda: grammar.choice([]),
    "too many choices": lambda: grammar.choice([str(i) for i in range(5000)]),
    "too long": lambda: grammar.lark("start: " + '"a" ' * 100_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_or_hostile_grammar_is_refused_within_a_second(name: str) -> None:
    before = time.thread_time()
    with pytest.raises(UsageError) as refused:
        GRAMMARS.matcher(HOSTILE[name]())
    assert time.thread_time() - before < 1.5
    assert len(refused.value.message) < 600
    assert GRAMMARS.matcher(grammar.choice(["ok"])).mask()


def test_a_keyword_that_cannot_be_enforced_is_ignored_only_when_told() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False, "not": {"required": ["x"]}}
    assert json.loads(_generate(grammar.json_schema(schema, is_lenient=True), 1)) == {}


SCHEMAS = {
    "look": {"type": "object", "properties": {"at": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "maximum": 9, "minimum": 0}},
             "required": ["at", "n"], "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_a_forced_call_is_read_back_by_its_dialect_with_valid_arguments(dialect) -> None:
    if "{" not in dialect.example and dialect.force is None:
        one = {"look": {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}, "required": ["at"]}}
        text = dialect.example.replace("get_weather", "look").replace("city", "at")
        matcher = GRAMMARS.matcher(forced_calls(dialect, one, SMALL))
        assert all(matcher.accept(i) for i in SMALL.encode(text, False)) and matcher.is_accepting
        wrong = GRAMMARS.matcher(forced_calls(dialect, one, SMALL))
        assert not all(wrong.accept(i) for i in SMALL.encode(text.replace("look", "leap"), False))
        return
    for seed in range(2):
        text = _generate(forced_calls(dialect, SCHEMAS, SMALL, is_parallel=False), seed)
        parser = ToolParser(dialect, SCHEMAS)
        answer = gather(parser.push(text) + parser.finish())
        assert answer.text.strip() == "" and [(c.name, c.is_complete) for c in answer.calls] == [("look", True)], text
        value = json.loads(answer.calls[0].arguments)
        assert set(value) == {"at", "n"} and isinstance(value["at"], str) and 0 <= int(value["n"]) <= 9


NESTED = {
    "type": "object",
    "properties": {
        "who": {"type": "object", "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 4}, "age": {"type": ["integer", "null"], "minimum": 0, "maximum": 9}}, "required": ["age"], "additionalProperties": False},
        "tags": {"type": "array", "items": {"enum": ["red", "b \"c", 3, None]}, "minItems": 1, "maxItems": 3},
        "pick": {"anyOf": [{"$ref": "#/$defs/flag"}, {"const": {"a": ["x", 1]}}]},
        "ok": {"type": "boolean"},
    },
    "required": ["tags", "pick"], "additionalProperties": False, "$defs": {"flag": {"type": "boolean"}},
}  # fmt: skip


@pytest.mark.parametrize("name", ["gemma-4", "lfm-2"])
def test_forced_calls_in_notations_of_their_own_hold_nested_arguments(name: str) -> None:
    dialect = next(d for d in DIALECTS if d.name == name)
    for seed in range(8):
        text = _generate(forced_calls(dialect, {"file.it": NESTED}, SMALL, is_parallel=False), seed)
        parser = ToolParser(dialect, {"file.it": NESTED})
        (call,) = gather(parser.push(text) + parser.finish()).calls
        assert call.name == "file.it" and call.is_complete
        jsonschema.validate(json.loads(call.arguments), NESTED)


def test_a_python_call_whose_names_are_no_identifiers_is_written_as_json() -> None:
    dialect = next(d for d in DIALECTS if d.name == "lfm-2")
    schemas = {"look-up": {"type": "object", "properties": {"from": {"type": "integer", "minimum": 1, "maximum": 3}}, "required": ["from"], "additionalProperties": False}}
    text = _generate(forced_calls(dialect, schemas, SMALL, is_parallel=False), 1)
    parser = ToolParser(dialect, schemas)
    (call,) = gather(parser.push(text) + parser.finish()).calls
    assert call.name == "look-up" and 1 <= json.loads(call.arguments)["from"] <= 3


def test_a_free_object_is_held_to_the_dialects_notation() -> None:
    dialect = next(d for d in DIALECTS if d.name == "gemma-4")
    call = '<|tool_call>call:look{at:{deep:[1,<|"|>x<|"|>,{k:null}]}}<tool_call|>'
    schemas = {"look": {"type": "object", "properties": {"at": {"type": "object"}}, "required": ["at"]}}
    matcher = GRAMMARS.matcher(forced_calls(dialect, schemas, SMALL))
    assert all(matcher.accept(i) for i in SMALL.encode(call, False)) and matcher.is_accepting


def test_a_forced_call_leaves_open_reasoning_alone() -> None:
    hermes = next(d for d in DIALECTS if d.name == "hermes")
    matcher = GRAMMARS.matcher(forced_calls(hermes, SCHEMAS, SMALL, marks_of("<think>")))
    text = 'hm\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": "x", "n": 3}}\n</tool_call>'
    assert all(matcher.accept(i) for i in SMALL.encode(text, False)) and matcher.is_accepting


def test_call_that_no_grammar_held_is_one_where_its_arguments_match_whatever_their_order() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"], "additionalProperties": False}
    schema = {
        "type": "object", "properties": {"city": {"type": "string"}, "at": {"$ref": "#/$defs/P"}, "more": {"type": "array", "items": {"$ref": "#/$defs/P"}}},
        "required": ["city", "at"], "additionalProperties": False, "$defs": {"P": point},
    }  # fmt: skip
    for arguments, fits in [
        ({"city": "Paris", "at": {"x": 1, "y": 2}}, True), ({"at": {"y": 2, "x": 1}, "city": "P", "more": [{"y": 1, "x": 0}]}, True),
        ({"city": "Paris"}, False), ({"city": 5, "at": {"x": 1, "y": 2}}, False), ({"city": "P", "at": {"x": 1, "y": 2}, "z": 1}, False),
    ]:  # fmt: skip
        assert Fitting(GRAMMARS, {"look": schema}, True)("look", json.dumps(arguments)) is fits, arguments
    one, many = Fitting(GRAMMARS, {}, False), Fitting(GRAMMARS, {}, True)
    assert [one("a", "{}"), one("a", "{}"), many("a", "{}"), many("b", "[]")] == [True, False, True, True]
