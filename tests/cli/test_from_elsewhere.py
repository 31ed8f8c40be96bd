"""What people type who come from other programs, and words and disks that are not as one would like: one sentence each."""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from paddock_manager import cli, foreign, options, paths, ui
from paddock_manager.commands import chat, target
from paddock_manager.commands.completion import all_commands
from paddock_manager.fleet import state
from paddock_manager.store import pull
from paddock_runner import cli as runner
from paddock_runner.config import knobs

from tests.cli.conftest import tiny_gguf

pytestmark = pytest.mark.usefixtures("fake_runner")


def test_words_of_other_programs_are_answered_with_ours(paddock):
    for word, ours in cli.HABITS.items():
        assert word not in cli.COMMANDS and ours.split()[0] in cli.COMMANDS
        assert f"did you mean `paddock {ours}`?" in paddock(word).err
    assert "did you mean `paddock help`?" in paddock("hlep").err


def test_no_option_has_two_meanings_in_one_command():
    for command in all_commands():
        words = [w for o in command.all_options for w in (o.name, o.short, *o.also) if w]
        assert len(words) == len(set(words)), command.name


def test_options_of_other_programs_are_taken_for_ours():
    command = next(c for c in all_commands() if c.name == "serve")
    words = ["m", "--max-model-len", "4096", "--max-num-seqs=8", "--kv-cache-dtype", "fp8", "--served-model-name", "x"]
    found = options.parse(command, words).found
    assert found == {"models": ["m"], "ctx": 4096, "batch": 8, "kv": "fp8", "name": "x"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--temperature", "-1"), "temperature is -1.0, at least 0 is needed"),
        (("--temp", "101"), "temperature is 101.0, 0 to 100 are possible"),
        (("--temp", "nan"), "--temp takes a number, not 'nan'"),
        (("--top-p", "0"), "top_p is 0.0, more than 0 and at most 1 is possible"),
        (("--top-k", "-2"), "top_k is -2, at least -1 is needed"),
        (("--min-p", "2"), "min_p is 2.0, 0 to 1 are possible"),
        (("--repeat-penalty", "0"), "repetition_penalty is 0.0, more than 0 and at most 10 is possible"),
        (("--max-tokens", "0"), "max_tokens is 0, at least 1 is needed"),
    ],
)
def test_setting_that_cannot_be_is_refused_before_anything_is_loaded(paddock, model_file, words, said):
    done = paddock("run", str(model_file), *words, "hi")
    assert done.code == 2 and done.err == f"error: {said}\n"


def test_words_with_a_tilde_that_names_nobody_are_words(paddock, model_file):
    done = paddock("run", str(model_file), "~no.such.user/a.b what is this?")
    assert done.code == 0 and done.out == "1: ~no.such.user/a.b what is this?\n"
    assert paddock("show", "~no.such.user/x").err.startswith("error: ~no.such.user/x: there is no such file or folder\n")


def test_bytes_that_are_no_text_are_counted(paddock, model_file, monkeypatch):
    done = paddock("run", str(model_file), os.fsdecode(b"caf\xff"))
    assert done.code == 2 and "error: the prompt is no text in UTF-8: byte 3 is 0xff\n" in done.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode() + b"\xfe"), "utf-8"))
    done = paddock("run", str(model_file), "-")
    assert done.code == 2 and "error: standard input is no text in UTF-8: byte 2 is 0xfe\n" in done.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode()), "ascii"))
    assert paddock("run", str(model_file), "-").out == "1: é\n"


