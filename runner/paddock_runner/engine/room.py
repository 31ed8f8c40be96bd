"""Who makes room: when pages run out, for a client that has nothing running, and for a request of higher priority of the same client."""

from __future__ import annotations

from collections.abc import Sequence

from .queue import WaitQueue
from .request import Request

LEAST_SLOTS = 4
"""A client with fewer running requests does not make way for another's."""
MOST_PREEMPTED = 8
"""Who has made way so often does not for a higher priority: those could come for ever."""


def victim(running: Sequence[Request], queue: WaitQueue) -> Request | None:
    """Who makes way when pages have run out: one of the client that has most of them, by weight. The oldest of all always gets on; None: there is no other."""
    if len(running) < 2:
        return None
    oldest = min(running, key=lambda r: r.order)
    others = [r for r in running if r is not oldest]
    most = _most_pages(others, running, queue)
    return _least([r for r in others if r.client == most])


def yielder(head: Request, decoding: Sequence[Request], queue: WaitQueue, is_full: bool, has_none: bool) -> Request | None:
    """Who makes way for the queue's head when all slots are taken (is_full) or all pages. has_none: no other request of its client has a slot.

    One of a lower priority of the same client, a few times; or, where the client has nothing running, one of the client that has most of the slots, or of the pages.
    """
    own = [r for r in decoding if r.client == head.client]
    if lower := [r for r in own if r.priority < head.priority and r.n_preempted < MOST_PREEMPTED]:
        return _least(lower)
    n_running: dict[int, int] = {}
    for request in decoding:
        n_running[request.client] = n_running.get(request.client, 0) + 1
    many = [r for r in decoding if n_running[r.client] >= LEAST_SLOTS]
    if own or not has_none or not many:
        return None
    most = max((r.client for r in many), key=n_running.__getitem__) if is_full else _most_pages(many, many, queue)
    return _least([r for r in many if r.client == most])


def _least(requests: Sequence[Request]) -> Request:
    """The newest of those of the lowest priority."""
    return max(requests, key=lambda r: (-r.priority, r.order))


def _most_pages(candidates: Sequence[Request], running: Sequence[Request], queue: WaitQueue) -> int:
    """The client of a candidate whose running requests have the most pages, by weight."""
    n_pages: dict[int, float] = dict.fromkeys([r.client for r in candidates], 0.0)
    for request in running:
        if request.client in n_pages and request.holding is not None:
            n_pages[request.client] += len(request.holding.pages) / queue.clients[request.client].weight
    return max(n_pages, key=n_pages.__getitem__)
