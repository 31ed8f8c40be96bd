"""Front: what every handler needs, and how a handler reads its request and runs a turn."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from ..edge.auth import Guard
from ..edge.lists import Listed, plain_name
from ..errors import Cancelled, PaddockError, ShuttingDown, UnknownModel, UsageError
from ..text.vectors import VectorForm
from ..turns.desk import Desk
from ..turns.served import Served
from ..turns.turn import CacheNote, Caller, Turn
from . import misfit, pieces
from .http import MAX_IGNORED, Exchange
from .metrics import Metrics
from .outbox import Outbox
from .sse import EventStream
from .stored import Stored

if TYPE_CHECKING:
    from .mcp import Mcp

Body = TypeVar("Body")
Result = TypeVar("Result")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
MAX_SHOWN_BYTES = 1 << 20
"""Of larger bodies nobody is shown which value was wrong: all of it would have to be decoded, and that takes seconds where it is made for it."""
LARGE_BODY_BYTES = 1 << 20
"""Bodies from this on are decoded in pieces, and what they say is made out, in a thread: everybody's streams would stand meanwhile. Of half of it that takes 7 ms, in one piece half of one."""
CACHE = b"x-paddock-cache"
QUEUE_TIMEOUT = b"x-queue-timeout-ms"
MAX_QUEUE_MS = 86_400_000
SHOWN_CHARACTERS = 80


@dataclass(slots=True)
class Front:
    """The front's parts. phase: "loading", "ready", "draining" or "failed". start: the stages of the start (log.Stages)."""

    served: Served
    desk: Desk
    guard: Guard
    max_body_bytes: int = 32 << 20
    comment_s: float = 10.0
    phase: str = "loading"
    start: Sequence[dict[str, Any]] = ()
    metrics: Metrics = field(default_factory=Metrics)
    streams: set[EventStream] = field(default_factory=set)
    stored: Stored = field(default_factory=Stored)
    mcp: Mcp | None = None
    outbox: Outbox = field(default_factory=Outbox)

    def __post_init__(self) -> None:
        self.desk.together = self.outbox
        self.desk.on_taken = self.served.walker.push_step

    @property
    def listed(self) -> Listed:
        """The served model, for lists."""
        served = self.served
        return Listed(served.name, served.created_s, served.max_ctx_tokens, served.facts.get("memory_bytes", 0), served.facts)

    def require_ready(self) -> None:
        """Raises: ShuttingDown while the model loads or the runner drains."""
        if self.phase == "loading":
            raise ShuttingDown("the model is still loading", "try again in a moment")
        if self.phase != "ready":
            raise ShuttingDown("the runner is shutting down" if self.phase == "draining" else "the engine has ended")

    def require_model(self, name: str) -> None:
        """Raises: UnknownModel when a client asks for another model than the one that is served."""
        if plain_name(name) not in ("", "default", self.served.name):
            raise UnknownModel(
                f"the model {name[:200]!r} is not served here", f"this runner serves {self.served.name!r}",
                name=name, known=[self.served.name], param="model",
            )  # fmt: skip

    def require_text(self) -> None:
        """Raises: UsageError when the model gives vectors and writes no text."""
        if self.served.vectors is not None:
            where = "/v1/embeddings" if self.served.vectors.task == "embed" else "/v1/rerank and /v1/score"
            raise UsageError(f"{self.served.name} gives vectors and writes no text", f"use {where}", param="model")

    def require_vectors(self, task: str = "") -> VectorForm:
        """What the model's vectors are. Raises: UsageError when it generates text, or its vectors are for another task."""
        form = self.served.vectors
        if form is None:
            raise UsageError(f"{self.served.name} generates text and gives no vectors", "serve it with --task embed", param="model")
        if task and form.task != task:
            raise UsageError(f"{self.served.name} ranks documents and gives no embeddings", "use /v1/rerank or /v1/score", param="model")
        return form

    def require_tools(self) -> None:
        """Raises: UsageError when this model's answers cannot be searched for tool calls."""
        if not self.served.format.takes_tools:
            raise UsageError(
                "this model's chat template takes no tools",
                "leave `tools` out, or use a model that calls tools",
                param="tools",
            )

    async def understand(self, exchange: Exchange, work: Callable[[], Result]) -> Result:
        """Makes out what a request's body says: in a thread where it is large."""
        return await self.served.understand(work) if exchange.large_bytes else work()

    async def tick(self) -> None:
        """Gives silent streams their comments, for ever."""
        while True:
            await asyncio.sleep(self.comment_s / 2)
            for stream in list(self.streams):
                stream.tick()


class Shape(Generic[Body]):
    """A request body's type. Unknown fields are accepted, and named in a header of the answer."""

    def __init__(self, kind: type[Body], known: frozenset[str] = frozenset()) -> None:
        self.kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._strict: msgspec.json.Decoder[Body] = msgspec.json.Decoder(msgspec.defstruct(kind.__name__, (), bases=(kind,), forbid_unknown_fields=True))
        self._names = {f.encode_name for f in msgspec.structs.fields(kind)} | known  # type: ignore[arg-type]

    async def read(self, front: Front, exchange: Exchange) -> Body:
        """The request's body. Raises: UsageError naming the field, TooLarge, Cancelled."""
        raw = await exchange.body(front.max_body_bytes)
        exchange.large_bytes = len(raw) if len(raw) >= LARGE_BODY_BYTES else 0
        if exchange.large_bytes:
            body, unknown = await front.understand(exchange, partial(self._in_pieces, raw))
            unknown = self._unknown(raw) if unknown is None else [name for name in unknown if name not in self._names]
        else:
            try:
                return self._strict.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # it has fields that nobody knows, or is wrong
            body, unknown = self.parse(raw), self._unknown(raw)
        if unknown:
            exchange.ignored += [*map(plain_field, unknown[:MAX_IGNORED]), *unknown[MAX_IGNORED:]]  # of the rest only the number is told
        return body

    def _unknown(self, raw: bytes) -> list[str]:
        try:
            return [name for name in _RAW_FIELDS.decode(raw) if name not in self._names]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"the body is not JSON: {error}") from None

    def _in_pieces(self, raw: bytes) -> tuple[Body, list[str] | None]:
        return self._told(raw, partial(pieces.decode, raw, self.kind))

    def parse(self, raw: bytes) -> Body:
        """The typed body. Raises: UsageError (facts: param)."""
        return self._told(raw, partial(self._decoder.decode, raw))

    def _told(self, raw: bytes, decode: Callable[[], Result]) -> Result:
        try:
            return decode()
        except msgspec.ValidationError as error:
            raise misfit.of(error, _decoded(raw)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"the body is not JSON: {error}") from None
        except RecursionError:
            raise UsageError("the body is nested too deeply") from None