def test_full_disk_names_the_file_and_leaves_nothing(paddock, model_file, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    home = paths.places().home
    for words in (("key",), ("add", str(model_file)), ("config", "set", "serve.port", "1234")):
        done = paddock(*words)
        assert done.code == 8 and f"error: {home}" in done.err and ": No space left on device\n" in done.err
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_endpoint_that_is_no_address_is_told(paddock, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "nonsense")
    done = paddock("pull", "org/repo")
    assert done.code == 2 and "error: HF_ENDPOINT is 'nonsense', which is no address\n" in done.err


def test_options_of_several_models_are_no_silence_for_one(paddock, model_file):
    for words in (("--idle", "5"), ("--budget", "1GiB")):
        done = paddock("serve", str(model_file), "--port", "0", *words)
        assert done.code == 2 and f"error: {words[0]} is for several models" in done.err


def test_chat_takes_settings_as_others_write_them_and_says_what_is_wrong(paddock, model_file, tmp_path, monkeypatch):
    said = []
    (tmp_path / "no.json").write_text("{}")
    lines = ["/set parameter top_k 5", "/set system be kind", "/set temperature 1000", f"/load {tmp_path}/no.json", f"/load {tmp_path}/none", "\udcff", "/system"]

    def typed(mark: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(chat.Ui, "say", lambda self, text: said.append(text))
    monkeypatch.setattr(chat.Ui, "fail", lambda self, error: said.append(error.message))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert paddock("run", str(model_file)).code == 0
    assert "  top_k = 5" in said and said.count("system: be kind") == 2
    assert "temperature is 1000.0, 0 to 100 are possible" in said
    assert f"{tmp_path}/no.json is no conversation that /save wrote" in said
    assert f"{tmp_path}/none: No such file or directory" in said
    assert "the message is no text in UTF-8: byte 0 is 0xff" in said


def test_flags_of_the_runner_go_through_and_the_managers_own_do_not(paddock, model_file):
    unit = paddock("serve", str(model_file), "--task", "embed", "--gpu", "1", "--runner", "host-cache-gib=8", "--runner", "deterministic", "--systemd").out
    assert '"--gpu" "1"' in unit and '"--task" "embed" "--host-cache-gib" "8" "--deterministic"' in unit
    for word, said in [("port=5", "the manager sets --port"), ("max-ctx=9", "that is --ctx here"), ("a b", "a flag is NAME or NAME=VALUE")]:
        assert f"error: --runner {word}: {said}\n" in paddock("serve", str(model_file), "--port", "0", "--name", "x", "--runner", word).err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gc", "--older-than", "-1"), "--older-than is -1.0, at least 0 is needed"),
        (("stop", "x", "--timeout", "-5"), "--timeout is -5.0, at least 0 is needed"),
        (("serve", "x", "--timeout", "nan"), "--timeout takes a number, not 'nan'"),
        (("serve", "x", "--port", "65536"), "--port is 65536, at most 65535 is possible"),
        (("serve", "x", "--ctx", "0"), "--ctx is 0, at least 1 is needed"),
        (("serve", "x", "--threads", "99999"), "--threads is 99999, at most 1024 is possible"),
        (("serve", "x", "y", "--idle", "-1"), "--idle is -1.0, at least 0 is needed"),
        (("fit", "x", "--batch", "0"), "--batch is 0, at least 1 is needed"),
        (("bench", "x", "--tokens", "0"), "--tokens is 0, at least 1 is needed"),
        (("fit", "x", "--ctx", "1" * 5000), f"--ctx takes a whole number, not {'1' * 5000!r}"),
    ],
)
def test_number_out_of_its_bounds_is_named(paddock, words, said):
    done = paddock(*words)
    assert done.code == 2 and done.err == f"error: {said}\n"


