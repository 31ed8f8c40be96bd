"""Keys: this machine's own, made once and kept with mode 0600; and the list that its servers check, which holds hashes only.

keys/api_key        the key that this machine's own commands send; it may do everything
keys/server_keys    a line each: sha256:HEX SCOPE NAME [weight=N], for the key above and for those given to others; read by runners and gateways
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paddock_runner.errors import FileError, UnknownModel, UsageError

from paddock_manager.disk import alone, write_text
from paddock_manager.paths import Places

OWN = "this-machine"
SCOPES = ("inference", "admin")
WEIGHT, MAX_WEIGHT = "weight=", 1000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key that is let in. digest: SHA-256 of it, in hex. weight: how many times the share of one with weight 1 it gets of a busy server."""

    digest: str
    scope: str
    name: str
    weight: int = 1


def key_file(places: Places) -> Path:
    """The file with our own key; made when there is none.

    Raises: FileError when others may read it.
    """
    path = places.key_file
    if not path.exists():
        with _alone(places):
            if not path.exists():  # another command may have made one meanwhile
                _make(places)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FileError(f"{path} can be read by others", f"chmod 600 {path}, or `paddock key --new`", path=str(path))
    return path


def key(places: Places) -> str:
    """Our own key.

    Raises: FileError when the file is empty, cannot be read or is open to others.
    """
    path = key_file(places)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: cannot be read ({error})", "`paddock key --new` writes another", path=str(path)) from None
    for line in lines:
        if line.strip() and not line.startswith("#"):
            return line.strip()
    raise FileError(f"{path} holds no key", "`paddock key --new` writes one", path=str(path))


def make(places: Places) -> str:
    """Write a new key over the old one."""
    with _alone(places):
        return _make(places)


def _make(places: Places) -> str:
    fresh = _fresh()
    write_text(places.key_file, fresh + "\n", mode=0o600)
    return fresh


@contextmanager
def _alone(places: Places) -> Iterator[None]:
    """In the folder of keys, closed to others. A key that was taken out must not come back because somebody had read the list before."""
    with alone(places.key_file.parent):
        os.chmod(places.key_file.parent, 0o700)
        yield


def server_file(places: Places) -> Path:
    """The list that servers check, with our own key in it. Raises: FileError."""
    mine = _hash(key(places))
    with _alone(places):
        found = entries(places)
        own = Entry(mine, "admin", OWN, next((e.weight for e in found if e.name == OWN), 1))
        _write(places, [own, *(e for e in found if e.name != OWN)])
    return _list(places)


def entries(places: Places) -> list[Entry]:
    """Every key that is let in. Raises: FileError for a line that is none."""
    try:
        lines = _list(places).read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{_list(places)}: cannot be read ({error})", path=str(_list(places))) from None
    return [_entry(places, line) for line in lines if line.strip() and not line.startswith("#")]


def add(places: Places, name: str, scope: str, weight: int = 1) -> str:
    """A new key for somebody else. It is returned, and kept nowhere but as its hash. Raises: UsageError."""
    if not NAME.fullmatch(name) or name == OWN:
        raise UsageError(f"{name!r} cannot be the name of a key", "letters, digits, dots, dashes and underscores")
    with _alone(places):
        found = entries(places)
        if name in {e.name for e in found}:
            raise UsageError(f"there is a key {name} already", f"`paddock key rm {name}` first", name=name)
        fresh = _fresh()
        _write(places, [*found, Entry(_hash(fresh), scope, name, weight)])
    return fresh


def remove(places: Places, name: str) -> None:
    """Let a key in no more. Raises: UnknownModel."""
    with _alone(places):
        found = entries(places)
        kept = [e for e in found if e.name != name or e.name == OWN]
        if len(kept) == len(found):
            known = [e.name for e in found if e.name != OWN]
            raise UnknownModel(f"there is no key {name!r}", "there are " + ", ".join(known) if known else "", name=name)
        _write(places, kept)


def _list(places: Places) -> Path:
    return places.key_file.with_name("server_keys")


def _write(places: Places, found: list[Entry]) -> None:
    text = "".join(f"sha256:{e.digest} {e.scope} {e.name}{f' {WEIGHT}{e.weight}' if e.weight > 1 else ''}\n" for e in found)
    write_text(_list(places), text, mode=0o600)


def _entry(places: Places, line: str) -> Entry:
    words = line.split()
    weight = words.pop().removeprefix(WEIGHT) if words[-1].startswith(WEIGHT) else "1"
    digest = words[0].removeprefix("sha256:") if words else ""
    is_known = len(words) == 3 and re.fullmatch(r"[0-9a-f]{64}", digest) and words[1] in SCOPES
    if not is_known or not weight.isdecimal() or not 1 <= int(weight) <= MAX_WEIGHT:
        raise FileError(f"{_list(places)}: a line is sha256:HEX SCOPE NAME [{WEIGHT}N]", "remove the line", path=str(_list(places)))
    return Entry(digest, words[1], words[2], int(weight))


def _fresh() -> str:
    return "pk-" + secrets.token_urlsafe(32)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("latin-1", "replace")).hexdigest()
