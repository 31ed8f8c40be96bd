"""Turns over a port of lists: events to the right choice, ends, errors, aborts, usage."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Coroutine
from typing import Any

import pytest
from paddock_runner.errors import Busy, Cancelled, ContextTooLong, PackError, ShuttingDown, UsageError
from paddock_runner.text import tokenizer
from paddock_runner.text.answer import AnswerFormat
from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf
from paddock_runner.text.stream import TextStream
from paddock_runner.text.template import ChatTemplate
from paddock_runner.turns.collect import Collector
from paddock_runner.turns.desk import Desk
from paddock_runner.turns.served import Served
from paddock_runner.turns.turn import Caller, Reading, Turn
from paddock_runner.turns.vectors import MAX_OPEN, vectors
from paddock_runner.turns.wish import Wish
from paddock_runner.wire import messages as m

from tests.unit.text.small import byte_level_metadata

TOKENIZER = tokenizer_from_gguf(byte_level_metadata(), None)
A, B, C = (TOKENIZER.encode(c, False)[0] for c in "xyz")


class Port:
    """A port that keeps what it is given."""

    def __init__(self) -> None:
        self.asks: list[m.Ask] = []
        self.aborted: list[int] = []
        self.is_dead = False
        self.full_after = 1000

    def listen(self, loop: Any, on_events: Any) -> None:
        self.tell = on_events

    def ask(self, ask: m.Ask, masks: object = ()) -> None:
        if len(self.asks) >= self.full_after:
            raise Busy("full")
        self.asks.append(ask)

    def abort(self, ask_id: int) -> None:
        self.aborted.append(ask_id)

    def query(self) -> int:
        return 1


def served(ctx: int = 100) -> Served:
    return Served("m", TOKENIZER, ChatTemplate(""), AnswerFormat("", TOKENIZER), ctx, TOKENIZER.n_vocab)


def row(ask: m.Ask, token: int, flags: int = 0) -> tuple[int, int, int, float, tuple[Any, ...]]:
    return ask.ask_id, token, flags, -0.5, ()


class Bench:
    """A desk with its port."""

    def __init__(self) -> None:
        self.port = Port()
        self.desk = Desk(self.port)  # type: ignore[arg-type]
        self.desk.listen(asyncio.get_running_loop())

    def turn(self, wish: Wish, prompts: int = 1) -> tuple[Turn, Collector]:
        collector = Collector(prompts * wish.n)
        turn = Turn(self.desk, served(), [array("i", [A, B])] * prompts, wish, collector, Caller(client=7, salt=8, received_ns=9))
        turn.start()
        return turn, collector


def inside(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_the_first_answer_finds_the_tables_of_texts_made(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = tokenizer_from_gguf(byte_level_metadata(), None)
    found = Served("m", fresh, ChatTemplate(""), AnswerFormat("", fresh), 100, fresh.n_vocab)
    found.prepare()
    monkeypatch.setattr(tokenizer, "_text", None)
    for has_tools in (False, True):
        TextStream(fresh, visible=found.format.visible(has_tools))


def test_tokens_go_to_their_choice_and_done_ends_it() -> None:
    async def run() -> None:
        bench = Bench()
        turn, found = bench.turn(Wish(n=2, seed=3))
        one, two = bench.port.asks
        assert (one.client, one.salt, one.received_ns, one.seed, two.seed) == (7, 8, 9, 3, 4) and one.end == TOKENIZER.stop_ids
        bench.port.tell([m.Started(one.ask_id, 1, 2, 5), m.StepResult(1, [row(one, A), row(two, B)])])
        bench.port.tell([m.StepResult(2, [row(one, C), row(two, TOKENIZER.eos_id, m.ROW_STOP)]), m.Done(two.ask_id, m.Reason.STOP, cached_tokens=2)])
        assert not turn.ended.done()
        bench.port.tell([m.Done(one.ask_id, m.Reason.LENGTH, cached_tokens=1)])
        await turn.ended
        assert [a.text for a in found.answers] == ["xz", "y"] and [a.end.reason for a in found.answers] == ["length", "stop"]
        usage = turn.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (2, 1, 4)
        assert turn.timing.first_token_ns and turn.timing.last_token_ns and turn.timing.queued_ns == 5
        assert len(turn.gaps_ns) == 2 and turn.gaps_ns[0] > 0, "one between two tokens of each answer"
        assert turn.timing.prefill_ms == pytest.approx(turn.timing.first_token_ms - 5e-6)
        assert bench.desk.n_open == 0

    inside(run())


@pytest.mark.parametrize(
    "said, stop, reason",
    [
        ('<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>', None, "calls"),
        ('<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n', "</tool_call>", "calls"),
        ('<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}', None, "calls"),
        ('<tool_call>\n{"name": "look", "arguments": {"city": "', "Paris", "stop"),
        ('<tool_call>\n{"name": "look", "arguments": {"city": "', None, "stop"),
        ('<tool_call>\n{"name": "look", "arguments": {"city": NaN}', None, "stop"),
    ],
)
def test_an_answer_that_ends_inside_a_calls_arguments_does_not_end_in_calls(said: str, stop: str | None, reason: str) -> None:
    """Who is told "calls" takes their arguments for JSON."""

    async def run() -> None:
        bench, found = Bench(), Collector(1)
        answers = AnswerFormat('{{ "<tool_call>" ~ tools }}', TOKENIZER)
        turn = Turn(bench.desk, served(), [array("i", [A])], Wish(stop=(stop,) if stop else ()), found, Caller(), Reading(lambda: answers.parser("", {"look": {}}), answers.visible(True)))
        turn.start()
        (ask,) = bench.port.asks
        tokens = TOKENIZER.encode(said + (stop or ""), False)
        bench.port.tell([*(m.StepResult(i + 1, [row(ask, token)]) for i, token in enumerate(tokens)), m.Done(ask.ask_id, m.Reason.STOP)])
        await turn.ended
        (call,) = found.answers[0].calls
        assert found.answers[0].end.reason == reason and found.answers[0].end.stop == stop and call.is_complete == (reason == "calls")

    inside(run())


@pytest.mark.parametrize("said", ["a\n\n  b <c> ```d\n", " <tool_ca", "x", "a <tool_call>no</tool_call> b", "<think>why? </think> so\n\n  it < is", "<think>why?</think><b> is", "<think>why?</think>\n\n<b> is", "a <tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call><b> is"])
def test_every_token_of_the_text_keeps_its_log_probability_though_a_reader_waits_with_it(said: str) -> None:
    """What may be the beginning of a call is shown later, and so are its log-probabilities; those of thoughts are not."""

    async def run() -> None:
        bench, found = Bench(), Collector(1)
        answers = AnswerFormat('{{ "<tool_call>" ~ tools }}{# <think> </think> #}', TOKENIZER)
        turn = Turn(bench.desk, served(1000), [array("i", [A])], Wish(n_logprobs=0), found, Caller(), Reading(lambda: answers.parser("", {"look": {}}), answers.visible(True)))
        turn.start()
        (ask,) = bench.port.asks
        tokens = [t for c in said for t in TOKENIZER.encode(c, False)]
        bench.port.tell([*(m.StepResult(i + 1, [row(ask, token)]) for i, token in enumerate(tokens)), m.StepResult(999, [row(ask, TOKENIZER.eos_id, m.ROW_STOP)]), m.Done(ask.ask_id, m.Reason.STOP)])
        await turn.ended
        shown = "".join(TOKENIZER.decode([token]) for token, _, _ in found.answers[0].probs)
        assert shown.strip() == found.answers[0].text.strip() and len(shown) >= len(found.answers[0].text)

    inside(run())


def test_stop_string_ends_one_choice_and_later_tokens_are_ignored() -> None:
    async def run() -> None:
        bench = Bench()
        turn, found = bench.turn(Wish(stop=("yz",)))
        (ask,) = bench.port.asks
        bench.port.tell([m.StepResult(1, [row(ask, A)]), m.StepResult(2, [row(ask, B)]), m.StepResult(3, [row(ask, C)]), m.StepResult(4, [row(ask, A)])])
        await turn.ended
        assert found.answers[0].text == "x" and found.answers[0].end.stop == "yz" and bench.port.aborted == [ask.ask_id]
        bench.port.tell([m.Done(ask.ask_id, m.Reason.ABORT)])
        assert turn.usage.output_tokens == 3

    inside(run())


@pytest.mark.parametrize(
    "event, error",
    [
        (lambda i: m.Refused(i, m.RefusedCode.QUEUE_FULL, 9), Busy),
        (lambda i: m.Refused(i, m.RefusedCode.CONTEXT, 0, 5, 4, 3), ContextTooLong),
        (lambda i: m.Done(i, m.Reason.ERROR, m.ErrorCode.NAN), PackError),
        (lambda i: m.Done(i, m.Reason.ABORT), ShuttingDown),
    ],
)
def test_refusal_or_error_of_one_choice_ends_the_turn_and_aborts_the_others(event: Any, error: type[Exception]) -> None:
    async def run() -> None:
        bench = Bench()
        turn, _ = bench.turn(Wish(n=3))
        bench.port.tell([event(bench.port.asks[1].ask_id)])
        with pytest.raises(error):
            await turn.ended
        assert sorted(bench.port.aborted) == [bench.port.asks[0].ask_id, bench.port.asks[2].ask_id] and bench.desk.n_open == 0

    inside(run())


def test_cancelled_turn_aborts_everything_once() -> None:
    async def run() -> None:
        bench = Bench()
        turn, _ = bench.turn(Wish(n=2), prompts=2)
        turn.cancel()
        turn.cancel()
        turn.abandon()
        with pytest.raises(Cancelled):
            await turn.ended
        assert len(bench.port.aborted) == 4

    inside(run())


def test_ring_that_is_full_half_way_sends_nothing_in_the_end() -> None:
    async def run() -> None:
        bench = Bench()
        bench.port.full_after = 2
        with pytest.raises(Busy):
            bench.turn(Wish(n=3))
        assert len(bench.port.aborted) == 2 and bench.desk.n_open == 0

    inside(run())


def test_prompt_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    async def run() -> None:
        bench = Bench()
        with pytest.raises(ContextTooLong) as caught:
            bench.turn(Wish(max_tokens=99))
        assert caught.value.facts == {"prompt_tokens": 2, "max_ctx_tokens": 100, "max_tokens": 99}
        turn, _ = bench.turn(Wish(max_tokens=98))
        turn.cancel()
        assert turn.ended.exception() is not None

    inside(run())


def test_more_answers_than_can_ever_wait_and_run_are_refused_before_anything_is_sent() -> None:
    """A 429 would have clients try again what can never be."""

    async def run() -> None:
        bench, found = Bench(), served()
        found.max_asks = 6
        for n_prompts, n, param in ((7, 1, "prompt"), (2, 4, "n"), (3, 2, "")):
            turn = Turn(bench.desk, found, [array("i", [A])] * n_prompts, Wish(n=n), Collector(n_prompts * n), Caller())
            if not param:
                turn.start()
                turn.cancel()
                assert turn.ended.exception() is not None
                continue
            with pytest.raises(UsageError, match=f"{n_prompts} prompts of {n} answers each are {n_prompts * n} answers, 6 can") as caught:
                turn.start()
            assert caught.value.facts["param"] == param and not bench.port.asks

    inside(run())


def test_dead_engine_fails_queries_and_tells_once() -> None:
    async def run() -> None:
        bench = Bench()
        told: list[int] = []
        bench.desk.on_dead = lambda: told.append(1)
        waiting = asyncio.create_task(bench.desk.state())
        await asyncio.sleep(0)
        bench.port.is_dead = True
        bench.port.tell([])
        with pytest.raises(PackError):
            await waiting
        assert told == [1]

    inside(run())


def test_token_without_text_is_counted_and_harmless() -> None:
    async def run() -> None:
        bench = Bench()
        turn, found = bench.turn(Wish(n_logprobs=0))
        (ask,) = bench.port.asks
        bench.port.tell([m.StepResult(1, [row(ask, A)]), m.StepResult(2, [row(ask, TOKENIZER.n_vocab + 5)]), m.Done(ask.ask_id, m.Reason.LENGTH)])
        await turn.ended
        assert found.answers[0].text == "x" and turn.usage.output_tokens == 2

    inside(run())


def test_asks_for_vectors_have_their_caller_s_weight_and_its_deadline_until_one_is_there() -> None:
    async def run() -> None:
        bench = Bench()
        caller = Caller(client=7, salt=8, received_ns=9, weight=3, deadline_ns=1000)
        work = asyncio.ensure_future(vectors(bench.desk, [array("i", [A])] * (MAX_OPEN + 1), caller))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        asks = bench.port.asks
        while len(asks) < MAX_OPEN:
            await asyncio.sleep(0)
        assert {(a.client, a.salt, a.weight, a.deadline_ns) for a in asks} == {(7, 8, 3, 1000)}
        while len(asks) < MAX_OPEN + 1:
            bench.port.tell([m.Vector(asks[0].ask_id, bytes(8))])
            await asyncio.sleep(0)
        assert (asks[-1].weight, asks[-1].deadline_ns, asks[-1].goes_on) == (3, 0, True), "the request has begun"
        assert not any(a.goes_on for a in asks[:-1])
        bench.port.tell([m.Vector(a.ask_id, bytes(8)) for a in asks])
        assert (await work).shape == (MAX_OPEN + 1, 2)

    inside(run())


def test_nobody_s_prompt_waits_for_texts_of_another_order_of_size(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, at_work, encode = threading.Event(), threading.Semaphore(0), type(TOKENIZER).encode

    def slow(self: Any, text: str, *words: Any, **more: Any) -> Any:
        if len(text) > 1 << 20:
            at_work.release()
            assert go_on.wait(10)
            return array("i", [A])
        return encode(self, text, *words, **more)

    async def run() -> None:
        found = served()
        try:
            huge = [asyncio.ensure_future(found.text_prompt("x" * (5 << 20))) for _ in range(3)]
            large = [asyncio.ensure_future(found.text_prompt("x" * (2 << 20))) for _ in range(3)]
            for _ in range(2):
                assert await asyncio.to_thread(at_work.acquire, timeout=10)
            for n in (5000, 200_000):
                assert await asyncio.wait_for(found.text_prompt("x" * n), 10)
            assert not any(task.done() for task in huge + large)
            go_on.set()
            await asyncio.gather(*huge, *large)
        finally:
            go_on.set()
            found.close()

    monkeypatch.setattr(type(TOKENIZER), "encode", slow)
    asyncio.run(run())


@pytest.mark.parametrize("more", [{"reasoning_content": 5}, {"tool_calls": [{}]}, {"tool_calls": [{"function": "look"}]}, {"tool_calls": [{"function": {"arguments": {"city": "Paris"}}}]}])
def test_messages_of_odd_shape_are_the_template_s_to_judge(more: dict[str, Any]) -> None:
    """MCP's come as they were sent."""
    found = served()
    found.template = ChatTemplate("x")
    try:
        asyncio.run(found.chat_prompt([{"role": "assistant", "content": "x", **more}], None, {}))
    finally:
        found.close()


