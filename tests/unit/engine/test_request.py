"""A request moves only where the table of legal moves allows."""

from __future__ import annotations

from array import array

import pytest
from paddock_runner.engine.request import LEGAL, IllegalMove, Phase, Request
from paddock_runner.wire.messages import Ask, AskView


def request() -> Request:
    view = AskView(memoryview(Ask(7, array("i", [1, 2, 3]), n_logprobs=2, use_mask=True).encode()))
    return Request(view, 0, 5, 10, view.sampling)


def test_every_move_is_either_legal_or_refused_by_name() -> None:
    for start in Phase:
        for end in Phase:
            r = request()
            r.phase = start
            if (start, end) in LEGAL:
                r.move(end)
                assert r.phase == end
            else:
                with pytest.raises(IllegalMove, match=f"request 7 cannot go from {start.name} to {end.name}"):
                    r.move(end)


def test_nothing_leaves_the_end() -> None:
    assert not any(start == Phase.ENDED for start, _ in LEGAL)


def test_it_knows_its_ask() -> None:
    r = request()
    assert (r.prompt_tokens, r.n_tokens, r.remaining_tokens, r.n_logprobs, r.use_mask, r.received_ns) == (3, 3, 3, 2, True, 5)
