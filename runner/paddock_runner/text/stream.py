"""Token ids to text, piece by piece: never half a character, never any of a stop string, one table look-up per token.

A stop string counts from the moment its last character arrives: of several the one that is complete first, and of those that
are complete at the same character the longest. The result does not depend on how the text is split into tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

import msgspec

from .tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
_decoder = codecs.getincrementaldecoder("utf-8")


class StopStrings:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(s for s in stops if s))
        self._include = include_stop
        self._held = ""
        self._longest = max(map(len, self._stops), default=0)
        self._begins = re.compile("[" + "".join({re.escape(s[0]) for s in self._stops}) + "]") if self._stops else None
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that can be shown now. After a match: what came before it, then nothing more."""
        if self.matched is not None or self._begins is None:
            return "" if self.matched is not None else text
        if self._held:
            text = self._held + text
        elif self._begins.search(text) is None:
            return text
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text still held back: no more will come."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Where the longest suffix of `text` starts that is the beginning of a stop string; len(text) if none is."""
        assert self._begins is not None
        for match in self._begins.finditer(text, max(0, len(text) - self._longest + 1)):
            tail = text[match.start() :]
            if any(s.startswith(tail) for s in self._stops):
                return match.start()
        return len(text)


class TextStream:
    """The text of one generation.

    visible: special tokens that are shown all the same (markers that a reasoning or tool parser needs). starts_text: the
    generation begins a text (the prompt ended in a special token), so the space that encoding would put there is taken away.
    """

    __slots__ = ("_decode", "_is_open", "_pieces", "_stops", "_strips", "_texts", "_visible", "json")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        visible: Iterable[int] = (),
        starts_text: bool = False,
    ) -> None:
        self._visible = frozenset(visible)
        self._texts = tokenizer.texts(self._visible)
        self.json = tokenizer.json_texts(self._visible)
        """JSON of every token's text on its own, as far as `remember` has been told of it; none for one that is not whole or not shown."""
        self._pieces = tokenizer.pieces
        self._stops = StopStrings(stop, include_stop) if any(stop) else None
        self._decode = _decoder("replace")
        self._is_open = False  # a character has begun and not ended
        self._strips = starts_text and tokenizer.drops_leading_space

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.matched if self._stops is not None else None

    @property
    def has_stops(self) -> bool:
        """Whether there are stop strings."""
        return self._stops is not None

    @property
    def is_settled(self) -> bool:
        """Whether the next token's text is what it is on its own: no character is open, no space will be taken away."""
        return not self._is_open and not self._strips

    def remember(self, token_id: int) -> None:
        """Puts a token's text into `json`, if it is whole and shown."""
        if token_id < len(self.json) and (text := self._texts[token_id]):
            self.json[token_id] = _encode(text)

    def push(self, token_id: int) -> str:
        """The text that can be shown after this token (often its own). Raises: IndexError for an id without a token."""
        text = self._texts[token_id]
        if text is None or self._is_open or self._strips:
            text = self._slow(token_id, text)
        return text if self._stops is None else self._stops.push(text)

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The text that can be shown after these tokens."""
        push = self.push
        return "".join([push(i) for i in token_ids])

    def finish(self, keep_broken: bool = False) -> str:
        """What was held back. A character that never ended is left out, or with keep_broken becomes U+FFFD."""
        text = self._decode.decode(b"", True) if keep_broken else ""
        self._decode.reset()
        self._is_open = False
        if self._stops is None:
            return text
        return self._stops.push(text) + self._stops.finish()

    def _slow(self, token_id: int, text: str | None) -> str:
        if text == "":
            return ""  # a hidden token: it neither ends nor begins a character
        text = self._decode.decode(self._pieces[token_id])
        self._is_open = bool(self._decode.getstate()[0])
        if self._strips and text:
            self._strips = False
            text = text.removeprefix(" ")
        return text
