"""What finished steps teach: what they take, by rows and tokens, and what copies, guesses and masks add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .step import Step

if TYPE_CHECKING:
    from .loop import Engine

SEE_EVERY, SEE_PREFILL_EVERY, SEE_FIRST = 16, 4, 64
SEE_LONG_US = 10_000
"""Which steps the cost model learns from: the first ones, then a sample, and those that hold up streams for long."""


def learn(engine: Engine, step: Step, now_ns: int, is_alone: bool) -> None:
    """Takes in a step that was read, before its end becomes that of the last one. is_alone: no other was read with it."""
    took_us, seq = engine.last_took_ns / 1000, step.seq
    if step.is_beside:
        engine.scheduler.cost.see_beside(step.price_us, took_us)
        return
    if step.n_brought and engine.ledger.tree.tiers is not None:
        engine.ledger.tree.tiers.see(step.n_brought, took_us - step.price_us)
    elif step.drafts and not step.n_prefill:
        engine.drafter.worth.see(step.n_decode, step.n_more, step.period_us(now_ns, engine.last_done_ns))
    elif step.n_more and not step.n_prefill:
        engine.masking.see(step, took_us)
    elif not (step.waited_ns and engine.run_ahead) and (
        seq < SEE_FIRST or seq % (SEE_PREFILL_EVERY if step.n_prefill else SEE_EVERY) == 0 or (step.n_decode and step.n_prefill and step.price_us > SEE_LONG_US)
    ):
        engine.scheduler.cost.see(step.n_decode, step.n_prefill, step.work, took_us, step.context)
    if engine.drafter.is_on and is_alone and step.is_plain and not step.n_prefill and not step.n_brought:
        engine.drafter.worth.see_plain(seq, step.n_decode, step.period_us(now_ns, engine.last_done_ns))