@pytest.mark.parametrize("message", [{"content": None, "tool_calls": [{"function": {"name": "look", "arguments": "x" * 5000}}]}, {"content": "", "reasoning_content": "x" * 5000}, {"content": [{"type": "text", "text": "x" * 5000}]}])
def test_long_calls_and_thoughts_are_rendered_in_a_thread_as_long_texts_are(message: dict[str, Any]) -> None:
    threads: set[int] = set()
    found = served()
    found.template = ChatTemplate("x")
    render = found.template.render
    found.template.render = lambda *words, **more: threads.add(threading.get_ident()) or render(*words, **more)  # type: ignore[method-assign, func-returns-value]
    try:
        asyncio.run(found.chat_prompt([{"role": "assistant", **message}], None, {}))
        assert threads and threading.get_ident() not in threads
    finally:
        found.close()


def test_wishes_that_cannot_be_are_refused_by_field() -> None:
    for wish, param in ((Wish(n=0), "n"), (Wish(n_logprobs=21), "top_logprobs"), (Wish(bias=((10**6, 1.0),)), "logit_bias"), (Wish(stop=("",)), "stop"), (Wish(temperature=float("nan")), "temperature")):
        with pytest.raises(UsageError) as caught:
            wish.check(served())
        assert caught.value.facts["param"] == param


def test_many_short_texts_are_read_in_a_thread_as_a_long_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    encode = type(TOKENIZER).encode

    def seen(self: Any, *words: Any) -> Any:
        threads.add(threading.get_ident())
        return encode(self, *words)

    monkeypatch.setattr(type(TOKENIZER), "encode", seen)
    found = served()
    try:
        for texts, is_aside in ((["xyz"], False), (["xyz" * 100] * 20, True)):
            threads.clear()
            assert asyncio.run(found.text_prompts(texts)) == [encode(TOKENIZER, text) for text in texts]
            assert len(threads) == 1 and (threading.get_ident() not in threads) == is_aside
    finally:
        found.close()
