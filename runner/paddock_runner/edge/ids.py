"""Names of requests, by which their owners and we find them again in logs."""

from __future__ import annotations

import secrets

HEADER = b"x-request-id"
_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")


def request_id(given: str) -> str:
    """The client's own request id where it is harmless, else a new one."""
    if 0 < len(given) <= 128 and _CHARACTERS.issuperset(given):
        return given
    return "req_" + secrets.token_hex(12)
