"""Reading the fronts' records: new asks, aborts, masks, questions, and fronts that have gone."""

from __future__ import annotations

from ..wire.guesses import Walked
from ..wire.messages import (
    ABORT,
    MASK,
    QUERY,
    AskView,
    BadField,
    ErrorCode,
    Kind,
    Reason,
    Refused,
    RefusedCode,
    State,
)
from ..wire.port import EnginePort
from .loop import LIFE_CHECK_NS, Engine
from .report import report
from .request import Request
from .sampling import place

MAX_RECORDS = 64
"""Records of one front between two steps: a burst of new asks does not hold up those that run."""


class Intake:
    """Feeds an engine from its ports."""

    __slots__ = ("_checked_ns", "_engine")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._checked_ns = 0

    def read(self) -> None:
        """Takes in what has come on every port, and the deadlines that have passed."""
        engine = self._engine
        for index, port in enumerate(engine.ports):
            if not port.is_dead and not port.reader.is_empty:
                self._read_port(index, port)
        now = engine.clock()
        due_ns = engine.scheduler.queue.next_deadline_ns
        if due_ns is not None and due_ns <= now:
            while (request := engine.scheduler.queue.overdue(now)) is not None:
                self._refuse_late(request, now)
        if engine.scheduler.held:
            for request in [r for r in engine.scheduler.held if 0 < r.deadline_ns <= now]:
                self._refuse_late(request, now)
        if now - self._checked_ns > LIFE_CHECK_NS:
            self._checked_ns = now
            self.check_fronts()

    def _refuse_late(self, request: Request, now: int) -> None:
        waited, allowed = now - request.received_ns, request.deadline_ns - request.received_ns
        self._engine.refuse(request, RefusedCode.DEADLINE, waited // 1_000_000, allowed // 1_000_000)

    def check_fronts(self) -> None:
        """Ends the requests of fronts that have died, or that do not read."""
        engine = self._engine
        for index, port in enumerate(engine.ports):
            if port.is_closed or (not port.is_dead and port.peer_is_alive()):
                continue
            for request in list(engine.requests[index].values()):
                engine.end(request, Reason.ABORT, ErrorCode.FRONT)
            port.close()

    def _read_port(self, index: int, port: EnginePort) -> None:
        engine, reader = self._engine, port.reader
        for _ in range(MAX_RECORDS):
            payload = reader.next()
            if payload is None:
                break
            kind = reader.kind
            if kind == Kind.ASK:
                self._ask(AskView(payload), index, port)
            elif kind == Kind.ABORT:
                request = engine.requests[index].get(ABORT.unpack_from(payload)[0])
                if request is not None:
                    engine.end(request, Reason.ABORT)
            elif kind == Kind.MASK:
                self._mask(payload, index)
            elif kind == Kind.WALKED:
                self._walked(payload, index)
            elif kind == Kind.QUERY:
                port.send(Kind.STATE, State(QUERY.unpack_from(payload)[0], report(engine)).encode())
            payload.release()
        reader.done()

    def _ask(self, ask: AskView, index: int, port: EnginePort) -> None:
        engine = self._engine
        requests, counters, queue = engine.requests[index], engine.counters, engine.scheduler.queue
        counters.requests += 1
        placed: tuple[bytes, int] | Refused
        if ask.ask_id in requests:
            placed = Refused(ask.ask_id, RefusedCode.BAD_ASK, 0, ask.ask_id, 0, BadField.ASK_ID)
        else:
            placed = place(ask, engine.sizes)
        if isinstance(placed, Refused):
            counters.refused[placed.code] += 1
            port.send(Kind.REFUSED, placed.encode())
            return
        request = Request(ask, index, engine.clock(), placed[1], placed[0])
        requests[ask.ask_id] = request
        if queue.busy and request.client not in queue.busy:
            engine.scheduler.charge_decoding()  # it starts by what the others have had
        queue.open(request.client, request.weight)
        n_held = len(engine.scheduler.held)
        loser = queue.push(request, engine.ledger.cached(request.tokens, request.salt), n_held)
        if loser is not None:
            engine.refuse(loser, RefusedCode.QUEUE_FULL, queue.n + n_held, engine.policy.max_queue)
        engine.scheduler.freed()

    def _mask(self, payload: memoryview, index: int) -> None:
        ask_id, at, n_words, n_sure, _ = MASK.unpack_from(payload)
        request = self._engine.requests[index].get(ask_id)
        if request is None or not request.use_mask:
            return
        begin, sizes = MASK.size + 4 * n_sure, self._engine.sizes
        sure = payload[MASK.size : begin].cast("i").tolist() if n_sure else ()
        if n_words != sizes.mask_words or any(not 0 <= token < sizes.n_vocab for token in sure):
            self._engine.end(request, Reason.ERROR, ErrorCode.MASK)
            return
        for token in sure:
            request.sure[at] = token
            at += 1
        request.masks[at] = bytes(payload[begin : begin + 4 * n_words])

    def _walked(self, payload: memoryview, index: int) -> None:
        sizes = self._engine.sizes
        request = self._engine.requests[index].get(ABORT.unpack_from(payload)[0])
        if request is None or not request.use_mask:
            return
        walked = Walked.decode(payload, sizes.mask_words, sizes.n_vocab)
        if walked is None:
            self._engine.end(request, Reason.ERROR, ErrorCode.MASK)
        elif walked.index == request.walk_index and request.walked is None:
            request.walked = dict(enumerate(walked.places, walked.first))
