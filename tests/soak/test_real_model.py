"""Many chats at once on a real model through the real CPU pack: each ends properly, answers what it answers alone, leaves nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.engine.policy import Policy
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.manifest import pack_folders
from paddock_runner.memory.state import StateSizes
from paddock_runner.text.load import load_tokenizer
from paddock_runner.wire.messages import Done, Reason

from tests.soak.rig import AT_ONCE, Answer, Rig

PACKS = [folder / "libpaddock_cpu.so" for folder in pack_folders()]
pytestmark = [pytest.mark.models, pytest.mark.skipif(not any(p.exists() for p in PACKS), reason="the CPU pack is not built")]
SIZES = StateSizes(n_slots=16, max_ctx_tokens=512, page_tokens=32, n_pages=100, n_vocab=49152, max_step_tokens=256, max_step_rows=64, max_bias=16, max_top=20)
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
SYSTEM = "You are a careful assistant who answers in full sentences, gives examples from daily life and never makes anything up. " * 4
TOPICS = ("bread", "the moon", "old maps", "bees", "glass", "a lighthouse", "rain in the desert", "prime numbers", "sailing", "tea", "bridges", "snow")
ASKS = ("Tell me about {}.", "What is {} good for?", "Write three lines on {} for a child.", "Why do people care about {}, and since when?")


class Place:
    """The device and the tokenizer of one model."""

    def __init__(self, path: Path, sizes: StateSizes = SIZES) -> None:
        checkpoint = open_checkpoint(path)
        blueprint = read_blueprint(checkpoint)
        pack = next(p for p in PACKS if p.exists())
        self.sizes = sizes
        self.device = build_device(Assembly(pack, sizes, kv_format="f32", n_threads=2), blueprint, tensors_by_name(checkpoint, blueprint))
        self.tokenizer = load_tokenizer(checkpoint)

    def rig(self, policy: Policy | None = None) -> Rig:
        """A fresh engine on this device, with nothing in its cache."""
        rig = Rig(self.sizes, policy=policy, device=self.device)
        rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(self.device.done[0])
        return rig

    def prompts(self, n: int, rng: random.Random) -> list[list[int]]:
        """Chats that share a system prompt, or a part of it."""
        found = []
        for _ in range(n):
            system = SYSTEM[: rng.choice((0, 90, 300, len(SYSTEM)))]
            ask = rng.choice(ASKS).format(rng.choice(TOPICS))
            text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n"
            found.append([int(t) for t in self.tokenizer.encode(text)])
        return found


@pytest.fixture(scope="module")
def place(models_dir: Path) -> Iterator[Place]:
    found = Place(models_dir / MODEL)
    yield found
    found.device.close()


@dataclass
class Chat:
    """One ask and what came of it."""

    prompt: list[int]
    n_tokens: int
    answer: Answer


def storm(place: Place, n: int, seed: int) -> list[Chat]:
    """n asks that come in bursts, some aborted on the way. The engine starts with an empty cache."""
    rng = random.Random(seed)
    rig = place.rig()
    chats = []
    abort_at: dict[int, int] = {}

    def on_token(answer: Answer) -> None:
        if abort_at.get(answer.ask.ask_id) == len(answer.tokens):
            rig.abort(answer)

    rig.on_token = on_token
    for prompt in place.prompts(n, rng):
        n_tokens = rng.randrange(1, 32)
        answer = rig.ask(prompt, n_tokens, temperature=0.0, client=rng.randrange(4))
        chats.append(Chat(prompt, n_tokens, answer))
        if rng.random() < 0.2:
            abort_at[answer.ask.ask_id] = rng.randrange(1, n_tokens + 1)
        if rng.random() < 0.3:
            rig.turn()
    rig.run(check=False)
    rig.assert_empty()
    rig.close()
    return chats


def judge(place: Place, chats: list[Chat]) -> None:
    """Everything ended properly; every answer is, token for token, the one given alone."""
    for chat in chats:
        end, tokens = chat.answer.end, chat.answer.tokens
        assert isinstance(end, Done) and end.reason in (Reason.LENGTH, Reason.ABORT) and end.output_tokens == len(tokens)
        assert end.reason == Reason.ABORT or len(tokens) == chat.n_tokens
        rig = place.rig()
        alone = rig.ask(chat.prompt, chat.n_tokens, temperature=0.0)
        rig.run(check=False)
        rig.close()
        assert tokens == alone.tokens[: len(tokens)]


def test_a_long_chat_that_is_read_aside_answers_what_it_answers_alone_and_streams_go_on(models_dir: Path) -> None:
    place = Place(models_dir / MODEL, replace(SIZES, part_processors=1, part_tokens=64))
    rig, rng = place.rig(replace(AT_ONCE, burst_ms=0.1)), random.Random(4)
    chats = [Chat(p, 150, rig.ask(p, 150, temperature=0.0)) for p in place.prompts(3, rng)]
    while any(len(c.answer.tokens) < 2 for c in chats):
        rig.turn()
    long = [int(t) for t in place.tokenizer.encode(SYSTEM * 3)][:400]
    n_before = [len(c.answer.tokens) for c in chats]
    chats.append(Chat(long, 8, rig.ask(long, 8, temperature=0.0)))
    while not chats[-1].answer.tokens:
        rig.turn()
    assert rig.engine.aside.n_tokens == len(long) - 1
    assert all(len(c.answer.tokens) > n for c, n in zip(chats, n_before, strict=False))
    rig.run(check=False)
    rig.assert_empty()
    rig.close()
    judge(place, chats)
    place.device.close()


def test_twenty_chats_at_once_answer_what_they_answer_alone(place: Place) -> None:
    judge(place, storm(place, 20, seed=1))


@pytest.mark.slow
def test_two_hundred_chats_at_once_answer_what_they_answer_alone_and_memory_is_flat(place: Place) -> None:
    process = psutil.Process()
    storm(place, 200, seed=2)
    before = process.memory_info().rss
    chats = storm(place, 200, seed=3)
    assert process.memory_info().rss - before < 8 << 20
    judge(place, chats)
