"""An ask's limits are checked against the sizes; what can never be served is refused with both numbers."""

from __future__ import annotations

from array import array

import pytest
from paddock_runner.engine.sampling import place
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.wire.messages import Ask, AskView, BadField, Refused, RefusedCode

SIZES = StateSizes(n_slots=2, max_ctx_tokens=64, page_tokens=4, n_pages=11, n_vocab=100, max_step_tokens=8, max_step_rows=8, max_bias=2, max_top=3)


def placed(n_prompt: int = 10, sizes: StateSizes = SIZES, **fields: object) -> tuple[bytes, int] | Refused:
    prompt = fields.pop("prompt", array("i", range(n_prompt)))
    return place(AskView(memoryview(Ask(1, prompt, **fields).encode())), sizes)  # type: ignore[arg-type]


def refused(*args: int, **fields: object) -> Refused:
    answer = placed(*args, **fields)  # type: ignore[arg-type]
    assert isinstance(answer, Refused)
    return answer


def test_lengths_are_placed_where_the_device_reads_them() -> None:
    answer = placed(10, max_tokens=20, min_tokens=5, temperature=0.5, seed=9)
    assert not isinstance(answer, Refused)
    sampling = abi.pk_sampling.from_buffer_copy(answer[0])
    assert (sampling.prompt_length, sampling.min_length, sampling.max_length, answer[1]) == (10, 15, 30, 30)
    assert (sampling.temperature, sampling.seed) == (0.5, 9)


def test_min_tokens_beyond_the_length_stop_at_the_length() -> None:
    answer = placed(10, max_tokens=3, min_tokens=50)
    assert not isinstance(answer, Refused)
    assert abi.pk_sampling.from_buffer_copy(answer[0]).min_length == 13


def test_a_prompt_over_the_context_is_refused_with_all_three_numbers() -> None:
    answer = refused(60, max_tokens=5)
    assert (answer.code, answer.need, answer.have, answer.asked) == (RefusedCode.CONTEXT, 60, 64, 5)
    assert isinstance(refused(64), Refused)


def test_more_pages_than_there_are_is_refused_with_both_numbers() -> None:
    answer = refused(30, max_tokens=20)
    assert (answer.code, answer.need, answer.have) == (RefusedCode.PAGES, 13, 10)
    assert not isinstance(placed(30, max_tokens=11), Refused)


def test_without_max_tokens_the_answer_may_fill_context_or_pool() -> None:
    assert placed(10)[1] == 40  # type: ignore[index]
    assert placed(10, StateSizes(2, 64, 4, 17, 100, 8, 8))[1] == 64  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "field", "need", "have"),
    [
        ({"prompt": array("i", [])}, BadField.PROMPT, 0, 1),
        ({"prompt": array("i", [5, 100])}, BadField.TOKEN, 100, 99),
        ({"prompt": array("i", [5, -1])}, BadField.TOKEN, -1, 99),
        ({"stop": (100,)}, BadField.TOKEN, 100, 99),
        ({"bias": ((-7, 1.0),)}, BadField.TOKEN, -7, 99),
        ({"bias": ((1, 1.0),) * 3}, BadField.BIAS, 3, 2),
        ({"n_logprobs": 4}, BadField.TOP, 4, 3),
        ({"max_tokens": -1}, BadField.MAX_TOKENS, -1, 0),
        ({"temperature": float("nan")}, BadField.SAMPLING, 0, 0),
        ({"top_p": float("inf"), "min_p": float("-inf")}, BadField.SAMPLING, 0, 0),
    ],
)
def test_a_field_out_of_range_is_named(fields: dict[str, object], field: BadField, need: int, have: int) -> None:
    answer = refused(**fields)
    assert (answer.code, answer.asked, answer.need, answer.have) == (RefusedCode.BAD_ASK, field, need, have)
    assert field.name.lower() in answer.to_error().message
