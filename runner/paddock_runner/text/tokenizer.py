"""Text to token ids and back. Knows no file format: gguf_tokenizer.py and folder_tokenizer.py build it.

Special tokens are cut out of the text first and each segment between them is encoded alone, so segments can be cached: the
next turn of a long conversation encodes only what is new. Ids of one segment never depend on its neighbours.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..errors import FileError, UsageError
from .pairs import PairEnds, require_pairs
from .vocabulary import AddedToken, Cutter

_CACHE_BYTES = 64 << 20
_MAX_TABLES = 8
_LONG_CHARACTERS = 2048
"""A segment so long is worth a change of threads: streams go on meanwhile."""
_ENTRY_BYTES = 200  # dictionary slot, key header and value header of one cached segment


class Encoder(Protocol):
    """What is needed of `tokenizers.Tokenizer`; it must add and cut nothing by itself."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Any:
        """An object with `.ids`. Keeps the interpreter lock."""

    def encode_batch_fast(self, sequences: Sequence[str], *, add_special_tokens: bool) -> Sequence[Any]:
        """Such an object for each of them, made by threads of its own, without the lock."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids."""


@dataclass(frozen=True)
class TokenizerParts:
    """Everything a Tokenizer is made of.

    pieces: bytes of every token, by id. added: tokens matched in the text. prefix, suffix: ids put around a text on request.
    fill_ids: tokens before the text ahead of a gap, before the text behind it, and where the gap is to be filled.
    later_encoder: for segments that do not start the text, where those are treated differently; else None.
    drops_leading_space: encoding puts a space before the text, so decoding takes one away.
    decodes_words: text is not the concatenation of pieces (WordPiece): decoding goes through the encoder.
    pair: how two texts are joined, where the tokenizer says so.
    """

    encoder: Encoder
    pieces: Sequence[bytes]
    added: Sequence[AddedToken] = ()
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    stop_ids: Sequence[int] = ()
    fill_ids: tuple[int, int, int] | None = None
    later_encoder: Encoder | None = None
    drops_leading_space: bool = False
    decodes_words: bool = False
    pair: PairEnds | None = None


_IDS_AT_ONCE = 1 << 16
Item = TypeVar("Item")


class SegmentCache:
    """Least recently used segments with their ids (int32 bytes), bounded by bytes. Safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[bool, str], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, key: tuple[bool, str]) -> bytes | None:
        """The ids of a segment, or None."""
        with self._lock:
            ids = self._entries.get(key)
            if ids is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return ids

    def put(self, key: tuple[bool, str], ids: bytes) -> None:
        """Remember; the oldest make room. A segment larger than a quarter of the budget is not kept."""
        cost = _cost(key, ids)
        if cost * 4 > self._max_bytes:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self.used_bytes += cost
            while self.used_bytes > self._max_bytes:
                old, old_ids = self._entries.popitem(last=False)
                self.used_bytes -= _cost(old, old_ids)


def _text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def in_parts(ids: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Any number of ids, or of what stands for them, so many at a time as may be looked at without letting go of the interpreter's lock."""
    return (ids[at : at + _IDS_AT_ONCE] for at in range(0, len(ids), _IDS_AT_ONCE))


def packed(ids: Sequence[int]) -> tuple[array[int], int]:
    """Ids as they are kept, and the largest (-1 of none). Raises: OverflowError."""
    out, most = array("i"), -1
    for part in in_parts(ids):
        out.extend(array("i", part))
        most = max(most, max(part))
    return out, most


def _cost(key: tuple[bool, str], ids: bytes) -> int:
    text = key[1]
    return _ENTRY_BYTES + len(ids) + (len(text) if text.isascii() else 4 * len(text))


