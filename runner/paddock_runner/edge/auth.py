"""Who may call: keys (also on loopback) with what they may do, and which Host and Origin a request may carry.

A runner's port and a gateway's ask the same.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import FileError, Forbidden, Unauthorized, UsageError

MAX_KEY_FILE_BYTES = 1 << 20
LOCAL_NAMES = frozenset({"localhost", "ip6-localhost", "host.docker.internal"})
KEY_HEADERS = ("authorization", "x-api-key", "api-key")
ADMIN, INFERENCE = "admin", "inference"
HASHED = "sha256:"
_ANYBODY = 1
MAX_KNOWN = 64
WEIGHT = "weight="
MAX_WEIGHT = 1000


USUAL_HEADERS = "authorization, content-type, x-api-key, api-key, x-session-id, anthropic-version, anthropic-beta"
METHODS = "GET, POST, DELETE, OPTIONS"
SHOWN_HEADERS = "x-request-id, x-paddock-ignored-fields, x-paddock-cache, retry-after-ms"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_\-, ]{1,2000}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the same number for the same key, for fairness. key: what was sent. weight: see Key."""

    number: int
    key: str = ""
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Key:
    """One key that is let in: the SHA-256 of it (keys are long and random, so no salt is needed), what it may do, and its share.

    weight: how many times the share of a client with weight 1 it gets of a busy device.
    """

    digest: bytes
    scope: str = ADMIN
    weight: int = 1


def key_of(text: str, scope: str = ADMIN) -> Key:
    """A key that is known in the clear."""
    return Key(sha256(text.encode("latin-1", "replace")).digest(), scope)


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys in a file: a line each, `KEY [SCOPE [NAME]] [weight=N]`. KEY may be its hash, as sha256:HEX; SCOPE is admin or inference.

    `#` starts a comment. Raises: FileError when the file cannot be read, holds no key or a line that is none.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_KEY_FILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FileError(
            f"the key file {path} cannot be read: {reason}", "check --api-key-file", path=str(path)
        ) from None
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        raise FileError(f"the key file {path} holds no key", "write one key a line, or use --no-auth", path=str(path))
    return tuple(_read_line(path, number, words) for number, words in enumerate(lines, 1))


def _read_line(path: Path, number: int, words: list[str]) -> Key:
    weight = 1
    if len(words) > 1 and words[-1].startswith(WEIGHT):
        text = words.pop().removeprefix(WEIGHT)
        if not text.isdecimal() or not 1 <= (weight := int(text)) <= MAX_WEIGHT:
            raise FileError(f"key {number} in {path}: {text[:20]!r} is no weight from 1 to {MAX_WEIGHT}", "weight=2 gives twice the share", path=str(path))
    key, scope = words[0], words[1] if len(words) > 1 else ADMIN
    if scope not in (ADMIN, INFERENCE) or len(words) > 3:
        raise FileError(
            f"key {number} in {path}: {scope[:40]!r} is not a scope",
            "a line is KEY [admin|inference [NAME]] [weight=N]",
            path=str(path),
        )
    if not (key.isascii() and key.isprintable()):
        raise FileError(f"a key in {path} is not plain ASCII, so no HTTP header can carry it", path=str(path))
    if not key.startswith(HASHED):
        return replace(key_of(key, scope), weight=weight)
    try:
        digest = bytes.fromhex(key.removeprefix(HASHED))
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise FileError(f"key {number} in {path} is no SHA-256 in hex", path=str(path))
    return Key(digest, scope, weight)


def make_key(path: Path) -> bool:
    """A file with one random key (mode 0600), where there is none. Returns whether it was made. Raises: FileError."""
    if path.exists():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write("pk-" + secrets.token_urlsafe(32) + "\n")
        os.replace(part, path)
    except OSError as error:
        raise FileError(f"the key file {path} cannot be written: {error.strerror}", path=str(path)) from None
    return True


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, has_keys: bool) -> None:
    """Raises: UsageError when the server would listen beyond this machine without a key."""
    if not has_keys and not is_loopback(host):
        raise UsageError(
            f"without a key the runner listens on loopback only, not on {host}", "drop --no-auth or --host"
        )


