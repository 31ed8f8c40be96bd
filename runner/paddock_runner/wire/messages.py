"""The records that front and engine exchange: fields, layout, sizes.

Every record is little-endian, a multiple of 8 bytes, and starts with the ring's own 8-byte header (see ring.py), which carries
the kind and the size; the layouts below begin after it. Token ids stay int32 buffers on both sides.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import Any

from ..errors import Busy, ContextTooLong, PackError, PaddockError, UsageError
from .guesses import Guessed, Walked

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a record is. Those below 16 go from front to engine, the others back."""

    ASK = 1
    ABORT = 2
    MASK = 3
    QUERY = 5
    WALKED = 6
    BIND = 16
    STEP = 17
    STARTED = 18
    DONE = 19
    REFUSED = 20
    STATE = 21
    VECTOR = 22
    GUESS = 23


class Reason(IntEnum):
    """Why an ask ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class RefusedCode(IntEnum):
    """Why an ask was not (or will never be) served. `need` and `have` are the two numbers."""

    QUEUE_FULL = 1
    """Too many asks are waiting: need = waiting, have = limit; retry_after_ms says when to come back."""
    CONTEXT = 2
    """Prompt plus answer exceed the context: need = prompt tokens, have = context tokens, asked = max_tokens."""
    PAGES = 3
    """More KV pages than exist: need = pages of prompt and answer, have = pages in all."""
    DEADLINE = 4
    """It waited longer than its deadline: need = waited ms, have = allowed ms."""
    BAD_ASK = 6
    """A field is out of range (front's fault): need = the value, have = its limit, asked = which (BadField)."""


class Miss(IntEnum):
    """Why not more of a prompt was cached."""

    NONE = 0
    """All that could be cached was."""
    NEW = 1
    """Nothing is known that begins as this prompt does."""
    DIFFERS = 2
    """It is known up to a token, and goes on otherwise."""
    STATE = 3
    """More is known, but no recurrent states were kept there to go on from."""
    OFF = 4
    """This model's prefixes are not kept."""


class BadField(IntEnum):
    """Which field of an Ask was out of range."""

    PROMPT = 1
    TOKEN = 2
    BIAS = 3
    TOP = 4
    STOP = 5
    MAX_TOKENS = 6
    ASK_ID = 7
    SAMPLING = 8


class ErrorCode(IntEnum):
    """The error of a Done with reason ERROR."""

    NONE = 0
    NAN = 1
    """The logits of this request held a NaN; others go on."""
    DEVICE = 2
    """The device failed; every request ends so."""
    GONE = 3
    """The engine process ended (made by the front's own port)."""
    FRONT = 4
    """The front did not read its results: its requests were ended."""
    MASK = 5
    """A mask of the wrong size came (front's fault)."""
    MEMORY = 6
    """It runs alone, and the device has no memory left for its pages: others have it."""


ROW_STOP = 2
ROW_LENGTH = 4
ROW_DEAD = 8
ROW_NAN = 16
ROW_SCORE = 64
"""Row flags, as PK_ROW_* in pack.h."""

MAX_STOP = 17
SAMPLING = Struct("<7fiQ7i17i")
"""pk_sampling of pack.h: temperature, top_p, min_p, typical_p, repetition, frequency, presence; top_k; seed;
prompt_length, min_length, max_length, n_logprobs, n_bias, use_mask, n_stop; stop[17]."""
ASK = Struct("<QQQQQiiiiiiii")
BIAS = Struct("<if")
ABORT = Struct("<Q")
MASK = Struct("<Qiiii")
"""ask_id, index, words, sure tokens, 0; then i32 x sure tokens, u32 x words."""
QUERY = Struct("<Q")
BIND = Struct("<Qii")
"""ask_id, slot, 0: a running ask has moved to this slot (-1: to none for now; another front's may get its own). Handled by the front's port; the front never sees it."""
STEP = Struct("<Qiiii")
"""seq, rows, top entries in all, slots of the engine, 0; then ROW x rows, then the top entries of the rows that have any."""
ROW = Struct("<iiiifi")
"""pk_result of pack.h: slot, token, flags, length, logprob, n_top."""
SINGLE = Struct("<iii4xf4x")
"""Of a ROW: slot, token, flags, logprob."""
TOP = Struct("<if")
STARTED = Struct("<Qiiqiiii")
DONE = Struct("<Qiiiiiiqqqii")
REFUSED = Struct("<Qiiqqq")
VECTOR = Struct("<Qii")
"""ask_id, numbers, 0; then f32 x numbers."""


@dataclass(slots=True)
class Ask:
    """One request for tokens.

    prompt: int32 token ids (any C-contiguous buffer of 4-byte items, or bytes). ask_id: unique in this front's life, not 0.
    client: hash of whom fairness counts (key or session). salt: prefixes are shared only among asks of one salt.
    deadline_ns, received_ns: time.monotonic_ns() clock; 0: none. The ask is refused when it has not started by its deadline.
    weight: its client's share, beside those of weight 1. priority: higher goes first among the waiting.
    max_tokens: 0 means "up to the context"; n_logprobs: -1 none, 0 chosen, k best.
    `stop` are the client's stop ids, `end` the model's; `ignore_eos` leaves `end` out. Together at most 17.
    use_mask: every token waits for its MaskUpdate (index 0 for the first token).
    is_scored: the prompt's tokens but the first come as rows too, with flag ROW_SCORE and their logprobs, before the answer; all of them
    again when the ask had to make way. Nothing of the prompt is taken from the cache then.
    goes_on: it is the rest of an answer that has begun, so that a full queue does not refuse it.
    """

    ask_id: int
    prompt: Buffer
    client: int = 0
    salt: int = 0
    priority: int = 0
    weight: int = 1
    deadline_ns: int = 0
    received_ns: int = 0
    max_tokens: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    use_mask: bool = False
    is_scored: bool = False
    goes_on: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_k: int = 0
    seed: int = 0
    n_logprobs: int = -1
    stop: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()

    def encode(self) -> bytes:
        """The record's payload: ASK, pk_sampling, bias pairs, prompt, zero to 8 bytes.

        Raises: UsageError when there are more than 17 stop ids (facts: n_stop, max_stop).
        """
        stop = self.stop if self.ignore_eos else (*self.stop, *(t for t in self.end if t not in self.stop))
        if len(stop) > MAX_STOP:
            raise UsageError(
                f"{len(stop)} stop tokens, at most {MAX_STOP} are possible", n_stop=len(stop), max_stop=MAX_STOP
            )
        ids = memoryview(self.prompt).cast("B")
        n_prompt = len(ids) // 4
        head = ASK.pack(
            self.ask_id, self.client, self.salt, self.deadline_ns, self.received_ns,
            self.priority, n_prompt, self.max_tokens, self.min_tokens, len(self.bias), self.weight,
            int(self.is_scored), int(self.goes_on),
        )  # fmt: skip
        sampling = SAMPLING.pack(
            self.temperature, self.top_p, self.min_p, self.typical_p, self.repetition_penalty, self.frequency_penalty,
            self.presence_penalty, self.top_k, self.seed & 0xFFFFFFFFFFFFFFFF, n_prompt, 0, 0, self.n_logprobs, len(self.bias),
            int(self.use_mask), len(stop), *stop, *(0,) * (MAX_STOP - len(stop)),
        )  # fmt: skip
        bias = b"".join(BIAS.pack(token, value) for token, value in self.bias)
        return b"".join((head, sampling, bias, ids, bytes(-len(ids) % 8)))


class AskView:
    """An Ask as the engine reads it: head fields unpacked, prompt and sampling as bytes of its own (the ring is reused)."""

    __slots__ = (
        "ask_id",
        "bias",
        "client",
        "deadline_ns",
        "goes_on",
        "is_scored",
        "max_tokens",
        "min_tokens",
        "n_bias",
        "priority",
        "prompt",
        "prompt_tokens",
        "received_ns",
        "salt",
        "sampling",
        "weight",
    )

    def __init__(self, payload: memoryview) -> None:
        (
            self.ask_id, self.client, self.salt, self.deadline_ns, self.received_ns,
            self.priority, self.prompt_tokens, self.max_tokens, self.min_tokens, self.n_bias, self.weight,
            self.is_scored, self.goes_on,
        ) = ASK.unpack_from(payload)  # fmt: skip
        at = ASK.size
        self.sampling = bytes(payload[at : at + SAMPLING.size])
        at += SAMPLING.size
        self.bias = bytes(payload[at : at + 8 * self.n_bias])
        at += 8 * self.n_bias
        self.prompt = bytes(payload[at : at + 4 * self.prompt_tokens])


@dataclass(slots=True)
class Abort:
    """The client of this ask has gone, or wants no more."""

    ask_id: int

    def encode(self) -> bytes:
        """The record's payload."""
        return ABORT.pack(self.ask_id)


@dataclass(slots=True)
class MaskUpdate:
    """The tokens allowed as output token `index` of this ask: words is u32 [ceil(V/32)], bit set: allowed.

    sure: tokens that are certain from `index` on, because the grammar allows nothing else; the mask is then that of the token behind them.
    """

    ask_id: int
    index: int
    words: bytes
    sure: Sequence[int] = ()

    @property
    def n_bytes(self) -> int:
        """Bytes of the payload."""
        return MASK.size + (len(self.words) + 4 * len(self.sure) + 7 & -8)

    def write(self, data: memoryview, at: int) -> None:
        """Puts the payload into `n_bytes` of data."""
        words, begin = self.words, at + MASK.size
        MASK.pack_into(data, at, self.ask_id, self.index, len(words) // 4, len(self.sure), 0)
        if self.sure:
            sure = array("i", self.sure).tobytes()
            data[begin : begin + len(sure)] = sure
            begin += len(sure)
        end = begin + len(words)
        data[begin:end] = words
        if end & 7:
            data[end : end + 4] = bytes(4)

    def encode(self) -> bytes:
        """The record's payload."""
        payload = bytearray(self.n_bytes)
        self.write(memoryview(payload), 0)
        return bytes(payload)


Update = MaskUpdate | Walked
"""What a front says of the tokens that may come."""
Row = tuple[int, int, int, float, tuple[tuple[int, float], ...]]
"""(ask_id, token, flags, logprob, top), top: ((token, logprob), ...) or (). flags: ROW_STOP, ROW_LENGTH, or 0."""


@dataclass(slots=True)
class StepResult:
    """One step's rows that concern this front. Rows without a token (prefill chunks, dead rows) are left out."""

    seq: int
    rows: list[Row]


@dataclass(slots=True)
class Started:
    """An ask left the queue. queued_ns: from received_ns (or arrival at the engine) to admission.

    miss: why not more was cached; known_tokens: up to where something known goes on as the prompt does.
    """

    ask_id: int
    cached_tokens: int
    prompt_tokens: int
    queued_ns: int
    slot: int = -1
    """Where its rows come from; the port minds this. -1: a Bind says it."""
    miss: Miss = Miss.NONE
    known_tokens: int = 0

    def encode(self) -> bytes:
        """The record's payload."""
        return STARTED.pack(
            self.ask_id,
            self.cached_tokens,
            self.prompt_tokens,
            self.queued_ns,
            self.slot,
            self.miss,
            self.known_tokens,
            0,
        )

    @classmethod
    def decode(cls, payload: memoryview) -> Started:
        """The record from its payload."""
        ask_id, cached, prompt, queued_ns, slot, miss, known, _ = STARTED.unpack_from(payload)
        return cls(ask_id, cached, prompt, queued_ns, slot, Miss(miss), known)


@dataclass(slots=True)
class Done:
    """An ask ended; nothing follows for it. Times in ns: waiting, prefill (start to first token), decode (first to last). Tokens guessed ahead, and right ones."""

    ask_id: int
    reason: Reason
    error: ErrorCode = ErrorCode.NONE
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    n_preempted: int = 0
    queued_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def encode(self) -> bytes:
        """The record's payload."""
        return DONE.pack(
            self.ask_id, self.reason, self.error, self.prompt_tokens, self.cached_tokens, self.output_tokens,
            self.n_preempted, self.queued_ns, self.prefill_ns, self.decode_ns, self.drafted_tokens, self.accepted_tokens,
        )  # fmt: skip

    @classmethod
    def decode(cls, payload: memoryview) -> Done:
        """The record from its payload."""
        ask_id, reason, error, *rest = DONE.unpack_from(payload)
        return cls(ask_id, Reason(reason), ErrorCode(error), *rest)

    def to_error(self) -> PaddockError:
        """The error of a Done whose reason is ERROR."""
        if self.error == ErrorCode.NAN:
            return PackError(
                "the model produced a NaN for this request",
                "try again; if it repeats, the weights or a kernel are at fault",
            )
        if self.error == ErrorCode.MASK:
            return PackError("a token mask of the wrong size came from the grammar", "report this")
        if self.error == ErrorCode.MEMORY:
            return PackError(
                "the device has too little free memory for this request's keys and values: other programs have what this runner gave back when it was idle",
                "stop one of them, or start the runner with --idle-release-s 0, so that it keeps its memory",
            )
        what = "the engine process ended" if self.error == ErrorCode.GONE else "the device failed"
        return PackError(f"{what} while this request ran", "see the runner's log")


@dataclass(slots=True)
class Refused:
    """An ask that will not be served, with the two numbers; nothing follows for it."""

    ask_id: int
    code: RefusedCode
    retry_after_ms: int = 0
    need: int = 0
    have: int = 0
    asked: int = 0

    def encode(self) -> bytes:
        """The record's payload."""
        return REFUSED.pack(self.ask_id, self.code, self.retry_after_ms, self.need, self.have, self.asked)

    @classmethod
    def decode(cls, payload: memoryview) -> Refused:
        """The record from its payload."""
        ask_id, code, *rest = REFUSED.unpack_from(payload)
        return cls(ask_id, RefusedCode(code), *rest)

    def to_error(self) -> PaddockError:
        """The error that the client gets."""
        need, have = self.need, self.have
        if self.code == RefusedCode.CONTEXT:
            return ContextTooLong(
                f"the prompt has {need} tokens and the answer may have {self.asked}, the context holds {have}",
                "shorten the prompt, lower max_tokens, or start the runner with a larger --max-ctx",
                prompt_tokens=need, max_ctx_tokens=have, max_tokens=self.asked,
            )  # fmt: skip
        if self.code == RefusedCode.PAGES:
            return ContextTooLong(
                f"the request needs {need} KV pages, the runner has {have} in all",
                "lower max_tokens, or give the runner more KV memory", need_pages=need, have_pages=have,
            )  # fmt: skip
        if self.code == RefusedCode.QUEUE_FULL:
            return Busy(
                f"{need} requests are waiting, the queue holds {have}",
                "",
                self.retry_after_ms,
                waiting=need,
                max_queue=have,
            )
        if self.code == RefusedCode.DEADLINE:
            return Busy(
                f"not started within {have} ms (waited {need} ms)",
                "",
                self.retry_after_ms,
                waited_ms=need,
                allowed_ms=have,
            )
        what = BadField(self.asked).name.lower() if self.asked in BadField._value2member_map_ else "field"
        return UsageError(f"{what} out of range: {need}, the limit is {have}", field=what, value=need, limit=have)


@dataclass(slots=True)
class State:
    """Answer to a query: counters and gauges for /metrics, slots and pages for /v1/paddock/state (see engine/report.py)."""

    query_id: int
    facts: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The record's payload: the query's id, the JSON's length, the JSON."""
        text = json.dumps(self.facts, separators=(",", ":")).encode()
        return b"".join((QUERY.pack(self.query_id), QUERY.pack(len(text)), text, bytes(-len(text) % 8)))

    @classmethod
    def decode(cls, payload: memoryview) -> State:
        """The record from its payload."""
        (query_id,) = QUERY.unpack_from(payload)
        (size,) = QUERY.unpack_from(payload, 8)
        return cls(query_id, json.loads(bytes(payload[16 : 16 + size])))


@dataclass(slots=True)
class Vector:
    """What a model without a head makes of an ask: f32 numbers, as bytes. Comes before the ask's Done."""

    ask_id: int
    values: bytes

    def encode(self) -> bytes:
        """The record's payload."""
        return b"".join((VECTOR.pack(self.ask_id, len(self.values) // 4, 0), self.values, bytes(-len(self.values) % 8)))

    @classmethod
    def decode(cls, payload: memoryview) -> Vector:
        """The record from its payload."""
        ask_id, n, _ = VECTOR.unpack_from(payload)
        return cls(ask_id, bytes(payload[VECTOR.size : VECTOR.size + 4 * n]))


Event = StepResult | Started | Done | Refused | State | Vector | Guessed
"""What a front receives."""
