"""A small agent replay: after the first turn nearly the whole prompt comes from the cache, whatever kinds of layers the model has."""

from __future__ import annotations

import pytest
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.engine.policy import Policy
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.state import StateSizes, state_layout
from paddock_runner.pack.library import find_pack

from bench.agents import Plan, Replay, cached_share
from tests.golden.test_tiny import TINY

PLAN = Plan(sessions=4, turns=12, system=120, said=(3, 9), answer=(2, 8))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3.5", "lfm2"])
def test_most_of_a_prompt_is_cached_after_the_first_turn(name: str) -> None:
    checkpoint = open_checkpoint(TINY / name)
    blueprint = read_blueprint(checkpoint)
    states = state_layout(blueprint).slot_bytes
    sizes = StateSizes(4, 352, 4, 4 * 88 + 1, blueprint.n_vocab, 64, 8, 4, 3, 6, states, 16 if states else 0)
    device = build_device(Assembly(find_pack("cpu"), sizes, "f32", n_threads=1), blueprint, tensors_by_name(checkpoint, blueprint))
    try:
        replay = Replay(PLAN, sizes, device, blueprint.n_vocab, Policy(share_tokens=8))
        turns = replay.run()
        assert len(turns) == PLAN.sessions * PLAN.turns and cached_share(turns) >= 0.93
        first = [t.cached_tokens for t in turns if t.number == 0]
        assert sorted(first)[1] >= 112, "the system prompt is computed once"
        replay.engine.check()
    finally:
        device.close()
