"""Records keep their meaning on the way, and their layouts are those of pack.h."""

from __future__ import annotations

import ctypes
from array import array

import pytest
from paddock_runner.errors import Busy, ContextTooLong, PackError, UsageError
from paddock_runner.pack import abi
from paddock_runner.wire import messages as m


def test_layouts_are_those_of_the_pack_header() -> None:
    assert m.SAMPLING.size == ctypes.sizeof(abi.pk_sampling)
    assert m.ROW.size == ctypes.sizeof(abi.pk_result)
    assert m.TOP.size == ctypes.sizeof(abi.pk_top)
    assert (m.ROW_STOP, m.ROW_LENGTH, m.ROW_DEAD, m.ROW_NAN) == (abi.PK_ROW_STOP, abi.PK_ROW_LENGTH, abi.PK_ROW_DEAD, abi.PK_ROW_NAN)
    for layout in (m.ASK, m.ABORT, m.MASK, m.QUERY, m.BIND, m.STEP, m.STARTED, m.DONE, m.REFUSED):
        assert layout.size % 8 == 0


def test_an_ask_arrives_with_every_field() -> None:
    ask = m.Ask(
        7, array("i", [5, 6, 7]), client=2**64 - 1, salt=9, priority=-3, deadline_ns=11, received_ns=12, max_tokens=40, min_tokens=2,
        use_mask=True, temperature=0.5, top_p=0.25, min_p=0.125, typical_p=0.75, repetition_penalty=1.5, frequency_penalty=-0.5,
        presence_penalty=0.25, top_k=20, seed=-1, n_logprobs=3, stop=(100, 200), end=(200, 300), bias=((5, -2.0), (6, 1.0)),
    )  # fmt: skip
    payload = ask.encode()
    assert len(payload) % 8 == 0
    view = m.AskView(memoryview(payload))
    assert (view.ask_id, view.client, view.salt, view.priority) == (7, 2**64 - 1, 9, -3)
    assert (view.deadline_ns, view.received_ns, view.max_tokens, view.min_tokens) == (11, 12, 40, 2)
    assert array("i", view.prompt).tolist() == [5, 6, 7] and view.prompt_tokens == 3
    assert view.n_bias == 2 and view.bias == m.BIAS.pack(5, -2.0) + m.BIAS.pack(6, 1.0)
    sampling = abi.pk_sampling.from_buffer_copy(view.sampling)
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.typical_p) == (0.5, 0.25, 0.125, 0.75)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -0.5, 0.25)
    assert (sampling.top_k, sampling.seed, sampling.n_logprobs, sampling.use_mask) == (20, 2**64 - 1, 3, 1)
    assert (sampling.n_bias, sampling.n_stop, list(sampling.stop[:4])) == (2, 3, [100, 200, 300, 0])


def test_ignore_eos_leaves_the_models_end_tokens_out_and_keeps_the_clients() -> None:
    view = m.AskView(memoryview(m.Ask(1, array("i", [1]), stop=(4,), end=(2,), ignore_eos=True).encode()))
    sampling = abi.pk_sampling.from_buffer_copy(view.sampling)
    assert sampling.n_stop == 1 and sampling.stop[0] == 4


def test_more_than_17_stop_tokens_are_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError) as caught:
        m.Ask(1, array("i", [1]), stop=tuple(range(18))).encode()
    assert caught.value.facts == {"n_stop": 18, "max_stop": 17}


def test_answers_arrive_as_they_were_sent() -> None:
    for event in (
        m.Started(1, 2, 3, 4),
        m.Done(1, m.Reason.LENGTH, m.ErrorCode.NONE, 2, 3, 4, 5, 6, 7, 8, 9, 10),
        m.Refused(1, m.RefusedCode.QUEUE_FULL, 2, 3, 4, 5),
        m.State(5, {"slots": [1, None], "text": "é"}),
    ):
        payload = event.encode()
        assert len(payload) % 8 == 0
        assert type(event).decode(memoryview(payload)) == event


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (m.RefusedCode.QUEUE_FULL, Busy),
        (m.RefusedCode.CONTEXT, ContextTooLong),
        (m.RefusedCode.PAGES, ContextTooLong),
        (m.RefusedCode.DEADLINE, Busy),
        (m.RefusedCode.BAD_ASK, UsageError),
    ],
)
def test_a_refusal_becomes_an_error_that_names_both_numbers(code: m.RefusedCode, kind: type) -> None:
    error = m.Refused(1, code, 250, 4711, 1234, 2).to_error()
    assert type(error) is kind
    assert "4711" in error.message and "1234" in error.message
    if isinstance(error, Busy):
        assert error.retry_after_ms == 250


def test_an_error_end_becomes_a_pack_error() -> None:
    for code in (m.ErrorCode.NAN, m.ErrorCode.DEVICE, m.ErrorCode.GONE):
        assert isinstance(m.Done(1, m.Reason.ERROR, code).to_error(), PackError)
