"""Requests that begin alike: who computes first what another needs."""

from __future__ import annotations

from collections.abc import Sequence

from ..cache.ledger import Ledger
from ..cache.prefix import Node, first_difference
from .request import Request


def must_wait(request: Request, reading: Sequence[Request], saves: Sequence[tuple[Request, Node, int]], ledger: Ledger, share_tokens: int) -> bool:
    """Another prompt is about to compute share_tokens or more of what this one needs, as far as it goes: it waits for that, and is told for whom.

    reading: prompts that are being read; saves: whose states are about to be saved.
    """
    if not (reading or saves) or not ledger.is_shared:
        return False
    page_tokens, known = ledger.page_tokens, ledger.cached(request.tokens, request.salt)
    last = (request.n_tokens - 1) // page_tokens * page_tokens
    for other in reading:
        if other.salt != request.salt or min(last, other.n_tokens) - known < share_tokens:
            continue
        n = min(last, common_tokens(request, other) // page_tokens * page_tokens)
        if n - known < share_tokens:
            continue
        if (ledger.states is not None or ledger.windows is not None) and other.done_tokens >= n:
            continue
        if ledger.states is not None:
            other.marks = sorted({*other.marks, n})
        request.wait_for, request.wait_tokens = other, n
        return True
    for other, _, _ in saves:
        at = other.done_tokens
        if other.salt == request.salt and known + share_tokens <= at <= last and common_tokens(request, other) >= at:
            request.wait_for, request.wait_tokens = other, at
            return True
    return False


def common_tokens(a: Request, b: Request) -> int:
    """Tokens with which both begin."""
    return first_difference(a.tokens, b.tokens, 0, 4 * min(a.n_tokens, b.n_tokens)) // 4
