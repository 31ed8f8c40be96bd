"""Typed getters name file, key and value."""

from __future__ import annotations

import pytest
from paddock_runner.errors import FileError, UnsupportedError
from paddock_runner.files.fields import Fields

FIELDS = Fields({"i": 3, "f": 2.0, "nan": float("nan"), "b": True, "s": "x", "list": [1, 2], "one": [5], "o": {"i": "deep"}, "null": None}, "m.json", "field")


def test_values_come_in_their_types():
    assert (FIELDS.integer("i"), FIELDS.integer("f"), FIELDS.integer("one"), FIELDS.number("i"), FIELDS.flag("b"), FIELDS.text("s")) == (3, 2, 5, 3.0, True, "x")
    assert FIELDS.integers("list", 2) == (1, 2) and FIELDS.integers("i", 3) == (3, 3, 3) and FIELDS.numbers("list") == (1.0, 2.0)


def test_missing_and_null_values_take_the_default():
    assert FIELDS.integer("absent", 7) == 7 and FIELDS.text("null", "d") == "d" and FIELDS.integers("absent", 2, 9) == (9, 9)
    assert "null" not in FIELDS and "i" in FIELDS


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda f: f.integer("absent"), "m.json: field absent is missing"),
        (lambda f: f.integer("null"), "field null is missing"),
        (lambda f: f.integer("s"), "field s is 'x', expected a whole number"),
        (lambda f: f.integer("b"), "field b is True"),
        (lambda f: f.integer("i", high=2), "field i is 3, expected 0 to 2"),
        (lambda f: f.number("nan"), "expected a finite number"),
        (lambda f: f.number("list"), "an array of 2"),
        (lambda f: f.text("i"), "field i is 3, expected a string"),
        (lambda f: f.flag("i"), "expected true or false"),
        (lambda f: f.integers("list", 3), "field list has 2 entries, expected 3"),
        (lambda f: f.numbers("s"), "expected an array of numbers"),
        (lambda f: f.section("i"), "expected an object"),
        (lambda f: f.section("o").integer("i"), "field o.i is 'deep'"),
    ],
)
def test_wrong_value_is_named_with_what_was_expected(call, words):
    with pytest.raises(FileError) as caught:
        call(FIELDS)
    assert words in str(caught.value)


def test_unknown_choice_lists_what_is_supported():
    with pytest.raises(UnsupportedError, match="field s is 'x', which is not supported; supported: silu"):
        FIELDS.choice("s", "silu", ("silu",))


def test_defaults_fill_only_what_is_missing():
    filled = FIELDS.with_defaults({"i": 9, "null": 4, "new": 1})
    assert (filled.integer("i"), filled.integer("null"), filled.integer("new")) == (3, 4, 1)
