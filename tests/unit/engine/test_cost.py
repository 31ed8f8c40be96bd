"""The cost model finds the costs behind noisy measurements, never a negative one, and inverts itself."""

from __future__ import annotations

import random

import pytest
from paddock_runner.engine.cost import CONTEXT_SCALE, WORK_SCALE, CostModel, chunk_work


def fed(n: int, a: float, b: float, c: float, d: float, noise: float = 0.05) -> CostModel:
    rng = random.Random(1)
    model = CostModel()
    for _ in range(n):
        rows, tokens = rng.randrange(32), rng.choice((0, 32, 64, 200))
        work = chunk_work(tokens, rng.randrange(4000)) if tokens else 0.0
        us = a + b * rows / 16 + c * tokens / 256 + d * work / WORK_SCALE
        model.see(rows, tokens, work, us * rng.uniform(1 - noise, 1 + noise))
    return model


def test_it_finds_the_costs_behind_noisy_measurements() -> None:
    model = fed(300, 3000, 2000, 9000, 2000)
    assert model.decode_us(16) == pytest.approx(5000, rel=0.05)
    assert model.chunk_us(256, 0) == pytest.approx(9000 + 2000 * 128 / 2048, rel=0.1)


def test_no_term_is_negative_whatever_is_measured() -> None:
    model = fed(200, 5000, 0, 100, 0, noise=0.5)
    assert all(term >= 0 for term in model.terms)
    model = CostModel()
    for rows in range(64):
        model.see(rows % 32, 0, 0.0, 5000 - 100 * (rows % 32))
    assert all(term >= 0 for term in model.terms)


def test_it_forgets_old_speeds() -> None:
    model = fed(200, 3000, 2000, 9000, 500)
    for _ in range(400):
        model.see(16, 0, 0.0, 20_000)
    assert model.decode_us(16) == pytest.approx(20_000, rel=0.02)


def test_tokens_for_is_the_inverse_of_chunk_us() -> None:
    model = fed(300, 3000, 2000, 9000, 2000)
    for position in (0, 1000, 30_000):
        for us in (1.0, 500.0, 20_000.0, 1e6):
            n = model.tokens_for(us, position)
            assert model.chunk_us(n, position) <= us * 1.001
            assert model.chunk_us(n + 1, position) >= us * 0.999
    assert model.tokens_for(0, 0) == model.tokens_for(-5, 0) == 0


def test_before_anything_was_seen_it_guesses() -> None:
    model = CostModel()
    assert model.decode_us(16) == 3000 and model.tokens_for(10_000, 0) > 100


def test_it_learns_how_much_longer_steps_take_beside_a_part_of_the_device_and_forgets_it_again() -> None:
    model = CostModel()
    for _ in range(60):
        model.see_beside(5000.0 * model.beside, 8500.0)
    assert abs(model.beside - 1.7) < 0.02
    for _ in range(60):
        model.see_beside(5000.0 * model.beside, 4000.0)
    assert model.beside == 1.0, "never less than by itself"
    model.see_beside(0.0, 4000.0)
    for _ in range(1000):
        model.see_beside(1.0, 1e9)
    assert model.beside == 8.0


def rows_seen(believed_us: float, us_16x2048: float, contexts: range, n: int = 400) -> CostModel:
    """Steps of 8 to 32 rows alone, each row with one of these contexts, and some with prefill; rows cost 3000 us and 500 for 16."""
    rng, model = random.Random(2), CostModel()
    model.believe(believed_us)
    for _ in range(n):
        rows, tokens = rng.choice((8, 16, 32)), rng.choice((0, 0, 128, 384))
        context = rows * rng.choice(contexts)
        us = 3000 + 500 * rows / 16 + 9000 * tokens / 256 + us_16x2048 * context / CONTEXT_SCALE
        model.see(rows, tokens, chunk_work(tokens, 0), us * rng.uniform(0.98, 1.02), context)
    return model


@pytest.mark.parametrize("us", [500.0, 2000.0])
def test_what_contexts_of_rows_take_is_learned_whatever_was_believed(us: float) -> None:
    model = rows_seen(1000.0, us, range(100, 12_000, 100))
    for rows, context in ((16, 500), (16, 8000), (32, 10_000)):
        right = 3000 + 500 * rows / 16 + us * rows * context / CONTEXT_SCALE
        assert model.decode_us(rows, rows * context) == pytest.approx(right, rel=0.06)
        assert model.quiet_us(rows, rows * context) == pytest.approx(right, rel=0.08)


def test_contexts_that_are_all_alike_change_nothing_of_what_is_believed_of_them() -> None:
    model = rows_seen(1000.0, 1000.0, range(2000, 2001))
    assert model.terms[4] == pytest.approx(1000, rel=0.25)
    assert model.decode_us(16, 16 * 6000) == pytest.approx(3500 + 1000 * 6000 / 2048, rel=0.15), "and so a longer one is priced"


def test_contexts_that_cost_nothing_because_rows_share_them_are_found_out() -> None:
    model = rows_seen(1000.0, 0.0, range(14_000, 18_000, 100))
    assert model.terms[4] < 100 and model.decode_us(16, 16 * 16_000) == pytest.approx(3500, rel=0.1)


def test_contexts_count_where_something_is_believed_of_them() -> None:
    model = CostModel()
    for context in (0, 100_000) * 50:
        model.see(16, 0, 0.0, 3500.0 + context / 50, context)
    assert model.terms[4] == 0 and model.decode_us(16, 100_000) == model.decode_us(16)
    assert model.quiet_us(16, 100_000) == model.quiet_us(16, 0)