def test_agent_that_is_not_installed_is_told_before_a_model_is_loaded(paddock, model_file, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    done = paddock("launch", "claude", str(model_file))
    assert done.code == 2 and done.err.startswith("error: claude is not installed\n") and state.servers(paths.places()) == []


def test_pull_that_is_stopped_says_how_it_goes_on(paddock, hub, monkeypatch):
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    hub.add("org/tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf()})
    monkeypatch.setattr(pull.Shop, "execute", stopped)
    done = paddock("pull", "org/tiny-GGUF")
    assert done.code == 130 and done.err.endswith("error: the pull was stopped\nhint:  `paddock pull org/tiny-GGUF:Q4_0` continues it\n")


@pytest.mark.parametrize("width", [200, 60, 30, 6])
def test_bar_is_never_wider_than_the_terminal(monkeypatch, width):
    monkeypatch.setattr(ui.Progress, "_width", lambda self: width)
    drawn = ui.Ui()
    drawn.err = io.StringIO()
    drawn.progress_kind = "bar"
    with drawn.progress("org/tiny", 1000 << 20) as bar:
        bar.move_by(500 << 20)
    last = drawn.err.getvalue().rstrip("\n").split("\r")[-1].removesuffix("\x1b[K")
    assert len(last) < width and "50%" in last and ("█" in last) == (width == 200)


def test_file_whose_name_begins_with_a_dash_is_no_option(paddock, tmp_path):
    path = tmp_path / "-m.gguf"
    path.write_bytes(tiny_gguf())
    assert paddock("run", str(path), "hi").out == "1: hi\n"


def test_page_for_those_who_come_from_elsewhere_says_what_is_so(paddock):
    text = (Path(__file__).parents[2] / "docs/howto/come-from-elsewhere.md").read_text()
    commands = {c.name: c for c in all_commands()}
    for words in re.findall(r"`paddock ([^`]+)`", text):
        name, *rest = shlex.split(words)
        if rest:
            options.parse(commands[name], rest)
        assert name in commands
    for line in re.findall(r"^\| (`-.*) \| (`--.*) \|$", text, re.MULTILINE):
        theirs, ours = (re.findall(r"`(-[a-z-]+)`", cell) for cell in line)
        known = [(o.name, (o.name, o.short, *o.also)) for o in commands["serve"].all_options]
        for word in theirs:
            assert next(name for name, names in known if word in names) in ours, word


def test_name_file_and_host_that_are_not_there_are_told_with_what_is(paddock, hub, monkeypatch):
    hub.add("Org/Tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf(), "tiny.Q8_0.gguf": tiny_gguf()})
    assert "hint:  it has tiny.Q4_0.gguf, tiny.Q8_0.gguf\n" in paddock("pull", "Org/Tiny-GGUF", "--file", "tiny.Q40.gguf").err
    assert paddock("pull", "Org/Tiny-GGUF:Q4_0").code == 0
    assert "hint:  did you mean Org/Tiny-GGUF:Q4_0?\n" in paddock("show", "Org/Tiny-GGUF:Q8_0").err
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "error: 127.0.0.1:9 cannot be reached: Connection refused\n" in paddock("pull", "org/other").err


def test_runner_says_what_an_option_of_elsewhere_is_called_there(capsys):
    for word, ours in (("--max-model-len=8", "--max-ctx"), ("--prot", "--port")):
        assert runner.main(["--model", "x", word]) == 2
        assert f"(did you mean {ours}?)" in capsys.readouterr().err
    assert set(runner.ELSEWHERE.values()) <= {knob.flag for knob in knobs()}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [("version > /dev/full", 8, "No space left on device"), ("version --json > /dev/full", 8, "No space left on device"), ("version >&-", 7, "error: standard output is closed"), ("version --json >&-", 7, "error: standard output is closed"), ("version >&- 2>&-", 7, ""), ("version 2>&-", 0, ""), ("version <&-", 0, ""), ("version > /dev/full 2> /dev/full", 8, "")],
)
def test_output_that_is_full_or_closed_is_no_traceback(words, code, said):
    done = subprocess.run(["sh", "-c", f"'{sys.executable}' -m paddock_manager {words}"], capture_output=True, text=True)
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr


def test_closed_streams_are_nobody_elses(tmp_path):
    """A file that were opened as descriptor 1 would get what others, a library or a child, write to standard output."""
    code = "import sys, os; from paddock_runner.edge.streams import hold_streams; hold_streams(); f = open(sys.argv[1], 'w'); os.write(1, b'x'); os.write(2, b'y'); assert f.fileno() > 2 and sys.stdin.read() == ''"
    done = subprocess.run(["sh", "-c", f"'{sys.executable}' -c \"{code}\" '{tmp_path}/file' <&- >&- 2>&-"])
    assert done.returncode == 0 and (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("words", ["config", "config --json", "--version"])
def test_runner_that_cannot_tell_its_result_does_not_say_that_it_has(words):
    done = subprocess.run(["sh", "-c", f"'{sys.executable}' -m paddock_runner {words} >&-"], capture_output=True, text=True)
    assert done.returncode == 7 and len(done.stderr.splitlines()) == 1


def test_options_of_other_programs_that_are_none_here_are_answered_with_what_to_do(paddock, model_file):
    for words in foreign.ADVICE:
        for command in ("serve", "run"):
            ours = {w for o in next(c for c in all_commands() if c.name == command).all_options for w in (o.name, o.short, *o.also)}
            for word in set(words) - ours:
                done = paddock(command, str(model_file), word, "x")
                assert done.code == 2 and f"`paddock {command}` has no option {word}\nhint:  {foreign.advice(command, word)}\n" in done.err
    assert "hint:  that is the runner's: --runner host-cache-gib=FLOAT\n" in paddock("serve", "x", "--host-cache-gib", "8").err
    assert "hint:  that is the runner's: --runner deterministic\n" in paddock("serve", "x", "--deterministic").err
    assert "hint:  did you mean --prompt-tokens?\n" in paddock("bench", "x", "--prompt", "8").err  # no option of elsewhere where one of ours begins so
    assert "error: --max-model-len takes a whole number, not '2k'\n" in paddock("serve", "x", "--max-model-len", "2k").err


@pytest.mark.parametrize("name", ["", "../x", ".x", "-", "a b", "é", "x" * 97])
def test_name_that_can_be_none_is_told_as_it_was_typed(paddock, model_file, name):
    done = paddock("add", str(model_file), f"--name={name}")
    assert done.code == 2 and f"error: {name!r} cannot be a name\n" in done.err


def test_names_that_are_not_utf8_are_one_sentence(paddock, model_file, tmp_path, monkeypatch):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf")
    Path(odd).symlink_to(model_file)
    for command in ("add", "run", "serve", "fit", "inspect"):
        done = paddock(command, odd, *(["hi"] if command == "run" else []), "--json")
        assert done.code == 7 and "this name is not UTF-8" in done.err, command
        assert done.json["error"]["facts"]["path"] == odd  # bytes that are no text are escapes in JSON
    assert runner.main(["--model", odd]) == 2 and runner.main(["--model", str(model_file), "--name", odd]) == 2
    folder = tmp_path / "folder"
    monkeypatch.setenv("PADDOCK_HOME", os.fsdecode(os.fsencode(folder) + b"\xff"))
    assert "is not UTF-8" in paddock("ls").err


def test_both_programs_take_as_many_threads():
    assert next(k.high for k in knobs() if k.flag == "--threads") == target.MAX_THREADS


def test_advice_names_options_that_there_are():
    known = {w for c in all_commands() for o in c.all_options for w in (o.name, o.short, *o.also)}
    flags = {k.flag.removeprefix("--") for k in knobs()}
    for text in foreign.ADVICE.values():
        assert {w for w in re.findall(r"`(?:paddock \w+ )?(--[a-z-]+)", text)} <= known, text
        assert {w for w in re.findall(r"--runner ([a-z-]+)", text)} <= flags, text
