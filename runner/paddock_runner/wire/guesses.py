"""What front and engine exchange about guesses for an answer that is held to a grammar: the engine says what it guessed, the front which tokens may come at each place."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

GUESS = Struct("<Qii")
"""ask_id, output index of the first token, tokens; then i32 x tokens."""
WALKED = Struct("<Qiiii")
"""ask_id, output index of the guess, that of the first place, places, masks; then i32 x places: a token that is certain there, or -1 where a mask says what
may come; then u32 x words of each mask."""


@dataclass(frozen=True, slots=True)
class Guessed:
    """The next row of this ask has these tokens as guesses, the first for output token `index`."""

    ask_id: int
    index: int
    tokens: Sequence[int]

    def encode(self) -> bytes:
        """The record's payload."""
        tokens = array("i", self.tokens).tobytes()
        return GUESS.pack(self.ask_id, self.index, len(self.tokens)) + tokens + bytes(-len(tokens) % 8)

    @classmethod
    def decode(cls, payload: memoryview) -> Guessed:
        """The record of a payload."""
        ask_id, index, n = GUESS.unpack_from(payload)
        return cls(ask_id, index, payload[GUESS.size : GUESS.size + 4 * n].cast("i").tolist())


@dataclass(slots=True)
class Walked:
    """How far the grammar allows the guess at output token `index`: what may come at each place from `first` on, as long as the tokens before it are the guessed ones.

    places: a token where it is certain, or a mask (u32 [ceil(V/32)]). None: the grammar refused the guess before `first`.
    """

    ask_id: int
    index: int
    first: int
    places: Sequence[int | bytes]

    @property
    def n_bytes(self) -> int:
        """Bytes of the payload."""
        return WALKED.size + (sum(4 + (0 if isinstance(place, int) else len(place)) for place in self.places) + 7 & -8)

    def write(self, data: memoryview, at: int) -> None:
        """Puts the payload into `n_bytes` of data."""
        masks = [place for place in self.places if not isinstance(place, int)]
        WALKED.pack_into(data, at, self.ask_id, self.index, self.first, len(self.places), len(masks))
        tokens = array("i", (place if isinstance(place, int) else -1 for place in self.places)).tobytes()
        at += WALKED.size
        for part in (tokens, *masks):
            data[at : at + len(part)] = part
            at += len(part)
        if at & 7:
            data[at : at + 4] = bytes(4)

    def encode(self) -> bytes:
        """The record's payload."""
        payload = bytearray(self.n_bytes)
        self.write(memoryview(payload), 0)
        return bytes(payload)

    @classmethod
    def decode(cls, payload: memoryview, n_words: int, n_vocab: int) -> Walked | None:
        """The record of a payload; None when its masks have not n_words words each, or a token is none."""
        ask_id, index, first, n, n_masks = WALKED.unpack_from(payload)
        at, size = WALKED.size + 4 * n, 4 * n_words
        tokens: list[int] = payload[WALKED.size : at].cast("i").tolist() if n else []
        if len(payload) - at - size * n_masks not in (0, 4) or tokens.count(-1) != n_masks or any(not -1 <= token < n_vocab for token in tokens):
            return None
        masks = (bytes(payload[begin : begin + size]) for begin in range(at, at + size * n_masks, size))
        return cls(ask_id, index, first, [next(masks) if token < 0 else token for token in tokens])
