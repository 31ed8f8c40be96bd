"""Files that go with a prompt: which words name files, and what of a file a model can read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from paddock_runner.errors import FileError, UnsupportedError, UsageError

from paddock_manager import paths

MARK = "@"
HEAD_BYTES = 4096
STARTS = (
    (b"\x89PNG\r\n", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"GIF8", "an image"),
    (b"BM", "an image"),
    (b"II*\0", "an image"),
    (b"MM\0*", "an image"),
    (b"ID3", "a sound"),
    (b"OggS", "a sound"),
    (b"fLaC", "a sound"),
    (b"\x1aE\xdf\xa3", "a film"),
    (b"%PDF-", "a PDF"),
    (b"PK\3\4", "an archive or office file"),
    (b"\x1f\x8b", "an archive"),
    (b"GGUF", "a model"),
)
"""First bytes -> what it is. Source: the formats' own specifications."""
INSIDE = {b"WEBP": "an image", b"WAVE": "a sound", b"AVI ": "a film", b"ftyp": "a film or image"}
"""Bytes 8 to 12 of a RIFF file, or 4 to 8 of an ISO media file."""


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """(files, words of the prompt). A file is a word that begins with @, or that has a dot or slash and is the path of a file here.

    Raises: UsageError for an @word that is not there.
    """
    files, rest = [], []
    for word in words:
        if word.startswith(MARK) and len(word) > 1 and " " not in word:
            if not paths.expanded(word[1:]).exists():
                raise UsageError(f"{word[1:]}: there is no such file", f"leave the {MARK} out if it is no file")
            files.append(word[1:])
        elif _is_file(word):
            files.append(word)
        else:
            rest.append(word)
    return files, rest


def missing(words: list[str]) -> list[str]:
    """Words that look like paths, of which there is no file here: they stay words, which is worth a warning."""
    return [w for w in words if "/" in w and "." in w.rpartition("/")[2].strip(".") and not any(c in w for c in " \n:")]


def mentioned(text: str) -> list[str]:
    """The files of a message: its words that begin with @ and are the path of a file here."""
    words = [w.removeprefix(MARK).rstrip(",;:!?") for w in text.split() if w.startswith(MARK)]
    return list(dict.fromkeys(w for w in words if w and _is_there(w)))


def _is_file(word: str) -> bool:
    """Does the word name a file here? A word without dot and slash is a word."""
    return ("." in word or "/" in word) and "\n" not in word and _is_there(word)


def _is_there(word: str) -> bool:
    try:
        return paths.expanded(word).is_file()
    except OSError:  # longer than a file's name may be
        return False


def attachment(name: str, model: str) -> str:
    """A file as part of a prompt, with its name. model: for messages.

    Raises: UsageError (it cannot be read), UnsupportedError (the model cannot read what it is), FileError (a damaged PDF).
    """
    path = paths.expanded(name)
    try:
        with path.open("rb") as file:
            kind = kind_of(file.read(HEAD_BYTES))
        text = _pdf_text(path) if kind == "a PDF" else "" if kind else path.read_bytes().decode("utf-8-sig")
    except IsADirectoryError:
        raise UsageError(f"{name} is a folder", "name the files in it that matter", path=str(path)) from None
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}", path=str(path)) from None
    except UnicodeDecodeError:
        kind, text = "in no encoding that can be told", ""
    if kind not in ("", "a PDF") or "\0" in text:
        what = kind or "a binary file"
        raise UnsupportedError(
            f"{name} is {what}, and {model} takes text only", "convert it to text first", path=str(path), what=what
        )
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}"


def typed(text: str, what: str = "the prompt") -> str:
    """Words of the command line as the text that they are, whatever the locale says of their bytes. Raises: UsageError."""
    return text if text.isascii() else _decoded(os.fsencode(text), what, sys.getfilesystemencoding())


def piped() -> str:
    """All of standard input. Raises: UsageError when it is no text."""
    raw = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if raw is None else _decoded(raw.read(), "standard input", sys.stdin.encoding)


def _decoded(raw: bytes, what: str, encoding: str) -> str:
    """Bytes in UTF-8, or in the locale's encoding where that is another one."""
    is_other = encoding.lower().replace("_", "-") not in ("utf-8", "ascii", "us-ascii", "ansi-x3.4-1968")
    try:
        return raw.decode(encoding if is_other else "utf-8-sig")
    except UnicodeDecodeError as error:
        name = encoding if is_other else "UTF-8"
        raise UsageError(
            f"{what} is no text in {name}: byte {error.start} is 0x{raw[error.start]:02x}", "`iconv -t utf-8` converts text"
        ) from None


def kind_of(head: bytes) -> str:
    """What a file is, by its first bytes; "" for what may be text."""
    for start, kind in STARTS:
        if head.startswith(start) and not (start == b"BM" and b"\0" not in head[:64]):
            return kind
    if head[:4] == b"RIFF" and head[8:12] in INSIDE:
        return INSIDE[head[8:12]]
    if head[4:8] in INSIDE:
        return INSIDE[head[4:8]]
    return "a binary file" if b"\0" in head else ""


def _pdf_text(path: Path) -> str:
    """The text of a PDF, page after page. Raises: UnsupportedError (no reader installed, nothing but pictures), FileError."""
    try:
        import pypdfium2
    except ImportError:
        raise UnsupportedError(
            f"{path} is a PDF, and what reads PDFs is not installed", 'pip install "paddock[pdf]"', path=str(path)
        ) from None
    try:
        document: Any = pypdfium2.PdfDocument(path)
        pages = [page.get_textpage().get_text_range().strip() for page in document]
        document.close()
    except pypdfium2.PdfiumError as error:
        raise FileError(
            f"{path}: not a PDF that can be read: {error}", "is it encrypted or cut off?", path=str(path)
        ) from None
    if not any(pages):
        raise UnsupportedError(
            f"{path} holds no text: its {len(pages)} page(s) are pictures", "make text of them first", path=str(path)
        )
    return "\n\n".join(f"[page {i}]\n{text}" for i, text in enumerate(pages, 1)).replace("\r\n", "\n")
