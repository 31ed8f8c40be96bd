"""Requests that wait for another: for what both begin with, or for its turn at the device's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..cache.ledger import Ledger
from ..cache.prefix import Node, first_difference
from .request import NEVER, Phase, Request

MAX_WOKEN = 8
"""Prompts of a client that are looked at when the part has read one."""


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


def awake(held: Sequence[Request], is_fetching: Callable[[Request], bool]) -> tuple[list[Request], list[Request]]:
    """Who still waits, and who need not any more: what both begin with is there, or its computer has left, or the part has read one.

    Of a client's prompts that wait for the part the next few are looked at each time, and the others wait for the last of those from then on.
    """
    still, back, freed = list[Request](), list[Request](), dict[int, list[Request]]()
    for request in held:
        other, n = request.wait_for, request.wait_tokens
        if (other is not None and (
            (other.phase == Phase.PREFILL and (other.done_tokens < n or other.is_coming)) or (other.phase == Phase.WAITING and n == NEVER)
        )) or is_fetching(request):
            still.append(request)
        elif n == NEVER:
            freed.setdefault(request.client, []).append(request)
        else:
            back.append(request)
    for group in freed.values():
        group.sort(key=lambda request: request.key)
        back += group[:MAX_WOKEN]
        for request in group[MAX_WOKEN:]:
            request.wait_for = group[MAX_WOKEN - 1]
            still.append(request)
    return still, back
