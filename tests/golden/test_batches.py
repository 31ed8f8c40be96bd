"""Requests at once, through the engine and the real pack, answer what they answer alone: for each kind of layer there is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.cache import tiers
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.tiering import TierConfig
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.part import parted
from paddock_runner.memory.state import StateSizes, largest_window, state_layout, window_pages
from paddock_runner.pack.device import Device
from paddock_runner.pack.library import find_pack, load_pack

from tests.golden.test_tiny import FAMILIES, TINY
from tests.soak.rig import Rig

N_PAGES = 34
"""Too few for six full requests: some make way for others, and begin again."""


class Place:
    """A device with a tiny model, whose numbers are the same whatever else is in the batch; with a part of one thread they are not. Layers with a window have as few pages of their own as can be."""

    def __init__(self, name: str, n_slots: int = 6, max_guesses: int = 0, has_windows: bool = True, has_part: bool = False) -> None:
        checkpoint = open_checkpoint(TINY / name)
        blueprint = read_blueprint(checkpoint)
        blueprint = replace(blueprint, max_guesses=max_guesses if blueprint.has_states else 0)
        states = state_layout(blueprint).slot_bytes
        self.sizes = StateSizes(n_slots, 64, 4, N_PAGES if n_slots == 6 else 17 * n_slots, blueprint.n_vocab, max(24, 2 * n_slots), n_slots, 4, 3, 6, states, 9 if states else 0, blueprint.lookback_tokens, blueprint.max_guesses)
        if has_windows and (window := largest_window(blueprint)):
            self.sizes = replace(self.sizes, window_tokens=window, n_window_pages=window_pages(window, n_slots, self.sizes.slot_pages, 4, self.sizes.max_step_tokens) + 6)
        if has_part:
            self.sizes = replace(parted(blueprint, self.sizes, "cpu", 2, 0.5, False), n_pages=17 * n_slots)
        self.device = build_device(Assembly(find_pack("cpu"), self.sizes, "f32", n_threads=2, is_invariant=not has_part), blueprint, tensors_by_name(checkpoint, blueprint))

    def conversation(self, prompt: list[int], more: list[list[int]], n_tokens: int) -> list[tuple[int, list[int], int, list[int]]]:
        """Turns of one chat: prompt tokens, prompt, how many were cached, answer."""
        rig = Rig(self.sizes, device=self.device, policy=Policy(share_tokens=4))
        rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(self.device.done[0])
        found = []
        for words in more:
            prompt = prompt + words
            answer = rig.ask(prompt, n_tokens, temperature=0.0)
            rig.run()
            found.append((len(prompt), prompt, answer.done.cached_tokens, answer.tokens))
            prompt = prompt + answer.tokens
        rig.close()
        return found

    def scored(self, prompts: list[list[int]], n_tokens: int) -> list[tuple[list[int], list[float]]]:
        """Greedy answers to prompts that are asked for at once, and the log-probability of each token."""
        rig = Rig(self.sizes, device=self.device)
        rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(self.device.done[0])
        found = [rig.ask(p, n_tokens, temperature=0.0, n_logprobs=1) for p in prompts]
        rig.run()
        rig.close()
        return [(x.tokens, [pair for top in x.tops for pair in top]) for x in found]

    def answers(self, prompts: list[list[int]], n_tokens: list[int]) -> list[list[int]]:
        """Greedy answers to prompts that are asked for at once."""
        rig = Rig(self.sizes, device=self.device, policy=Policy(share_tokens=4))
        rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(self.device.done[0])
        found = [rig.ask(p, n, temperature=0.0) for p, n in zip(prompts, n_tokens, strict=True)]
        rig.run()
        rig.assert_empty()
        rig.close()
        return [x.tokens for x in found]


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_do_not_depend_on_what_else_is_in_the_batch(name):
    place = Place(name)
    try:
        rng = random.Random(5)
        common = [rng.randrange(100) for _ in range(13)]
        prompts = [common[: rng.choice((0, 9, 13))] + [rng.randrange(100) for _ in range(rng.randrange(1, 22))] for _ in range(10)]
        n_tokens = [rng.randrange(1, 20) for _ in prompts]
        together = place.answers(prompts + prompts[:3], n_tokens + n_tokens[:3])
        for prompt, n, answer in zip(prompts, n_tokens, together, strict=False):
            assert answer == place.answers([prompt], [n])[0]
        assert together[10:] == together[:3]
    finally:
        place.device.close()


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gpt-oss", "exaone4", "mistral-window", "kolibri", "laguna"])
def test_answers_are_the_same_when_pages_behind_the_window_are_given_back(name):
    rng = random.Random(9)
    common = [rng.randrange(100) for _ in range(20)]
    prompts = [common[: rng.choice((0, 9, 20))] + [rng.randrange(100) for _ in range(rng.randrange(1, 22))] for _ in range(10)]
    found = []
    for has_windows in (False, True):
        place = Place(name, has_windows=has_windows)
        try:
            assert bool(place.sizes.n_window_pages) == has_windows
            found.append((place.answers(prompts, [20] * len(prompts)), [(prompt, answer) for _, prompt, _, answer in place.conversation(common[:7], [p[-8:] for p in prompts[:3]], 6)]))
        finally:
            place.device.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_an_answer_alone_is_the_same_bits_as_among_31_others(name):
    place = Place(name, n_slots=32)
    try:
        rng = random.Random(11)
        prompts = [[rng.randrange(100) for _ in range(rng.randrange(1, 40))] for _ in range(32)]
        together = place.scored(prompts, 16)
        for k in (0, 7, 19, 31):
            assert together[k] == place.scored([prompts[k]], 16)[0], "tokens and log-probabilities"
    finally:
        place.device.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_turn_computes_only_what_is_new_and_answers_what_it_answers_alone(name):
    place = Place(name)
    try:
        turns = place.conversation(list(range(3, 20)), [[], [7, 8, 9], [4]], 11)
        for n_prompt, prompt, cached, answer in turns:
            assert answer == place.answers([prompt], [11])[0]
            assert cached == 0 if prompt is turns[0][1] else cached >= n_prompt - 3 - 5
    finally:
        place.device.close()


@pytest.mark.parametrize("name", ["llama", "qwen3.5", "lfm2", "granite-hybrid", "gemma3", "gpt-oss"])
def test_a_restart_answers_from_pages_on_disk_what_it_answered_before(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "perf_counter_ns", lambda: 0)  # reading takes no time: however slow this machine is, it pays
    place = Place(name)
    try:
        config = TierConfig(1 << 20, 1 << 24, tmp_path, (name,))
        prompt, found = list(range(3, 45)), []
        for _ in range(2):
            rig = Rig(place.sizes, device=place.device, policy=Policy(share_tokens=4))
            rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(place.device.done[0])
            rig.runner.use_tiers(place.device, config)
            answer = rig.ask(prompt, 12, temperature=0.0)
            while answer.end is None:
                rig.turn()
            found.append((answer.done.cached_tokens, answer.tokens))
            rig.close()
            place.device.fill(place.device.kv_address, 0xFF, N_PAGES * place.device.kv_page_bytes)
            if place.sizes.recurrent_bytes:
                place.device.fill(place.device.state.recurrent, 0xFF, place.sizes.n_slots * place.sizes.recurrent_bytes)
            if place.device.windows is not None:
                place.device.fill(place.device.windows.kv, 0xFF, place.sizes.n_window_pages * place.device.window_bytes)
        assert [n for n, _ in found] == [0, 40] and found[0][1] == found[1][1]
    finally:
        place.device.close()


def test_memory_of_pages_is_given_back_and_comes_again():
    device = Device(load_pack(find_pack("cpu")), 0, 1)
    try:
        size = 1 << 20
        device.reserve_kv(64, size)
        assert device.grow_pages(64) == 64
        device.fill(device.kv_address, 7, 64 * size)
        device.copy_page(40, 3)
        assert device.shrink_pages(9) == 10, "whole granules of 2 MiB"
        assert device.allocated["kv"] == 10 * size and device.shrink_pages(20) == 10
        assert device.grow_pages(64) == 64
        assert device.read(device.kv_address + 3 * size, 4) == b"\7" * 4 and device.read(device.kv_address + 40 * size, 4) == bytes(4)
    finally:
        device.close()
