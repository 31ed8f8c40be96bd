"""What front and engine say of guesses arrives as it was sent, and what does not fit is told apart."""

from __future__ import annotations

from array import array

import pytest
from paddock_runner.wire import messages as m
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.guesses import Guessed, Walked
from paddock_runner.wire.port import EnginePort, FrontPort


@pytest.mark.parametrize("n_words", [2, 3])
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_a_guess_and_what_may_come_behind_it_arrive_as_they_were_sent(n: int, n_words: int) -> None:
    channel = Channel.create(4096, 4096)
    front, engine = FrontPort(channel, True), EnginePort(channel, True)
    front.ask(m.Ask(7, array("i", range(4))))
    guess = Guessed(7, 3, [11 * i for i in range(n)])
    engine.send(m.Kind.GUESS, guess.encode())
    engine.publish()
    assert front.poll() == [guess]
    walked = Walked(7, 3, 5, [bytes([i]) * 4 * n_words if i % 2 else 40 + i for i in range(n)])
    front.masks([walked, m.MaskUpdate(7, 3, bytes(4 * n_words)), Walked(8, 0, 1, ())])
    kinds = []
    while (payload := engine.reader.next()) is not None:
        kinds.append(engine.reader.kind)
        if kinds[-1] == m.Kind.WALKED:
            assert Walked.decode(payload, n_words, 100) == walked
            assert Walked.decode(payload, n_words, 40) == (None if n else walked), "a token that is none"
            assert n < 2 or Walked.decode(payload, n_words + 2, 100) is None, "masks of another size"
        payload.release()
    assert kinds == [m.Kind.ASK, m.Kind.WALKED, m.Kind.MASK], "of an ask that is not open nothing is said"
    front.close()
    engine.close()
    channel.close()
