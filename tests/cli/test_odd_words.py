"""Command lines of words that mean nothing: each ends in a documented exit code and one sentence, none in a traceback."""

from __future__ import annotations

import random

import pytest
from paddock_manager.commands.completion import all_commands
from paddock_runner.errors import PaddockError

WORDS = [
    "", "nosuch", "../x", "a/b/c", "org/repo:Q4_0", "\udcff", "ä", "/tmp", "/dev/null", "-1", "0", "9" * 21, "1e9", "nan", "inf", "24GiB", "-5GiB",
    "http://127.0.0.1:9/x.gguf", "http://[::1", "https://", "file:///etc/passwd", "@", "x@y:z", "{}", "--", "-", "\0", "a\nb", "%s", "serve.port", "sm_90", "sm_1", "cuda:9", "*",
]  # fmt: skip
STARTS = {"run", "serve", "launch", "bench", "export", "logs"}
"""Commands that start servers, write where they are told or go on."""


def codes(kind=PaddockError):
    """The exit codes of all errors."""
    return {kind.exit_code}.union(*(codes(k) for k in kind.__subclasses__()))


@pytest.mark.parametrize("command", [c for c in all_commands() if c.name not in STARTS], ids=lambda c: c.name)
def test_odd_words_are_answered(paddock, monkeypatch, command):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    chance = random.Random(command.name)
    for _ in range(12):
        words = chance.choices(WORDS, k=chance.randint(0, 3))
        for option in chance.sample(command.options, min(len(command.options), chance.randint(0, 3))):
            words += [option.name, chance.choice(WORDS)] if chance.random() < 0.7 else [option.name]
        if command.name == "doctor" and "--net" in words:
            continue
        done = paddock(command.name, *words)
        assert done.code in {0, *codes()} and "Traceback" not in done.err, words
        assert done.code <= 1 or "error: " in done.err or done.out, words
