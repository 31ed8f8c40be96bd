"""Masks in the loop: rows that run before theirs are there, late ones, tokens that a grammar is certain of."""

from __future__ import annotations

from dataclasses import replace

from paddock_runner.pack.abi import PK_ROW_HELD
from paddock_runner.wire.guesses import Walked
from paddock_runner.wire.messages import ErrorCode, MaskUpdate, Reason

from tests.soak.fake_device import alone
from tests.soak.rig import SIZES, Answer, Rig, every_run_ahead, right, turns

run_ahead = every_run_ahead


def test_masks_are_awaited_token_by_token_and_obeyed(run_ahead: int) -> None:
    rig = Rig(run_ahead=run_ahead)
    masks = [1 << (10 + i) | 1 << (300 + i) for i in range(6)]
    masked, free = rig.ask(list(range(40, 50)), 6, use_mask=True), rig.ask([1, 2], 20)
    turns(rig, 14)
    assert masked.started is not None and masked.tokens == [] and len(free.tokens) > 3
    for i in range(6):
        n = len(masked.tokens)
        assert n == i
        rig.fronts[0].masks([MaskUpdate(1, i, masks[i].to_bytes(128, "little"))])
        turns(rig, 6)
    rig.run()
    assert masked.tokens == alone(list(range(40, 50)), 6, 1000, 64, masks=masks) and right(free)
    rig.close()


ANY = bytes([255]) * 128


def masked_rig(n: int, **more: object) -> tuple[Rig, list[Answer]]:
    """n masked requests with their first tokens, whose next rows have run and wait for masks."""
    rig = Rig(**more)
    asks = [rig.ask([1, 2, i], 9, use_mask=True) for i in range(1, n + 1)]
    rig.fronts[0].masks([MaskUpdate(a.ask.ask_id, 0, ANY) for a in asks])
    for _ in range(100):
        rig.runner.turn()
        rig.listen(rig.fronts[0])
        if rig.engine.masking.is_waiting:
            if all(a.tokens for a in asks):
                break
        elif rig.engine.in_flight:
            rig.engine.wait()
    assert [len(a.tokens) for a in asks] == [1] * n and rig.engine.masking.is_waiting
    return rig, asks


def give(rig: Rig, *masks: tuple[int, int]) -> None:
    """Masks (ask, output index) come, and the engine has its turns."""
    rig.fronts[0].masks([MaskUpdate(ask_id, index, ANY) for ask_id, index in masks])
    for _ in range(6):
        rig.runner.turn()
        if rig.engine.in_flight and not rig.engine.masking.is_waiting:
            rig.engine.wait()
        rig.listen(rig.fronts[0])


def test_rows_run_before_their_masks_are_there(run_ahead: int) -> None:
    rig, _ = masked_rig(3, run_ahead=run_ahead)
    open_seq = rig.engine.launched_seq
    give(rig)
    assert rig.engine.launched_seq == open_seq and rig.engine.masking.until_ns == 0
    give(rig, (1, 1), (2, 1), (3, 1))
    assert rig.engine.launched_seq == open_seq + 1
    rig.close()


def test_a_late_mask_is_waited_for_as_long_as_its_share_of_the_step_takes_and_then_has_no_row() -> None:
    rig, asks = masked_rig(3)
    step = rig.engine.masking.open
    assert step is not None
    took = step.half_ns - step.launched_ns
    give(rig, (1, 1), (2, 1))
    assert rig.engine.masking.until_ns == step.half_ns + took // 2 and [len(a.tokens) for a in asks] == [1, 1, 1]
    rig.device.now_ns = rig.engine.masking.until_ns
    give(rig)
    assert [len(a.tokens) for a in asks] == [2, 2, 1] and rig.device.rows[-1][-1][0] == 2 and rig.engine.counters.late_masks == 1
    give(rig, (1, 2), (2, 2))
    assert [len(a.tokens) for a in asks] == [3, 3, 1] and len(rig.device.rows[-1]) == 2, "the late one has no row without its mask"
    give(rig, (1, 3), (2, 3), (3, 1))
    give(rig, (1, 4), (2, 4))
    assert [len(a.tokens) for a in asks] == [5, 5, 2]
    assert asks[2].tokens == alone([1, 2, 3], 9, 1000, 64)[:2]
    rig.close()