def _decoded(raw: bytes) -> Any:
    """The body without its types; ... where it is larger, None where it is deeper than that can be told."""
    if len(raw) > MAX_SHOWN_BYTES:
        return ...
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def plain_field(name: str) -> str:
    """A field's name as a header can tell it."""
    return name if _PLAIN_NAME.fullmatch(name) else "?"


def caller(exchange: Exchange, key: int, salt: str | None = None) -> Caller:
    """For whom a turn runs: the key, and within it the session that the client names; how long it may wait in the queue.

    Prefixes are shared only within a key, and within a key only among requests of one salt. Raises: UsageError.
    """
    session = exchange.header(b"x-session-id")
    client = key ^ _number(session) if session else key
    wait = exchange.header(QUEUE_TIMEOUT)
    if wait and not (wait.isdecimal() and 0 < int(wait) <= MAX_QUEUE_MS):
        raise UsageError(f"x-queue-timeout-ms: {wait[:40]!r} is no number from 1 to {MAX_QUEUE_MS}", param="x-queue-timeout-ms")
    deadline = exchange.received_ns + int(wait) * 1_000_000 if wait else 0
    return Caller(client, key ^ _number(salt) if salt else key, exchange.received_ns, exchange.weight, deadline)


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


async def run_turn(front: Front, exchange: Exchange, turn: Turn) -> None:
    """Runs a turn to its end; aborts it at once when the client leaves, in whatever phase.

    Raises: what the turn ended with; Cancelled when the client left.
    """
    turn.on_cache = partial(_note_cache, exchange)
    gone = asyncio.get_running_loop().create_task(exchange.until_gone())
    gone.add_done_callback(lambda task: None if task.cancelled() else turn.cancel())
    try:
        turn.start()
        await turn.ended
    finally:
        gone.cancel()
        turn.abandon()
        _account(front, exchange, turn)


async def run_alone(exchange: Exchange, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs what has no turn to its end; ends it at once when the client leaves. Raises: what the work raises, Cancelled."""
    loop = asyncio.get_running_loop()
    task, gone = loop.create_task(work), loop.create_task(exchange.until_gone())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client left")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def run_stream(front: Front, exchange: Exchange, turn: Turn, stream: EventStream) -> None:
    """As run_turn for a turn that writes to a stream; afterwards the stream is to be finished."""
    front.streams.add(stream)
    try:
        await run_turn(front, exchange, turn)
    except PaddockError as error:
        if not isinstance(error, Cancelled):
            await stream.settle()
        raise
    finally:
        front.streams.discard(stream)


def account_vectors(front: Front, exchange: Exchange, n_inputs: int, n_tokens: int) -> None:
    """Inputs became vectors, or scores."""
    front.metrics.on_vectors(n_tokens)
    exchange.log.update(prompt_tokens=n_tokens, inputs=n_inputs)


def _note_cache(exchange: Exchange, note: CacheNote, text: str) -> None:
    """Tells the client, in a header, why not more of its prompt was cached; the log gets numbers, never text."""
    miss = note.miss.name.lower()
    words = [f"miss={miss}", f"cached={note.cached_tokens}", f"prompt={note.prompt_tokens}"]
    if note.miss:
        words.append(f"at={note.known_tokens}")
        exchange.log.update(cache_miss=miss, cache_miss_at=note.known_tokens)
    if text:
        words.append("text=" + quote(text[:SHOWN_CHARACTERS]))
    exchange.extra.append((CACHE, "; ".join(words).encode()))


def _account(front: Front, exchange: Exchange, turn: Turn) -> None:
    usage, timing, gaps = turn.usage, turn.timing, turn.gaps_ns
    front.metrics.on_turn(usage, turn.begun_tokens, timing, gaps)
    exchange.log.update(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, output_tokens=usage.output_tokens)
    if timing.started_ns:
        exchange.log.update(queue_ms=round(timing.queued_ns / 1e6, 3))
    if timing.first_token_ms is not None:
        exchange.log.update(prefill_ms=round(timing.prefill_ms or 0.0, 3), first_token_ms=round(timing.first_token_ms, 3))
    if gaps:
        mean, p50, p99 = sum(gaps) / len(gaps), gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100]
        exchange.log.update(gap_ms=round(mean / 1e6, 3), gap_p50_ms=round(p50 / 1e6, 3), gap_p99_ms=round(p99 / 1e6, 3))
    exchange.log.update(
        preempted=turn.n_preempted or None,
        **({"drafted_tokens": usage.drafted_tokens, "accepted_tokens": usage.accepted_tokens} if usage.drafted_tokens else {}),
        end=",".join(sorted({c.end.reason for c in turn.choices if c.end is not None})) or None,
    )  # fmt: skip
