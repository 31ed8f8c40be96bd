"""Requests whose pages are on disk: how long they wait for them, once."""

from __future__ import annotations

from ..cache.fetching import Price, fetch
from ..cache.ledger import Ledger
from .request import Request

MAX_FETCH_NS = 2_000_000_000
"""How much longer than expected pages from disk are waited for before the prompt is computed after all."""


def begin_fetch(request: Request, ledger: Ledger, price: Price, now_ns: int) -> bool:
    """Pages of its prompt are on disk and worth waiting for. False, too, for who has waited already."""
    if ledger.tree.tiers is None or request.fetch_until_ns:
        return False
    request.fetch = fetch(ledger, request.tokens, request.salt, price)
    if request.fetch is None:
        return False
    request.fetch_version = ledger.tier_version
    request.fetch_until_ns = now_ns + MAX_FETCH_NS + int(1000 * request.fetch.left_us)
    return True


def is_fetching(request: Request, ledger: Ledger, price: Price, now_ns: int) -> bool:
    """They are still worth waiting for. It is looked at again when file threads have done something."""
    found, version = request.fetch, ledger.tier_version
    if found is None or request.fetch_until_ns <= 0:
        return False
    if now_ns < request.fetch_until_ns and version == request.fetch_version:
        return True
    n_there, request.fetch_version = found.n_there, version
    if now_ns < request.fetch_until_ns and found.go_on(price):
        if found.n_there > n_there:
            request.fetch_until_ns = now_ns + MAX_FETCH_NS + int(1000 * found.left_us)
        return True
    found.stop()
    request.fetch_until_ns = -1
    return False


def let_go(request: Request) -> None:
    """What it has waited for is held otherwise, or of no use to it."""
    if request.fetch is not None:
        request.fetch.close()
        request.fetch = None