class Tokenizer:
    """Ids of text, text of ids. `n_rows`: rows of the model's embedding; ids at or above it are never produced."""

    def __init__(self, parts: TokenizerParts, n_rows: int | None = None, cache_bytes: int = _CACHE_BYTES) -> None:
        limit = len(parts.pieces) if n_rows is None else n_rows
        added = [t for t in parts.added if t.id < limit]
        fixed = [*parts.prefix, *parts.suffix]
        if any(i >= limit for i in fixed):
            raise FileError(
                f"the tokenizer puts id {max(fixed)} around every text, but the model has only {limit} embedding rows"
            )
        self._parts = parts
        self._limit = limit
        self._cut_all = Cutter(added)
        self._cut_plain = Cutter(t for t in added if not t.is_special)
        self._prefix = array("i", parts.prefix)
        self._suffix = array("i", parts.suffix)
        self._special = frozenset(t.id for t in added if t.is_special)
        self._texts: dict[frozenset[int], list[str | None]] = {}
        self._json: dict[frozenset[int], list[bytes | None]] = {}
        self._ids = {t.text: t.id for t in reversed(added)}
        self.cache = SegmentCache(cache_bytes)
        self.n_vocab = len(parts.pieces)
        self.pieces: Sequence[bytes] = [*parts.pieces, *[b""] * (limit - self.n_vocab)]  # rows that no token has
        self.bos_id = parts.bos_id
        self.eos_id = parts.eos_id
        self.eot_id = parts.eot_id
        self.stop_ids: tuple[int, ...] = tuple(i for i in parts.stop_ids if i < limit)
        self.fill_ids = parts.fill_ids if parts.fill_ids and max(parts.fill_ids) < limit else None
        self.drops_leading_space = parts.drops_leading_space

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> array[int]:
        """Ids of `text` as array('i').

        add_special: with the ids that the model wants around every text (bos, eos). parse_special: special tokens in the text
        become their ids; else they are ordinary text. Raises: UsageError when `text` holds half a surrogate pair.
        """
        out = array("i", self._prefix) if add_special else array("i")
        is_first = True
        for segment, token_id in (self._cut_all if parse_special else self._cut_plain).cut(text):
            if token_id >= 0:
                out.append(token_id)
            else:
                out.frombytes(self._segment(segment, is_first))
            is_first = False
        if add_special:
            out.extend(self._suffix)
        return out

    def encode_pair(self, first: str, second: str) -> tuple[array[int], list[int]]:
        """Ids of two texts joined, and the type of each token. Raises: UnsupportedError when the tokenizer does not say how, UsageError."""
        return require_pairs(self._parts.pair).joined(self.encode(first, add_special=False), self.encode(second, add_special=False))

    def count(self, text: str, add_special: bool = True, parse_special: bool = True) -> int:
        """How many ids `encode` gives."""
        return len(self.encode(text, add_special, parse_special))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD. Raises: UsageError for an id outside the vocabulary."""
        wanted = [i for i in self._checked(ids) if not (skip_special and i in self._special)]
        if self._parts.decodes_words:
            return self._parts.encoder.decode(wanted, skip_special_tokens=False)
        pieces = self.pieces
        data = b"".join([pieces[i] for i in wanted])
        if self.drops_leading_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for (special tokens: their name)."""
        return self.pieces[token_id]

    def texts(self, visible: frozenset[int] = frozenset()) -> Sequence[str | None]:
        """Text of every token on its own: "" for special ones that are not `visible`, None where it is no whole UTF-8."""
        table = self._texts.get(visible)
        if table is None:
            hidden = self._special - visible
            table = [_text(p) for p in self.pieces]
            for i in hidden:
                table[i] = ""
            if len(self._texts) >= _MAX_TABLES:
                self._texts.clear()
            self._texts[visible] = table
        return table

    def json_texts(self, visible: frozenset[int] = frozenset()) -> list[bytes | None]:
        """A place for the JSON of each of `texts(visible)`, filled by who needs it."""
        texts = self.texts(visible)
        found = self._json.get(visible)
        if found is None or len(found) != len(texts):
            if len(self._json) >= _MAX_TABLES:
                self._json.clear()
            found = self._json[visible] = [None] * len(texts)
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of decoded text."""
        return token_id in self._special

    @property
    def special_ids(self) -> frozenset[int]:
        """All ids that are left out of decoded text."""
        return self._special

    def id_of(self, text: str) -> int | None:
        """Id of an added token (special or not) by its text, or None."""
        return self._ids.get(text)

    def _checked(self, ids: Iterable[int]) -> list[int]:
        wanted = list(ids)
        n_ids = len(self.pieces)
        if wanted and (min(wanted) < 0 or max(wanted) >= n_ids):
            bad = next(i for i in wanted if not 0 <= i < n_ids)
            raise UsageError(f"token id {bad} is outside the vocabulary of {n_ids} tokens")
        return wanted

    def _segment(self, text: str, is_first: bool) -> bytes:
        encoder = self._parts.encoder
        if self._parts.later_encoder is None:
            is_first = False
        elif not is_first:
            encoder = self._parts.later_encoder
        key = (is_first, text)
        found = self.cache.get(key)
        if found is not None:
            return found
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError("the text holds half a surrogate pair, which no UTF-8 can carry") from error
        made = encoder.encode(text, add_special_tokens=False) if len(text) < _LONG_CHARACTERS else encoder.encode_batch_fast([text], add_special_tokens=False)[0]
        ids, most = packed(made.ids)
        if most >= self._limit:
            raise UsageError(f"the text needs token id {most}, but the model has only {self._limit} embedding rows")
        data = ids.tobytes()
        self.cache.put(key, data)
        return data
