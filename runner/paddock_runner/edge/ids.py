"""Names of requests, by which their owners and we find them again in logs."""

from __future__ import annotations

import secrets

from .problem import ANTHROPIC, vendor_of

HEADER = b"x-request-id"
ANTHROPICS = b"request-id"
"""The same for Anthropic's clients."""
_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")


def request_id(given: str) -> str:
    """The client's own request id where it is harmless, else a new one."""
    if 0 < len(given) <= 128 and _CHARACTERS.issuperset(given):
        return given
    return "req_" + secrets.token_hex(12)


def id_headers(name: str, path: str) -> list[tuple[bytes, bytes]]:
    """The headers that tell a request's name to the clients of a path."""
    headers = [(HEADER, name.encode())]
    return [*headers, (ANTHROPICS, name.encode())] if vendor_of(path) == ANTHROPIC else headers
