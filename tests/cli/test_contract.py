"""What scripts rely on: every exit code is reached, every command's JSON holds to its schema, and its text is the committed one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from paddock_manager import cli, schemas
from paddock_manager.commands import run as run_command
from paddock_manager.paths import places
from paddock_runner import errors

from tests.cli.conftest import tiny_gguf
from tests.cli.test_keeping_models import REF, REPO
from tests.hostile.test_safetensors_cases import LLAMA_CONFIG, NAMES, shard

pytestmark = pytest.mark.usefixtures("fake_runner")
TEXTS = Path(__file__).parent / "snapshots" / "texts"


@pytest.fixture
def repo(hub, monkeypatch, tmp_path):
    """A hub with one GGUF repository of two quants and one folder; the shell is in an empty folder."""
    hub.add(REPO, {"tiny.Q4_0.gguf": tiny_gguf(), "tiny.Q8_0.gguf": tiny_gguf(context=256)})
    hub.add("org/folder", {"config.json": json.dumps(LLAMA_CONFIG).encode(), "model.safetensors": shard(NAMES)})
    (tmp_path / "shell").mkdir()
    monkeypatch.chdir(tmp_path / "shell")
    return hub


def broken_open(paddock, tmp_path, name, body):
    path = tmp_path / name
    path.write_bytes(body)
    return str(path)


def reach(code, paddock, repo, tmp_path, monkeypatch):
    """A command line that ends with this code."""
    if code == 0:
        return paddock("version")
    if code == 1:
        (places().models / "org/x/.paddock").mkdir(parents=True)
        (places().models / "org/x/.paddock/record.json").write_text("{")
        return paddock("doctor")
    if code == 2:
        return paddock("pull", "a b")
    if code == 3:
        return paddock("show", "nothing")
    if code == 4:
        return paddock("pull", REPO)
    if code == 5:
        repo.token = "hf_secret"
        return paddock("pull", REF)
    if code == 6:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        return paddock("pull", REF)
    if code == 7:
        return paddock("inspect", broken_open(paddock, tmp_path, "m.gguf", b"GGUF\3\0\0\0" + bytes(8)))
    if code == 8:
        return paddock("pull", REF, "--reserve", "1000TiB")
    if code == 9:
        return paddock("fit", "org/folder", "--vram", "1MiB", "--arch", "sm_89")
    if code == 10:
        from paddock_manager.fit import fit

        monkeypatch.setattr(fit, "gpus", lambda: ([], "no NVIDIA driver is installed"))
        return paddock("fit", "org/folder", "--device", "cuda")
    if code == 11:
        return paddock("run", broken_open(paddock, tmp_path, "breaks.gguf", tiny_gguf()), "a b c")
    if code == 12:
        return paddock("fit", broken_open(paddock, tmp_path, "m.gguf", tiny_gguf(arch="hologram")))
    if code == 13:
        paddock("pull", REF, "--reserve", "0")
        paddock("serve", REF, "--port", "0")
        return paddock("rm", REF)
    assert code == 130

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "once", interrupted)
    return paddock("run", broken_open(paddock, tmp_path, "mine.gguf", tiny_gguf()), "hello")


CODES = sorted({0, *(k.exit_code for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.PaddockError))})


def test_exit_codes_are_the_documented_ones():
    assert [*range(14), 130] == CODES
    page = (Path(__file__).parents[2] / "docs/reference/errors.md").read_text()
    assert all(re.search(rf"\b{code}\b", page) for code in CODES)


@pytest.mark.parametrize("code", CODES)
def test_every_exit_code_is_reached(paddock, repo, tmp_path, monkeypatch, code):
    done = reach(code, paddock, repo, tmp_path, monkeypatch)
    assert done.code == code, done.err
    assert done.err.count("error: ") == (1 if code > 1 else 0)


def steps(model_file, tmp_path):
    """Command lines, in order; each of them works in text and with --json."""
    mine = str(model_file)
    return [
        ("search", "--local", "smollm2"), ("pull", REF, "--reserve", "0", "--dry-run"), ("pull", REF, "--reserve", "0", "--lock"),
        ("pull", "--locked"), ("add", mine), ("ls",), ("ls", "--remote", REPO), ("ls", "--elsewhere"), ("show", REF), ("show", REF, "--files"),
        ("show", REF, "--template"), ("show", REF, "--diff", mine), ("inspect", mine), ("inspect", mine, "--tensors", "--metadata"),
        ("fit", "org/folder", "--vram", "24GiB", "--arch", "sm_89", "--ctx", "128", "--batch", "4"), ("verify", REF), ("du",), ("export", REF, str(tmp_path / "out")),
        ("config",), ("config", "explain", "serve.port"), ("key", "ls"), ("key", "--path"), ("completion", "bash"), ("version",), ("doctor",),
        ("serve", mine, "--port", "0", "--ctx", "512"), ("ps",), ("logs", "-n", "1"), ("run", mine, "hello there"), ("launch", "env", mine, "--print"),
        ("bench", mine, "--streams", "1", "--tokens", "4", "--prompt-tokens", "4"), ("stop", "--all"), ("rm", REF), ("gc",), ("stop", "--all"), ("ps",),
    ]  # fmt: skip


def plain(text, command, tmp_path):
    """Without what differs from run to run and from machine to machine; of a plan only what is around its lines."""
    text = text.replace(str(places().home), "HOME").replace(str(tmp_path), "TMP")
    text = re.sub(r"/\S*/paddock_runner/\S*|/\S*/python[0-9.]*", "PATH", text)
    text = re.sub(r"https?://127\.0\.0\.1:\d+", "URL", text)
    text = re.sub(r"pk-[\w-]{40,}", "KEY", text)
    text = re.sub(r"(?<=pid )\d+|(?<=ready on )\d+", "N", text)
    text = re.sub(r"just now|\b\d+ s ago", "AGO", text).replace("as clones in", "as copies in")
    if command in MEASURED:
        text = "\n".join(re.sub(r"\b\d+(\.\d+)?\b", "0", x) for x in text.split("\n") if command != "fit" or not x.startswith("  "))
    return re.sub(r"[ \t]+", " ", text).replace(" \n", "\n")


MEASURED = {"fit", "du", "ps", "bench", "gc", "rm", "logs"}
"""Their numbers are measured: they are masked."""
OWN_MACHINE = {"doctor", "version", "completion", "ls --elsewhere"}
"""Text that depends on the machine it is printed on: its shape is tested, its words are not."""


def test_text_of_every_command_is_the_committed_one(paddock, repo, model_file, tmp_path):
    TEXTS.mkdir(exist_ok=True)
    seen, wrong = set(), []
    for number, words in enumerate(steps(model_file, tmp_path)):
        seen.add(words[0])
        done = paddock(*words)
        assert done.code in (0, 1) and "\x1b" not in done.out + done.err, (words, done.err)
        if words[0] in OWN_MACHINE or " ".join(words) in OWN_MACHINE:
            assert done.out.strip() or done.err.strip()
            continue
        shown = plain(f"$ paddock {' '.join(words)}\n{done.out}--- talk\n{done.err}", words[0], tmp_path)
        path = TEXTS / f"{number:02}-{words[0]}.txt"
        if not path.exists():
            path.write_text(shown)
            wrong.append(f"{path.name} was written: look at it and commit it")
        elif path.read_text() != shown:
            wrong.append(f"{path.name} differs: remove it to write it anew\n{shown}")
    assert not wrong, "\n".join(wrong)
    assert seen == set(cli.COMMANDS)


def test_json_of_every_command_holds_to_its_schema(paddock, repo, model_file, tmp_path):
    kinds = set()
    for words in steps(model_file, tmp_path):
        done = paddock(*words, "--json")  # the fixture checks the document against the published schema
        assert done.code in (0, 1), (words, done.err)
        assert done.json["schema"] == f"paddock.{words[0]}/1"
        kinds.add(words[0])
    paddock("show", "nothing", "--json")
    assert kinds | {"error"} == set(schemas.SHAPES)


def test_quiet_and_json_print_nothing_but_the_document(paddock, repo):
    done = paddock("pull", REF, "--reserve", "0", "--json", "--quiet")
    assert json.loads(done.out)["model"]["state"] == "ok" and done.err == ""
