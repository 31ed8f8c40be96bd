"""Who reads us may go at any time: results that nobody reads end a command, talk that nobody hears does not."""

from __future__ import annotations

import os
import subprocess
import sys

from paddock_manager.catalog import names
from paddock_manager.paths import places
from paddock_manager.store import index

from tests.cli.conftest import tiny_gguf

PADDOCK = (sys.executable, "-m", "paddock_manager")


def closed() -> int:
    """The writing end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_pull_whose_talk_nobody_hears_goes_on_to_its_end(hub):
    hub.add("org/tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf()})
    pipe = closed()
    done = subprocess.run([*PADDOCK, "pull", "org/tiny-GGUF", "--progress", "ndjson"], stdout=pipe, stderr=pipe, check=False)
    os.close(pipe)
    assert done.returncode == 0 and index.find(places(), names.parse("org/tiny-GGUF")).state == "ok"


def test_result_that_nobody_reads_is_no_error_and_no_noise():
    for words in (["ls", "--json"], ["--help"], ["config"]):
        pipe = closed()
        done = subprocess.run([*PADDOCK, *words], stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
        os.close(pipe)
        assert (done.returncode, done.stderr) == (0, "")


def test_error_keeps_its_exit_code_where_nobody_reads_it():
    pipe = closed()
    done = subprocess.run([*PADDOCK, "show", "nope", "--json"], stdout=pipe, stderr=pipe, check=False)
    os.close(pipe)
    assert done.returncode == 3


def test_log_is_followed_while_somebody_reads_it():
    places().logs.mkdir(parents=True)
    (places().logs / "s.log").write_text("one\n")
    following = subprocess.Popen([*PADDOCK, "logs", "s", "-f"], stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None and following.stdout.readline() == "one\n"
    following.stdout.close()
    assert following.wait(10) == 0