def test_nobody_waits_longer_than_a_step_for_others_masks() -> None:
    rig, asks = masked_rig(3)
    step = rig.engine.masking.open
    assert step is not None
    give(rig, (1, 1))
    assert rig.engine.masking.until_ns == step.half_ns + step.half_ns - step.launched_ns, "two of three are late"
    rig.ask([5, 6, 7], 3)
    give(rig)
    assert rig.engine.masking.until_ns > 0
    rig.close()
    rig, asks = masked_rig(2)
    free = rig.ask([5, 6, 7], 3)
    give(rig)
    assert rig.engine.masking.until_ns > 0, "a prompt waits"
    for _ in range(20):
        rig.turn()
    assert right(free) and [len(a.tokens) for a in asks] == [1, 1]
    rig.close()


def test_a_request_that_ends_while_its_row_waits_is_not_waited_for(run_ahead: int) -> None:
    rig, asks = masked_rig(2, run_ahead=run_ahead)
    rig.abort(asks[0])
    give(rig, (2, 1))
    for index in range(2, 9):
        turns(rig, 4)
        give(rig, (2, index))
    rig.run()
    assert asks[0].done.reason == Reason.ABORT and asks[1].tokens == alone([1, 2, 2], 9, 1000, 64)
    rig.assert_empty()
    rig.close()


def test_tokens_that_the_grammar_is_certain_of_run_in_one_row_and_are_told_in_order(run_ahead: int) -> None:
    sizes = replace(SIZES, recurrent_bytes=64, n_snapshots=8) if run_ahead == 1 else SIZES
    rig = Rig(sizes, run_ahead=run_ahead)
    asks = [rig.ask([1, 2, 3], 20, use_mask=True), rig.ask([1, 2, 3], 20, use_mask=True, n_logprobs=0), rig.ask([1, 2, 3], 20, use_mask=True, stop=(37,))]
    sure = list(range(30, 40))
    for ask in asks:
        i = ask.ask.ask_id
        rig.fronts[0].masks([MaskUpdate(i, 0, ANY, sure)])
        rig.fronts[0].masks([MaskUpdate(i, n, ANY, [900] * (n == 12)) for n in range(11, 20)])
    rig.run()
    every = (1 << 1000) - 1
    masks = [1 << token for token in sure] + [every, every, 1 << 900] + [every] * 7
    expected = alone([1, 2, 3], 20, 1000, 64, masks=masks)
    assert asks[0].tokens == asks[1].tokens == expected and asks[2].tokens == expected[:8] and asks[2].done.reason == Reason.STOP
    assert rig.engine.counters.output_tokens == 48 and asks[0].done.output_tokens == 20 and not any(asks[0].flags[:-1])
    widest = max(n for rows in rig.device.rows for slot, n, flags in rows if flags & PK_ROW_HELD and slot == 0)
    assert widest >= (3 if sizes.recurrent_bytes else 7), "up to a page's end, where there is none behind it yet or states may be saved"
    assert all(n == 1 for rows in rig.device.rows[1:] for slot, n, _ in rows if slot == 1), "who wants probabilities has every token drawn"
    rig.assert_empty()
    rig.close()


def test_recurrent_states_of_a_row_that_was_left_out_are_made_anew(run_ahead: int) -> None:
    sizes = replace(SIZES, recurrent_bytes=64, n_snapshots=8)
    rig, asks = masked_rig(2, sizes=sizes, run_ahead=run_ahead)
    give(rig, (1, 1))
    rig.device.now_ns = rig.engine.masking.until_ns
    give(rig, (1, 2), (1, 3))
    assert rig.engine.counters.late_masks == 1
    give(rig, *((1, i) for i in range(4, 9)), *((2, i) for i in range(1, 9)))
    rig.run()
    assert asks[1].done.n_preempted == 1 and [a.tokens for a in asks] == [alone([1, 2, i], 9, 1000, 64) for i in (1, 2)]
    rig.assert_empty()
    rig.close()


def test_a_mask_of_the_wrong_size_ends_only_its_request() -> None:
    rig = Rig()
    bad, good = rig.ask([1, 2], 5, use_mask=True), rig.ask([1, 2], 5)
    rig.fronts[0].masks([MaskUpdate(1, 0, bytes(4))])
    rig.run()
    assert bad.done.error == ErrorCode.MASK and right(good)
    rig.close()


def test_what_is_said_of_a_guess_in_masks_of_the_wrong_size_ends_only_its_request() -> None:
    rig = Rig()
    bad, good = rig.ask([1, 2], 5, use_mask=True), rig.ask([1, 2], 5)
    rig.fronts[0].masks([MaskUpdate(1, 0, ANY), Walked(1, 1, 2, [bytes(4)])])
    rig.run()
    assert bad.done.error == ErrorCode.MASK and right(good)
    rig.close()
