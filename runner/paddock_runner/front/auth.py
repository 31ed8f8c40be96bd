"""Who may call: bearer keys (also on loopback), and which Host and Origin a request may carry."""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import FileError, Forbidden, Unauthorized, UsageError
from .http import Exchange

MAX_KEY_FILE_BYTES = 1 << 20
LOCAL_NAMES = frozenset({"localhost", "ip6-localhost", "host.docker.internal"})
_ANYBODY = 1


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file: one a line, `#` starts a comment. Raises: FileError when it cannot be read or holds none."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_KEY_FILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FileError(
            f"the key file {path} cannot be read: {reason}", "check --api-key-file", path=str(path)
        ) from None
    keys = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    if not keys:
        raise FileError(f"the key file {path} holds no key", "write one key a line, or use --no-auth", path=str(path))
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise FileError(f"a key in {path} is not plain ASCII, so no HTTP header can carry it", path=str(path))
    return keys


def made_keys(path: Path) -> tuple[tuple[str, ...], bool]:
    """The keys of a file that is made (mode 0600, one random key) when it is not there. Returns also whether it was made."""
    if path.exists():
        return read_keys(path), False
    key = "pk-" + secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(key + "\n")
        os.replace(part, path)
    except OSError as error:
        raise FileError(f"the key file {path} cannot be written: {error.strerror}", path=str(path)) from None
    return (key,), True


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
    """Checks Host and Origin, then the key. keys: () lets everybody in."""

    def __init__(self, keys: Iterable[str], hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._hosts = LOCAL_NAMES | {h.lower() for h in hosts} | {socket.gethostname().lower()}
        self._origins = frozenset(o.rstrip("/").lower() for o in origins)

    def check_origin(self, exchange: Exchange) -> str:
        """The allowed Origin of a request from a browser, or "". Raises: Forbidden.

        A Host that is neither an address, this machine's name nor allowed is refused: that is how DNS rebinding arrives.
        """
        if exchange.header_count(b"host") > 1:
            raise Forbidden("the request names more than one Host")
        host = exchange.header(b"host")
        if host and not self._is_known(host):
            raise Forbidden(f"the host {host[:100]!r} is not allowed", "start the runner with --allow-host NAME")
        origin = exchange.header(b"origin").rstrip("/").lower()
        if not origin:
            return ""
        if origin in self._origins or "*" in self._origins or origin.split("://")[-1] == host.lower():
            return origin
        raise Forbidden(f"the origin {origin[:100]!r} is not allowed", "start the runner with --allow-origin ORIGIN")

    def check_key(self, exchange: Exchange) -> int:
        """A number for this caller, for fairness: the same for the same key. Raises: Unauthorized."""
        given = _key_of(exchange)
        if not self._keys:
            return _number(given) if given else _ANYBODY
        raw = given.encode("latin-1", "replace")
        found = 0
        for key in self._keys:
            found |= hmac.compare_digest(raw, key)
        if not found:
            what = "a wrong API key was sent" if given else "no API key was sent"
            raise Unauthorized(what, "send the header `Authorization: Bearer KEY`; `paddock key` shows the key")
        return _number(given)

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._hosts or name.endswith(".localhost") or "*" in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _key_of(exchange: Exchange) -> str:
    scheme, _, key = exchange.header(b"authorization").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return exchange.header(b"x-api-key")


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") or 1
