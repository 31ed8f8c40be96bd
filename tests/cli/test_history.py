"""Planned against measured: noted at every start, shown by fit --history and doctor."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paddock_manager.fit import history
from paddock_manager.fit.history import Run
from paddock_manager.paths import places

GIB = 1 << 30


def test_memory_of_a_process_and_its_children_is_measured():
    script = "import subprocess, sys; b = bytearray(b'x' * (64 << 20)); p = subprocess.Popen([sys.executable, '-c', \"b = bytearray(b'x' * (32 << 20)); print('ready', flush=True); input()\"], stdin=subprocess.PIPE); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        took = history.measure(process.pid, "cpu")
        process.communicate(b"\n")
    assert 96 << 20 <= took <= 160 << 20
    assert history.measure(process.pid, "cpu") == 0


def test_runs_are_kept_in_order_and_damaged_lines_are_passed_over(paddock):
    home = places()
    home.home.mkdir(parents=True, exist_ok=True)
    for number in range(history.KEPT_LINES + 3):
        history.note(home, Run(f"m{number}", "cpu", 512, 2, 2 * GIB, GIB, float(number)))
    found = history.runs(home)
    assert len(found) == history.KEPT_LINES and found[-1].model == f"m{history.KEPT_LINES + 2}"
    with (home.home / "history.jsonl").open("a") as f:
        f.write('{"model": 1}\nnonsense\n')
    assert len(history.runs(home)) == history.KEPT_LINES


def test_starts_that_end_together_are_all_kept(paddock):
    home = places()
    home.home.mkdir(parents=True, exist_ok=True)
    code = "import sys; from paddock_manager.fit.history import Run, note; from paddock_manager.paths import places\nfor n in range(60): note(places(), Run(sys.argv[1], 'cpu', 512, 2, 2, 1, float(n)))"
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("a", "b", "c")]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    found = history.runs(home)
    assert len(found) == 180 and [r.at for r in found if r.model == "a"] == [float(n) for n in range(60)]


def test_fit_shows_the_history_and_doctor_warns_when_a_plan_was_too_small(paddock):
    home = places()
    home.home.mkdir(parents=True, exist_ok=True)
    assert "nothing was started" in paddock("fit", "--history").err
    history.note(home, Run("small", "cpu", 512, 2, 2 * GIB, GIB, 0.0))
    done = paddock("fit", "--history")
    assert done.out.splitlines()[1].split()[:7] == ["small", "cpu", "512", "2", "2.00", "1.00", "50.0%"]
    assert "none over its plan, at most 50.0%" in paddock("doctor").out
    history.note(home, Run("large", "cuda", 512, 2, 2 * GIB, 3 * GIB, 1.0))
    rows = paddock("fit", "--history", "--json").json["history"]
    assert [(r["model"], r["is_over"]) for r in rows] == [("small", False), ("large", True)]
    assert [r["model"] for r in paddock("fit", "large", "--history", "--json").json["history"]] == ["large"]
    assert "1 of 2 runs took more than planned, large 1.00 GiB more" in paddock("doctor").out


def test_fit_without_a_model_says_so(paddock):
    assert paddock("fit").code == 2


@pytest.mark.parametrize("measured, is_over", [(100, False), (100 + (60 << 20), False), (200 << 20, True)])
def test_slack_is_64_mib_or_one_percent(measured, is_over):
    assert Run("m", "cpu", 1, 1, 100, measured, 0.0).is_over is is_over
    assert not Run("m", "cpu", 1, 1, 100 * GIB, 100 * GIB + (900 << 20), 0.0).is_over


def test_damaged_history_keeps_no_server_from_starting():
    home = places()
    home.home.mkdir(parents=True)
    (home.home / "history.jsonl").write_bytes(b"\xff\xfe\n")
    history.note(home, Run("m", "cpu", 1, 1, 1, 1, 1.0))
    assert [r.model for r in history.runs(home)] == ["m"]
