"""Tokens as bytes, special tokens and where text is cut at them: what every kind of tokenizer shares."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# Texts that end a turn or a generation in the families served. A checkpoint often names only one of its own.
# Source: ggml-org/llama.cpp src/llama-vocab.cpp (special_eog_ids).
END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|END_OF_TURN_TOKEN|>",
    "<|eot|>",
    "<|user|>",
    "<|observation|>",
)
GLM_END_TEXTS = ("<|user|>", "<|observation|>")
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eot|>",
    "<|END_OF_TURN_TOKEN|>",
    "<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<|end_of_text|>",
    "<|endoftext|>",
)
# Prefix, suffix and middle marks of fill-in-the-middle, by family. Source: as END_TEXTS.
_FILL_TEXTS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
_DEEPEST_NESTING = 40


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token matched in the text itself, before any other rule.

    is_special: matched only on request, and left out of decoded text. strips_left/right: swallows white space on that side.
    is_word: matched only where no letter or digit touches it.
    """

    id: int
    text: str
    is_special: bool
    strips_left: bool = False
    strips_right: bool = False
    is_word: bool = False


class Cutter:
    """Cuts text at added tokens: leftmost first, longest of those that start there."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._by_text: dict[str, AddedToken] = {}
        for token in tokens:
            if token.text:
                self._by_text.setdefault(token.text, token)
        self._regex = re.compile(_trie_pattern(self._by_text)) if self._by_text else None
        self._is_plain = not any(t.strips_left or t.strips_right or t.is_word for t in self._by_text.values())

    def cut(self, text: str) -> Iterator[tuple[str, int]]:
        """Pieces in order: (raw text, -1) or ("", id)."""
        if self._regex is None:
            if text:
                yield text, -1
            return
        by_text, is_plain, done = self._by_text, self._is_plain, 0
        for match in self._regex.finditer(text):
            start, end = match.span()
            if start < done:
                continue
            token = by_text[match.group()]
            left_end = start
            if not is_plain:
                if token.is_word and _touches_word(text, start, end):
                    continue
                if token.strips_left:
                    left_end = done + len(text[done:start].rstrip())
                if token.strips_right:
                    end = _after_space(text, end)
            if left_end > done:
                yield text[done:left_end], -1
            yield "", token.id
            done = end
        if done < len(text):
            yield text[done:], -1


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _touches_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start], text[end : end + 1]
    return before.isalnum() or before == "_" or after.isalnum() or after == "_"


def _trie_pattern(words: Iterable[str]) -> str:
    """One expression that matches the longest of `words` at a position, whose cost does not grow with their number."""
    root: dict[str, dict] = {}  # type: ignore[type-arg]
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _node_pattern(root, 0)


def _node_pattern(node: dict[str, dict], depth: int) -> str:  # type: ignore[type-arg]
    if depth >= _DEEPEST_NESTING:
        return "(?:" + "|".join(re.escape(w) for w in sorted(_words(node), key=len, reverse=True)) + ")"
    alternatives = []
    for char, child in node.items():
        if not char:
            continue
        chain = re.escape(char)
        while len(child) == 1 and "" not in child:
            ((char, child),) = child.items()
            chain += re.escape(char)
        alternatives.append(chain + (_node_pattern(child, depth + 1) if len(child) > 1 or "" not in child else ""))
    if not alternatives:
        return ""
    body = alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"
    return f"(?:{body})?" if "" in node else body


def _words(node: dict[str, dict]) -> list[str]:  # type: ignore[type-arg]
    done, stack = [], [("", node)]
    while stack:
        prefix, current = stack.pop()
        for char, child in current.items():
            if char:
                stack.append((prefix + char, child))
            else:
                done.append(prefix)
    return done


def byte_characters() -> dict[str, int]:
    """The 256 printable characters in which byte-level BPE spells bytes, and the byte each stands for.

    Source: openai/gpt-2 src/encoder.py, bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    spare = 256
    for byte in range(256):
        if byte not in printable:
            table[chr(spare)] = byte
            spare += 1
    return table


_BYTES = codecs.charmap_build("".join(sorted(byte_characters(), key=byte_characters().__getitem__)))
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_level_piece(text: str) -> bytes:
    """Bytes of a byte-level token; a text that is not spelled in the 256 characters stands for itself."""
    try:
        return codecs.charmap_encode(text, "strict", _BYTES)[0]
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def sentence_piece(text: str, byte_fallback: bool = True) -> bytes:
    """Bytes of a SentencePiece token: U+2581 is a space, <0xXX> is a byte."""
    if byte_fallback and len(text) == 6 and (match := _FALLBACK.match(text)):
        return bytes([int(match.group(1), 16)])
    return text.replace("▁", " ").encode("utf-8", "replace")


def sentence_pieces(texts: Sequence[str], byte_fallback: bool = True) -> list[bytes]:
    """`sentence_piece` of many texts."""
    joined = "".join(texts)
    if not joined:
        return [b""] * len(texts)
    mark = next((m for m in ("\0", "\1", "\2") if m not in joined), "")
    if not mark:
        return [sentence_piece(text, byte_fallback) for text in texts]
    pieces = [text.encode("utf-8", "replace") for text in mark.join(texts).replace("▁", " ").split(mark)]
    if byte_fallback:
        for i, piece in enumerate(pieces):
            if piece[:3] == b"<0x":
                pieces[i] = sentence_piece(texts[i])
    return pieces


def end_ids(ids: Mapping[str, int], named: Iterable[int | None]) -> tuple[int, ...]:
    """Ids at which generation stops: those the checkpoint names and those whose text is known to end a turn.

    ids: text -> id of the special tokens. named: ids from the checkpoint (eos, eot, eom, generation config).
    """
    found = {i for i in named if i is not None and i >= 0}
    is_glm = "<|observation|>" in ids and "[gMASK]" in ids
    for text in END_TEXTS:
        if text in ids and (is_glm or text not in GLM_END_TEXTS):
            found.add(ids[text])
    if "<|end|>" in ids and (
        ("<|return|>" in ids and "<|call|>" in ids) or ("<|calls|>" in ids and "<|flush|>" in ids)
    ):
        found.discard(ids["<|end|>"])  # harmony: it ends a message, not the turn
    if "</s>" in ids and ("<|tool_response>" in ids or "<|plamo:eos|>" in ids):
        found.discard(ids["</s>"])  # an ordinary token there
    return tuple(sorted(found))


def end_of_turn_id(ids: Mapping[str, int], eos_id: int | None) -> int | None:
    """The id that closes a chat turn: known by its text, else eos."""
    for text in _END_OF_TURN:
        if text in ids and not (text == "<|end|>" and "<|return|>" in ids):
            return ids[text]
    return eos_id


def fill_ids(ids: Mapping[str, int]) -> tuple[int, int, int] | None:
    """Ids of the marks for filling in the middle (prefix, suffix, middle), or None. ids: text -> id."""
    for prefix, suffix, middle in _FILL_TEXTS:
        if prefix in ids and suffix in ids and middle in ids:
            return ids[prefix], ids[suffix], ids[middle]
    return None
