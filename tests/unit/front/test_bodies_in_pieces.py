"""Bodies decoded in pieces say what they say when they are decoded whole, and what is wrong with them lies at the same place."""

from __future__ import annotations

import json
import random
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta
from paddock_runner.front import pieces


class Part(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    more: dict[str, Any] | None = None


class Body(msgspec.Struct, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str = ""
    prompt: str | list[str | int | list[int]] | None = None
    bias: dict[int, float] | None = None
    few: Annotated[list[int], Meta(max_length=3)] | None = None
    any: Any = None
    renamed: int | None = msgspec.field(default=None, name="re-named")
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "WINDOW_BYTES", 64)


TEXTS = ["", "a", 'quo"te', "back\\slash", "\\\\", "é\n\t", "x" * 100, "[{,:}]" * 20, "\u2028 \U0001f600", "{" * 70, '\\"' * 50]


def value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 5)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind < 5:
        return rng.choice([None, True, False, 0, -1.5e300, 12345678901234567890, 1e-7, 3])
    if kind < 7:
        return [value(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 9)))]
    return {rng.choice(TEXTS) + str(i): value(rng, depth - 1) for i in range(rng.choice((0, 1, 2, 9)))}


def message(rng: random.Random) -> dict[str, Any]:
    content: Any = rng.choice(TEXTS)
    if rng.random() < 0.5:
        content = [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.randrange(12))]
    found = {"role": "user", "content": content, "name": "nobody knows this"}
    return found | ({"more": {"deep": value(rng, 12)}} if rng.random() < 0.3 else {})


def body(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"messages": [message(rng) for _ in range(rng.randrange(1, 20))], "model": "m"}
    options = {
        "prompt": rng.choice([rng.choice(TEXTS), [1, 2, 3] * 50, ["a", [1, 2], 3] * 9, [[i] * (i % 7) for i in range(40)]]),
        "bias": {str(i): i / 7 for i in range(rng.randrange(60))}, "few": [1, 2, 3], "any": value(rng, 14), "re-named": 7, "top_p": 0.5,
        "unknown": value(rng, 6), "other": [value(rng, 3)] * 30,
    }  # fmt: skip
    names = [name for name in options if rng.random() < 0.5]
    rng.shuffle(names)
    return found | {name: options[name] for name in names}


def written(rng: random.Random, given: Any) -> bytes:
    text = json.dumps(given, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)), separators=rng.choice((None, (",", ":"), (" , ", " : "))))
    return (rng.choice(("", " \n")) + text + rng.choice(("", " \n"))).encode()


def whole(raw: bytes) -> Any:
    """What the decoder says, or its complaint without the number of a byte."""
    try:
        return msgspec.json.Decoder(Body).decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return type(error), str(error)


def apart(raw: bytes) -> Any:
    try:
        return pieces.decode(raw, Body)[0]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("seed", range(150))
def test_what_is_right_is_the_same(seed: int) -> None:
    rng = random.Random(seed)
    given = body(rng)
    raw = written(rng, given)
    found, unknown = pieces.decode(raw, Body)
    assert found == msgspec.json.Decoder(Body).decode(raw)
    assert set(unknown) == {"unknown", "other"} & given.keys()


@pytest.mark.parametrize("seed", range(150))
def test_what_is_of_a_wrong_type_is_told_with_its_place(seed: int) -> None:
    rng = random.Random(seed)
    given = body(rng)
    place: Any = given
    path = rng.choice((["messages", -1, "role"], ["messages", 0, "content"], ["top_p"], ["few"], ["messages"], ["model"], ["bias"], ["prompt"]))
    for step in path[:-1]:
        place = place[step]
    if path == ["messages", 0, "content"] and isinstance(place.get("content"), list) and place["content"]:
        place["content"][-1]["text"] = 7
    elif rng.random() < 0.3 and isinstance(place, dict) and path[-1] == "role":
        del place["role"]
    else:
        place[path[-1]] = rng.choice([7.5, {"a": "b" * 100}, [[None] * 30], [], 2])
    raw = written(rng, given)
    found, wanted = apart(raw), whole(raw)
    assert found == wanted, raw


@pytest.mark.parametrize("seed", range(600))
def test_what_is_broken_is_refused_alike(seed: int) -> None:
    rng = random.Random(seed)
    raw = bytearray(written(rng, body(rng)))
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(raw))
        how = rng.randrange(4)
        if how == 0:
            del raw[at:]
        elif how == 1:
            del raw[at : at + rng.choice((1, 2, 3, 40))]
        elif how == 2:
            raw[at:at] = rng.choice((b"]", b"}", b",", b'"', b"[", b"{", b":", b"\\", b"\xff", b"\x00", b"\x0b", b"\x0c", b"1", b"n", b"1e999", b"\\ud800"))
        else:
            raw[at : at + 1] = bytes([rng.randrange(256)])
        if not raw:
            break
    found, wanted = apart(bytes(raw)), whole(bytes(raw))
    if isinstance(wanted, tuple) and isinstance(found, tuple) and found != wanted:
        return  # two things are wrong with it, and another was found first
    assert found == wanted or (found != found and wanted != wanted), bytes(raw)


@pytest.mark.parametrize("raw", [b"", b"[]", b"7", b"{", b"{}", b'{"messages":[]}', b"[" * 100_000, b'{"any":' + b"[" * 100_000, b'{"any":' + b'{"a":' * 100_000, b'"' + b"x" * 1000])
def test_odd_bodies_are_refused_as_before(raw: bytes) -> None:
    def told(decode: Any) -> Any:
        try:
            return decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return type(error), str(error)

    assert told(lambda raw: pieces.decode(raw, Body)[0]) == told(msgspec.json.Decoder(Body).decode)


def test_what_is_deep_goes_to_the_decoder_in_one_piece() -> None:
    deep: Any = "x" * 100
    for i in range(400):
        deep = [deep, i] if i % 2 else {"a": deep}
    raw = json.dumps({"messages": [{"role": "user"}], "any": deep}).encode()
    assert pieces.decode(raw, Body)[0] == msgspec.json.Decoder(Body).decode(raw)
