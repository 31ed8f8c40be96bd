"""The benches that turn an engine by hand run: the loop in C++ draws as many tokens from the same steps, and a long prompt is measured in turn and aside."""

from __future__ import annotations

import re

from bench import longprefill, twin
from tests.golden.test_tiny import TINY


def test_the_loop_in_cpp_gives_the_same_steps(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["twin", str(TINY / "llama"), "--cells", "8/4c1", "6/5c3", "--rounds", "1", "--threads", "1"])
    twin.main()
    told = re.findall(r"here\.twin\.(\S+?)\.(\w+) +(\S+)", capsys.readouterr().out)
    assert [(cell, what) for cell, what, _ in told] == [(cell, what) for cell in ("8/4c1", "6/5c3") for what in ("out_tok_s", "ttft_p50_ms")]
    assert all(float(value) > 0 for _, _, value in told)


def test_a_long_prompt_beside_streams_is_measured_in_turn_and_aside(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["longprefill", str(TINY / "llama"), "--streams", "2", "--prompt", "400", "--rounds", "1", "--threads", "2", "--share", "0", "0.5"])
    longprefill.main()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if ": gaps before" in line] == ["0 aside", "0.5 aside"]


def test_short_prompts_come_while_a_long_one_is_read_aside(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["longprefill", str(TINY / "llama"), "--streams", "2", "--prompt", "400", "--rounds", "1", "--threads", "2", "--share", "0.5", "--beside", "8", "40"])
    longprefill.main()
    told = re.findall(r"(\d+) tokens alone .*; beside 2 streams and 400 tokens that take .*; gaps before", capsys.readouterr().out)
    assert told == ["8", "40"]
