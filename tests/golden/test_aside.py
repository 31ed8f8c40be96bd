"""Prompts that a part of the device reads beside streams, through the engine and the real pack: what follows is as likely as after a prompt that was read as usual, for each kind of layer."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.golden.test_batches import Place
from tests.golden.test_tiny import FAMILIES
from tests.soak.rig import AT_ONCE, Rig


def best(place: Place, prompt: list[int], n_streams: int) -> tuple[dict[int, float], int]:
    """The best tokens behind a prompt and their log-probabilities, and how many of its tokens were read aside, beside so many streams."""
    rig = Rig(place.sizes, device=place.device, policy=replace(AT_ONCE, burst_ms=0.0))
    rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(place.device.done[0])
    streams = [rig.ask([3 + i, 5, 8], 60, temperature=0.0) for i in range(n_streams)]
    while any(not a.tokens for a in streams):
        rig.turn()
    answer = rig.ask(prompt, 1, temperature=0.0, n_logprobs=3)
    while answer.end is None:
        rig.turn()
        rig.engine.check()
    for stream in streams:
        rig.abort(stream)
    rig.run()
    rig.assert_empty()
    rig.close()
    return dict(answer.tops[0]), rig.engine.aside.n_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_a_prompt_that_was_read_aside_is_what_follows_it_otherwise(name):
    place = Place(name, has_part=True)
    try:
        assert place.device.aside is not None
        rng = random.Random(6)
        for n in (50, 37):
            prompt = [rng.randrange(100) for _ in range(n)]
            alone, n_alone = best(place, prompt, 0)
            aside, n_aside = best(place, prompt, 2)
            assert n_alone == 0 and n_aside > 0
            common = alone.keys() & aside.keys()
            assert common
            np.testing.assert_allclose([aside[t] for t in common], [alone[t] for t in common], atol=2e-3)
    finally:
        place.device.close()
