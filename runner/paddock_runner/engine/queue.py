"""The waiting requests: bounded, fair between clients, shortest first with ageing within a client.

Each client has a counter of tokens served to it; the client with the lowest goes next. A client that comes (back) starts at no
less than the lowest counter of those at work, less a small head start, so that its first prompt is read at once and nobody saves up.
"""

from __future__ import annotations

import heapq

from .policy import Policy
from .request import Request

MIN_RETRY_MS, MAX_RETRY_MS = 100, 60_000
KEPT_CLIENTS = 1024
SPARE = 64
"""Entries of who no longer waits that a list of the waiting may have beside four for each that does, before it is made anew."""
AWAY_NS = 20_000_000
"""Who has not asked again so long after an answer does not do so at once."""
LATEST = 0.1
"""Weight of the latest time between two admissions, once there were as many as that takes."""
LIGHT = 8
"""A client is light beside one that has so many times its requests open."""

Entry = tuple[float, int, int, Request]
"""A request in a list: what it is ordered by, its place among those that came, and its number; a request that is put back has another number, so that its old entries count no more."""


class Client:
    """One client's counter and waiting requests. n_open: waiting and running.

    served_tokens: divided by the client's weight, so that twice the weight is served twice as much.
    """

    __slots__ = ("heap", "n_open", "n_waiting", "served_tokens", "weight")

    def __init__(self) -> None:
        self.served_tokens = 0.0
        self.weight = 1
        self.heap: list[Entry] = []
        self.n_waiting = 0
        self.n_open = 0