class Guard:
    """Checks Host and Origin, then the key. keys: () lets everybody in; one in the clear may do everything; or who tells them, asked for each call."""

    def __init__(self, keys: Iterable[Key | str] | Callable[[], tuple[Key, ...]], hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        fixed = () if callable(keys) else tuple(key_of(key) if isinstance(key, str) else key for key in keys)
        self._keys = keys if callable(keys) else lambda: fixed
        self._hosts = LOCAL_NAMES | {h.lower() for h in hosts} | {socket.gethostname().lower()}
        self._known: set[str] = set()
        """Values of Host that were looked at and may come, a few of them."""
        self._origins = frozenset(o.rstrip("/").lower() for o in origins)

    def check_origin(self, hosts: Sequence[str], origin: str) -> str:
        """The allowed Origin of a request from a browser, or "". hosts: the values of its Host headers. Raises: Forbidden.

        A Host that is neither an address, this machine's name nor allowed is refused: that is how DNS rebinding arrives. Pages
        of this machine may call; a page from elsewhere cannot have such an origin.
        """
        if len(hosts) > 1:
            raise Forbidden("the request names more than one Host")
        host = hosts[0] if hosts else ""
        if host and host not in self._known:
            if not self._is_known(f"//{host}"):
                hint = "use its address, or localhost; `paddock serve --runner allow-host=NAME` (`paddock-runner --allow-host NAME`) allows another name"
                raise Forbidden(f"the host {host[:100]!r} is not allowed", hint)
            if len(self._known) < MAX_KNOWN:
                self._known.add(host)
        origin = origin.rstrip("/").lower()
        if not origin or origin in self._origins or "*" in self._origins:
            return origin
        if origin.split("://")[-1] == host.lower() or self._is_here(origin):
            return origin
        hint = "`paddock serve --runner allow-origin=ORIGIN` (`paddock-runner --allow-origin ORIGIN`) lets it"
        raise Forbidden(f"the origin {origin[:100]!r} is not allowed", hint)

    def check_key(self, given: Sequence[str], scope: str = INFERENCE) -> Caller:
        """Who this is. given: what was sent in the headers of KEY_HEADERS; each is looked at, in constant time.

        scope: what the key must be good for. Raises: Unauthorized; Forbidden for a key that may not do this.
        """
        sent = [text for value in given if (text := _bare(value.strip()))]
        keys = self._keys()
        if not keys:
            return Caller(_number(sent[0]), sent[0]) if sent else Caller(_ANYBODY)
        found, is_admin, caller, weight = 0, 0, "", 1
        for text in sent:
            digest = sha256(text.encode("latin-1", "replace")).digest()
            for key in keys:
                is_this = hmac.compare_digest(digest, key.digest)
                found |= is_this
                is_admin |= is_this and key.scope == ADMIN
                caller = text if is_this else caller
                weight = key.weight if is_this else weight
        if not found:
            what = "a wrong API key was sent" if sent else "no API key was sent"
            raise Unauthorized(what, "send the header `Authorization: Bearer KEY`; `paddock key` shows the key")
        if scope == ADMIN and not is_admin:
            raise Forbidden("this key is for inference only", "take a key of the scope admin")
        return Caller(_number(caller), caller, weight)

    def _is_known(self, url: str) -> bool:
        """A Host of this machine, or one that was allowed."""
        name = _name_of(url)
        return "*" in self._hosts or self._is_ours(name) or _address(name) is not None

    def _is_here(self, origin: str) -> bool:
        """A page that this machine serves."""
        name = _name_of(origin)
        address = _address(name)
        return self._is_ours(name) or (address is not None and address.is_loopback)

    def _is_ours(self, name: str) -> bool:
        return name in self._hosts or name.endswith(".localhost")


def allowing(origin: str, wanted: str = "") -> list[tuple[bytes, bytes]]:
    """The headers that let a page with an allowed origin read the answer; none for "", which is no page.

    wanted: headers that its browser asks for beforehand; SDKs send many of their own.
    """
    if not origin:
        return []
    headers = wanted if _HEADER_NAMES.fullmatch(wanted) else USUAL_HEADERS
    told = {"origin": origin, "headers": headers, "methods": METHODS, "private-network": "true"}
    return [
        *((f"access-control-allow-{name}".encode(), value.encode()) for name, value in told.items()),
        (b"access-control-expose-headers", SHOWN_HEADERS.encode()),
        (b"vary", b"origin"),
    ]


def _name_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _bare(value: str) -> str:
    """A key without the word Bearer."""
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else value


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") or 1
