"""What people type for a model, as a Ref: `org/repo[@rev][:quant]`, a short name `name[:quant]`, a local path, or a URL. A page or file of the hub is
its repository.

Only reads the text (and whether a path exists). What a Ref stands for is decided by the catalog, the store and the hub.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from paddock_runner.errors import UsageError

from paddock_manager import paths

PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
SHORT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
PAGE = re.compile(r"([^/]+/[^/]+)/(tree|blob|resolve)/(.+)")
SHAPE = "a model is org/repo[@revision][:quant], a short name, or a path such as ./model.gguf"


@dataclass(frozen=True, slots=True)
class Ref:
    """A model as named. Exactly one of repo, short, path, url is set; rev and quant narrow repo and short, file (from a URL of the hub) repo."""

    text: str
    repo: str = ""
    short: str = ""
    path: Path | None = None
    url: str = ""
    rev: str = ""
    quant: str = ""
    file: str = ""


def parse(text: str) -> Ref:
    """Read a name.

    Raises: UsageError when it has none of the shapes above.
    """
    word = text.strip()
    if not word or "\0" in word:
        raise UsageError(f"{text!r} names no model", SHAPE)
    on_hub = _on_hub(word)
    if on_hub is None and word.startswith(("http://", "https://")):
        return Ref(text, url=word)
    if on_hub is None and _is_path(word):
        return Ref(text, path=paths.expanded(word))
    if on_hub is not None:
        page = PAGE.fullmatch(on_hub)
        if page is not None:
            return _of_page(text, page)
        word = on_hub
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


def _on_hub(word: str) -> str | None:
    """What of an address of the hub, or of the mirror that is set, comes after its host; None for everything else."""
    address = re.sub(r"[?#].*", "", word).rstrip("/")
    if address.startswith("hf://"):
        return address.removeprefix("hf://")
    for host in (paths.hub_endpoint(), *HUB_HOSTS):
        for prefix in (f"{host}/", f"https://{host}/", f"http://{host}/"):
            if address.startswith(prefix):
                return unquote(address.removeprefix(prefix))
    return None


def _of_page(text: str, page: re.Match[str]) -> Ref:
    """A revision's page, or a file's. Raises: UsageError for a file that is no part of a model."""
    repo, kind, rest = page.groups()
    rev, _, file = (rest, "", "") if kind == "tree" else rest.partition("/")
    if not _is_revision(rev) or (kind != "tree" and not file.lower().endswith((".gguf", ".safetensors", ".json"))):
        raise UsageError(f"{text!r} names no model", SHAPE)
    return Ref(text, repo=check_repo(repo), rev="" if rev == "main" else rev, file=file if file.lower().endswith(".gguf") else "")


def foreign(ref: Ref) -> UsageError:
    """The error for a URL of elsewhere where a model is wanted: nothing says what its bytes should be."""
    hint = "download it and `paddock add` the file; `paddock inspect` and `paddock fit` read its header from there"
    return UsageError(f"{ref.url} is not on the hub, so nothing says what its bytes should be", hint, url=ref.url)


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