class WaitQueue:
    """Who waits and who is next. Knows no pages and no clock."""

    __slots__ = (
        "_admit_us",
        "_arrivals",
        "_deadlines",
        "_last_admit_ns",
        "_last_left_ns",
        "_n_after_oldest",
        "_n_away",
        "_n_pushed",
        "_n_waits",
        "_policy",
        "_reached",
        "busy",
        "clients",
        "highest",
        "last_arrival_ns",
        "n",
        "uncached_tokens",
    )

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.clients: dict[int, Client] = {}
        self.busy: dict[int, Client] = {}
        """Those of them that have something open: all others could be thousands, one for each session that ever was."""
        self.n = self.highest = 0
        """Requests that wait here, and the highest priority that ever came."""
        self.last_arrival_ns = 0
        """When the front got the last one: it is read here between steps, many at a time after a long one."""
        self.uncached_tokens = 0
        """Their tokens that were not cached when they came."""
        self._arrivals: list[Entry] = []
        self._deadlines: list[Entry] = []
        self._n_pushed = self._n_after_oldest = 0
        self._reached = 0.0
        """The counter of the last client that was at work, for when nobody is."""
        self._admit_us = 1000.0
        self._n_waits = 0
        self._last_admit_ns = 0
        self._n_away = self._last_left_ns = 0

    # ---- coming ----

    def open(self, client: int, weight: int = 1) -> None:
        """A request of this client has come; `close` is called when it has ended."""
        entry = self.clients.get(client)
        if entry is None:
            if len(self.clients) >= KEPT_CLIENTS:
                self._forget_idle()
            entry = self.clients[client] = Client()
        entry.weight = weight
        if not entry.n_open:
            lowest = min((c.served_tokens for c in self.busy.values()), default=self._reached)
            entry.served_tokens = max(entry.served_tokens, lowest - self._policy.head_start_tokens)
            self.busy[client] = entry
        entry.n_open += 1

    def close(self, client: int) -> None:
        """One of its requests has ended."""
        entry = self.clients[client]
        entry.n_open -= 1
        if not entry.n_open:
            del self.busy[client]
            if not self.busy:
                self._reached = max(self._reached, entry.served_tokens)

    def left(self, now_ns: int) -> None:
        """An answer has ended: its client may ask again at once."""
        self._n_away = 1 + (self._n_away if now_ns - self._last_left_ns < AWAY_NS else 0)
        self._last_left_ns = now_ns

    def expects_more(self, now_ns: int) -> bool:
        """More answers have ended lately than requests have come since."""
        return self._n_away > 0 and now_ns - self._last_left_ns < AWAY_NS

    def push(self, request: Request, cached_tokens: int, n_beside: int = 0) -> Request | None:
        """Takes a request in. Returns the one that must be refused instead, if the queue is full: perhaps this one.

        `open` was called for its client. The rest of an answer is always taken. The refused one is no longer in the queue, its client not yet closed. n_beside: requests that wait elsewhere.
        """
        client = self.clients[request.client]
        loser = None
        if self.n + n_beside >= self._policy.max_queue and not request.goes_on:
            heaviest = max(self.busy.values(), key=lambda c: c.n_waiting)
            if heaviest.n_waiting <= client.n_waiting + 1:
                return request
            loser = max(_queued(heaviest.heap))[3]
            self.drop(loser)
        request.place = self._n_pushed
        self._n_away -= self._n_away > 0
        if not request.goes_on:  # the slot that it had is free: nobody has to make way for it
            self.highest = max(self.highest, request.priority)
        self.last_arrival_ns = max(self.last_arrival_ns, request.received_ns)
        self._enter(request, cached_tokens)
        return loser

    @property
    def first_arrival_ns(self) -> int:
        """When the front got the one that has waited longest; 0: nobody waits."""
        return _first(self._arrivals)[3].received_ns if self.n else 0

    def put_back(self, request: Request, cached_tokens: int) -> None:
        """A request that was dropped, but neither started nor ended, waits again at its old place."""
        self._enter(request, cached_tokens)

    def _enter(self, request: Request, cached_tokens: int) -> None:
        policy = self._policy
        request.uncached_tokens = request.n_tokens - cached_tokens
        request.key = request.uncached_tokens + request.arrival_ns / 1e6 * policy.ageing_tokens_per_ms - request.priority * policy.priority_tokens
        client = self.clients[request.client]
        self._n_pushed += 1
        request.entry = number = self._n_pushed
        heapq.heappush(client.heap, (request.key, request.place, number, request))
        heapq.heappush(self._arrivals, (request.arrival_ns, request.place, number, request))
        client.n_waiting += 1
        self.n += 1
        self.uncached_tokens += request.uncached_tokens
        request.is_queued = True
        if request.deadline_ns:
            heapq.heappush(self._deadlines, (request.deadline_ns, request.place, number, request))

    # ---- going ----

    def head(self) -> Request | None:
        """Who is next; stays in the queue until `take`.

        The oldest's turn comes after that of a light client, whose prompt would wait for a whole one of the others' else; but there may always be another such client.
        """
        if not self.n:
            return None
        best: Request | None = None
        best_rank = 0.0
        bonus = self._policy.priority_tokens
        for client in self.busy.values():
            if client.n_waiting:
                request = _first(client.heap)[3]
                rank = client.served_tokens - request.priority * bonus
                if best is None or rank < best_rank or (rank == best_rank and request.key < best.key):
                    best, best_rank = request, rank
        every, n_after = self._policy.oldest_every, self._n_after_oldest
        is_due = n_after >= every - 1 and best is not None and (n_after >= 2 * every - 1 or not self.is_light(best.client))
        return _first(self._arrivals)[3] if is_due else best

    def take(self, request: Request, now_ns: int) -> None:
        """The request leaves to be admitted."""
        self._n_after_oldest = 0 if request is _first(self._arrivals)[3] else self._n_after_oldest + 1
        self.drop(request)
        if self._last_admit_ns and self.n:
            self._n_waits += 1
            self._admit_us += max(LATEST, 1 / self._n_waits) * ((now_ns - self._last_admit_ns) / 1000 - self._admit_us)
        self._last_admit_ns = now_ns

    def drop(self, request: Request) -> None:
        """The request leaves for whatever reason. Nothing happens when it is not in the queue."""
        if request.is_queued:
            client = self.clients[request.client]
            request.is_queued = False
            client.n_waiting -= 1
            self.n -= 1
            self.uncached_tokens -= request.uncached_tokens
            if not client.n_waiting:
                client.heap.clear()
            elif len(client.heap) > SPARE + 4 * client.n_waiting:
                client.heap = _made_anew(client.heap)
            if not self.n:
                self._arrivals.clear()
                self._deadlines.clear()
            elif len(self._arrivals) > SPARE + 4 * self.n:
                self._arrivals = _made_anew(self._arrivals)
            if len(self._deadlines) > SPARE + 4 * self.n:
                self._deadlines = _made_anew(self._deadlines)

    @property
    def next_deadline_ns(self) -> int | None:
        """When `overdue` has to be asked next."""
        return int(self._deadlines[0][0]) if self._deadlines else None

    def overdue(self, now_ns: int) -> Request | None:
        """A waiting request whose deadline has passed."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now_ns or not _counts(deadlines[0])):
            entry = heapq.heappop(deadlines)
            if _counts(entry):
                return entry[3]
        return None

    # ---- fairness ----

    def rank(self, request: Request) -> float:
        """Tokens its client has had, less the head start of its priority: the lowest goes first."""
        rank: float = self.clients[request.client].served_tokens - request.priority * self._policy.priority_tokens
        return rank

    def charge(self, client: int, n_tokens: int) -> None:
        """The client has been served n_tokens."""
        entry = self.clients[client]
        entry.served_tokens += n_tokens / entry.weight

    @property
    def is_contested(self) -> bool:
        """More than one client has something open."""
        return len(self.busy) > 1

    def is_light(self, client: int) -> bool:
        """This client has few requests open beside another that has many."""
        return LIGHT * self.clients[client].n_open <= max(c.n_open for c in self.busy.values())

    def retry_after_ms(self) -> int:
        """When a place is likely to be free again: the waiting ones times the time between admissions."""
        return int(min(MAX_RETRY_MS, max(MIN_RETRY_MS, (self.n + 1) * self._admit_us / 1000)))

    def waiting(self) -> list[Request]:
        """Every request in the queue, oldest first."""
        return [entry[3] for entry in sorted(_queued(self._arrivals))]

    def _forget_idle(self) -> None:
        """Of those without a request the half that was served least is forgotten: where they come back, they start little above who is new."""
        idle = sorted((c.served_tokens, key) for key, c in self.clients.items() if not c.n_open)
        for _, key in idle[: -(-len(idle) // 2)]:
            del self.clients[key]


def _counts(entry: Entry) -> bool:
    """The request still waits, and by this entry."""
    return entry[3].is_queued and entry[3].entry == entry[2]


def _first(heap: list[Entry]) -> Entry:
    """The first entry that counts. There is one."""
    while not _counts(heap[0]):
        heapq.heappop(heap)
    return heap[0]


def _queued(heap: list[Entry]) -> list[Entry]:
    return [entry for entry in heap if _counts(entry)]


def _made_anew(heap: list[Entry]) -> list[Entry]:
    """A heap of the entries that count: the others would keep their prompts until they came to its top."""
    kept = _queued(heap)
    heapq.heapify(kept)
    return kept
