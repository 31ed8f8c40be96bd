"""Ids to text one by one: whatever the split, the same text; half a character and stop strings never show."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf
from paddock_runner.text.stream import StopStrings, TextStream

from tests.unit.text.small import byte_level_metadata, sentence_metadata

SMALL = tokenizer_from_gguf(byte_level_metadata())
SENTENCES = tokenizer_from_gguf(sentence_metadata({"▁": -1.0, "a": -2.0, "▁a": -0.5, "b": -3.0}))
any_ids = st.lists(st.integers(0, SMALL.n_vocab - 1), max_size=40)


@given(any_ids)
@settings(max_examples=200, deadline=None)
def test_pieces_together_are_the_decoded_whole(ids: list[int]) -> None:
    stream = TextStream(SMALL)
    assert "".join(stream.push(i) for i in ids) + stream.finish(keep_broken=True) == SMALL.decode(ids)


@given(st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_no_piece_of_valid_text_holds_a_broken_character(text: str) -> None:
    stream = TextStream(SMALL)
    shown = "".join(stream.push(i) for i in SMALL.encode(text, False, False)) + stream.finish()
    assert shown == SMALL.decode(SMALL.encode(text, False, False))
    assert shown.count("\ufffd") == text.count("\ufffd")


def test_an_emoji_of_four_tokens_appears_with_its_last_byte() -> None:
    stream = TextStream(SMALL)
    assert [stream.push(i) for i in SMALL.encode("👩", False)] == ["", "", "", "👩"]


def test_a_character_cut_off_by_the_token_limit_is_left_out() -> None:
    stream = TextStream(SMALL)
    ids = SMALL.encode("ok 👩", False)
    assert stream.push_all(ids[:-1]) + stream.finish() == "ok "


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    ids = list(SMALL.encode("é", False))
    special = SMALL.id_of("<|im_end|>")
    assert TextStream(SMALL).push_all([ids[0], special, ids[1]]) == "é" == SMALL.decode([ids[0], special, ids[1]])


def test_special_tokens_show_only_when_asked_for() -> None:
    ids = SMALL.encode("<|im_start|>the<|im_end|>")
    assert TextStream(SMALL).push_all(ids) == "the"
    assert TextStream(SMALL, visible=[SMALL.id_of("<|im_start|>")]).push_all(ids) == "<|im_start|>the"


def test_the_first_space_of_a_sentence_piece_text_goes_and_later_ones_stay() -> None:
    ids = list(SENTENCES.encode("a a", add_special=False))
    assert TextStream(SENTENCES, starts_text=True).push_all(ids) == "a a" == SENTENCES.decode(ids)
    assert TextStream(SENTENCES).push_all(ids) == " a a"


stops = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3)


def _first_complete(text: str, wanted: list[str]) -> tuple[int, int] | None:
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in wanted if text[:end].endswith(s)]
        if starts:
            return min(starts), end
    return None


@given(st.text("ab<é", max_size=20), stops, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_stop_strings_end_the_text_where_they_are_complete_whatever_the_split(text, wanted, include, random) -> None:
    stopper, shown, at = StopStrings(wanted, include), "", 0
    found = _first_complete(text, wanted)
    while at < len(text) and stopper.matched is None:
        step = random.randrange(1, 5)
        shown += stopper.push(text[at : at + step])
        assert found is not None or text.startswith(shown)
        assert found is None or text[: found[1] if include else found[0]].startswith(shown)
        at += step
    shown += stopper.finish()
    if found is None:
        assert shown == text and stopper.matched is None
    else:
        assert shown == text[: found[1] if include else found[0]]
        assert stopper.matched == text[found[0] : found[1]]


@given(st.text("ab<é", max_size=20), stops)
@settings(max_examples=200, deadline=None)
def test_a_stream_with_stop_strings_never_shows_any_of_them(text: str, wanted: list[str]) -> None:
    stream = TextStream(SMALL, stop=wanted)
    shown = ""
    for i in SMALL.encode(text, False, False):
        shown += stream.push(i)
        if stream.matched:
            break
    shown += stream.finish()
    found = _first_complete(text, wanted)
    assert shown == (text if found is None else text[: found[0]])


def test_a_stop_string_that_never_completes_is_shown_at_the_end() -> None:
    stream = TextStream(SMALL, stop=["</tool_call>"])
    ids = SMALL.encode("x</tool", False, False)
    assert stream.push_all(ids) == "x"
    assert stream.finish() == "</tool"


@pytest.mark.parametrize("stop", [(), ("###",)])
def test_a_token_costs_well_under_two_microseconds(stop: tuple[str, ...]) -> None:
    ids = list(SMALL.encode("the thing in there is another the " * 300, False))
    best = 1.0
    for _ in range(5):
        push = TextStream(SMALL, stop).push
        before = time.perf_counter()
        for i in ids:
            push(i)
        best = min(best, (time.perf_counter() - before) / len(ids))
    assert best < 2e-6, f"{best * 1e6:.2f} us"
