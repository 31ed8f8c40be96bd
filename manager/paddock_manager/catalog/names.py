"""What people type for a model, as a Ref: `org/repo[@rev][:quant]`, a short name `name[:quant]`, a local path, or a URL.

Only reads the text (and whether a path exists). What a Ref stands for is decided by the catalog, the store and the hub.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paddock_runner.errors import UsageError

PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
SHORT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
SHAPE = "a model is org/repo[@revision][:quant], a short name, or a path such as ./model.gguf"


@dataclass(frozen=True, slots=True)
class Ref:
    """A model as named. Exactly one of repo, short, path, url is set; rev and quant narrow repo and short."""

    text: str
    repo: str = ""
    short: str = ""
    path: Path | None = None
    url: str = ""
    rev: str = ""
    quant: str = ""


def parse(text: str) -> Ref:
    """Read a name.

    Raises: UsageError when it has none of the shapes above.
    """
    word = text.strip()
    if not word or "\0" in word:
        raise UsageError(f"{text!r} names no model", SHAPE)
    if word.startswith(("http://", "https://")):
        return Ref(text, url=word)
    if _is_path(word):
        return Ref(text, path=Path(word).expanduser())
    word = word.removeprefix("hf.co/").removeprefix("huggingface.co/")
    head, _, quant = word.partition(":")
    name, at, rev = head.partition("@")
    if (":" in word and not QUANT.fullmatch(quant)) or (at and not _is_revision(rev)):
        raise UsageError(f"{text!r} is not a model name", SHAPE)
    if quant.lower() == "latest":
        raise UsageError("nothing is called latest: name the quant", SHAPE)
    if "/" in name:
        return Ref(text, repo=check_repo(name), rev=rev, quant=quant)
    if not SHORT.fullmatch(name):
        raise UsageError(f"{text!r} is not a model name", SHAPE)
    return Ref(text, short=name, rev=rev, quant=quant)


def check_repo(name: str) -> str:
    """A repository name that can neither leave the store nor another repository's URL.

    Raises: UsageError.
    """
    parts = name.split("/")
    if len(parts) != 2 or not all(PART.fullmatch(p) and ".." not in p and not p.endswith(".") for p in parts):
        raise UsageError(f"{name!r} is not a repository name", "a repository is org/repo")
    return name


def _is_revision(rev: str) -> bool:
    return bool(REVISION.fullmatch(rev)) and ".." not in rev and "//" not in rev


def _is_path(word: str) -> bool:
    """Paths say so: they start with a dot, a slash or a tilde, or name a checkpoint file that is there."""
    if word.startswith(("/", "./", "../", "~")) or word in (".", ".."):
        return True
    if word.lower().endswith((".gguf", ".safetensors")) and (os.sep not in word or Path(word).exists()):
        return True
    return os.sep in word and Path(word).is_dir() and (Path(word) / "config.json").exists()


def safe_file(name: str) -> str:
    """A file name from the network that is safe to use below a folder.

    Raises: UsageError for anything absolute, climbing, reserved, too long or with control characters.
    """
    parts = name.split("/")
    bad = (
        not name
        or "\\" in name
        or ":" in name
        or not name.isprintable()
        or any(p in ("", ".", "..") or p.endswith((".", " ")) or len(p.encode()) > 255 for p in parts)
        or any(p.split(".")[0].upper() in RESERVED for p in parts)
        or parts[0] == ".paddock"
    )
    if bad:
        raise UsageError(f"the file name {name!r} is not safe to store", file=name)
    return name


def check_distinct(files: Iterable[str]) -> None:
    """Raises: UsageError when two names are the same on a file system that knows no case, or composes letters."""
    seen: dict[str, str] = {}
    for name in files:
        folded = unicodedata.normalize("NFC", name).casefold()
        if folded in seen:
            raise UsageError(
                f"the file names {seen[folded]!r} and {name!r} differ only in case or in how letters are composed"
            )
        seen[folded] = name


RESERVED = {"CON", "PRN", "AUX", "NUL", *(f"{d}{n}" for d in ("COM", "LPT") for n in range(1, 10))}
