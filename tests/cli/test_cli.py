"""What is common to all commands: help, JSON, errors, start-up, completion, version, fit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from paddock_manager import cli, options, schemas, ui
from paddock_manager.commands.completion import all_commands
from paddock_manager.options import Option, convert, parse_size
from paddock_runner.errors import UsageError

SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_page_is_the_committed_one(paddock, name):
    done = paddock(name, "--help")
    assert done.code == 0 and done.err == ""
    path = SNAPSHOTS / f"{name}.txt"
    assert path.exists(), "write it with: python -m tests.cli.snapshots"
    assert done.out == path.read_text()


def test_table_and_modules_agree():
    assert sorted(c.name for c in all_commands()) == sorted(cli.COMMANDS)


def test_every_command_has_a_schema():
    assert schemas.VERSION == ui.SCHEMA_VERSION
    assert set(schemas.SHAPES) == {*cli.COMMANDS, "error"}
    for kind in schemas.SHAPES:
        jsonschema.Draft202012Validator.check_schema(schemas.schema(kind))


def test_front_page_lists_every_command(paddock):
    for words in ((), ("help",), ("--help",)):
        done = paddock(*words)
        assert done.code == 0 and all(f"\n  {name} " in done.out for name in cli.COMMANDS)


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["pul", "x"], 2, "there is no command 'pul'"),
        (["ls", "--jso"], 2, "has no option --jso"),
        (["fit"], 2, "needs MODEL"),
        (["fit", "x", "--ctx"], 2, "--ctx needs a value"),
        (["fit", "x", "--ctx", "many"], 2, "--ctx takes a whole number, not 'many'"),
        (["fit", "x", "--kv", "q4"], 2, "--kv is one of bf16, f16, f32, fp8, not 'q4'"),
        (["du", "extra"], 2, "does not know what to do with 'extra'"),
        (["ls", "--json=1"], 2, "--json takes no value"),
        (["show", "nothing"], 3, "no model 'nothing' is here"),
        (["show", "./nothing.gguf"], 3, "there is no such file"),
        (["show", "a/b/c"], 2, "is not a repository name"),
        (["show", "../etc/passwd/x"], 3, "there is no such file"),
        (["pull", "org/repo:latest"], 2, "nothing is called latest"),
        (["pull", "smollm"], 3, "the catalog has no model 'smollm'"),
        (["completion", "tcsh"], 2, "no completion for 'tcsh'"),
    ],
)
def test_wrong_command_lines_end_in_one_sentence(paddock, words, code, message):
    done = paddock(*words)
    assert done.code == code and done.out == ""
    lines = done.err.splitlines()
    assert lines[0].startswith("error: ") and message in lines[0]
    assert len(lines) <= 2 and "Traceback" not in done.err


def test_error_is_json_on_standard_output_and_a_sentence_on_standard_error(paddock):
    done = paddock("show", "smolm2-135m", "--json")
    assert done.code == 3
    error = done.json["error"]
    assert done.json["schema"] == "paddock.error/1"
    assert (error["code"], error["exit_code"], error["facts"]["known"]) == ("model_not_found", 3, [])
    assert error["hint"] == "the catalog has smollm2-135m" and error["message"] in done.err


def test_quiet_keeps_results_and_errors(paddock):
    assert paddock("ls", "-q").err == ""
    assert paddock("show", "nothing", "-q").err.startswith("error: ")


def test_no_colour_without_a_terminal(paddock):
    assert "\x1b" not in paddock("show", "nothing").err


def test_pages_closed_early_are_no_error():
    words = [sys.executable, "-c", "from paddock_manager.cli import main; import sys; sys.exit(main(['help']))"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()


def test_light_commands_import_nothing_heavy():
    heavy = ["typer", "rich", "httpx", "huggingface_hub", "numpy", "ctypes.util", "paddock_runner.pack", "paddock_runner.engine", "paddock_runner.model"]
    code = (
        "import sys; from paddock_manager.cli import main; main(['ls']); main(['show', 'x']);"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_fit_imports_no_pack_and_no_numpy(model_file):
    heavy = ["httpx", "numpy", "paddock_runner.pack", "paddock_runner.engine", "paddock_runner.model"]
    code = (
        f"import sys; from paddock_manager.cli import main; main(['fit', {str(model_file)!r}, '--device', 'cpu']);"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_accepted_by_its_shell(paddock, tmp_path, shell):
    done = paddock("completion", shell)
    assert done.code == 0 and all(name in done.out for name in cli.COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(done.out)
    subprocess.run([shell, "-n", str(script)], check=True)


def test_bash_completes_commands_options_and_models(paddock, tmp_path):
    script = paddock("completion", "bash").out
    code = script + '\nCOMP_WORDS=(paddock pu); COMP_CWORD=1; _paddock; echo "${COMPREPLY[@]}"\nCOMP_WORDS=(paddock ls --na); COMP_CWORD=2; _paddock; echo "${COMPREPLY[@]}"\n'
    done = subprocess.run(["bash", "-c", code.replace("complete -o", "true -o")], capture_output=True, text=True, check=True)
    assert done.stdout == "pull\n--names\n"


def test_version_as_json(paddock):
    done = paddock("--version")
    assert done.code == 0 and done.out.startswith("paddock")
    assert paddock("version", "--json").json["schema"] == "paddock.version/1"


@pytest.mark.parametrize("word, n_bytes", [("20M", 20_000_000), ("24GiB", 24 << 30), ("1000", 1000), ("1.5k", 1500), ("5MB/s", 5_000_000)])
def test_sizes_are_read(word, n_bytes):
    assert parse_size(word) == n_bytes


@pytest.mark.parametrize("word", ["", "GiB", "-1", "nanM", "infG", "1x", "1 0"])
def test_sizes_that_are_none_are_refused(word):
    with pytest.raises(UsageError):
        convert(Option("--vram", "", "size"), word)


def test_option_words_can_be_joined_and_ended():
    command = options.Command("x", "", (options.Argument("a", "", many=True),), (options.Option("--n", "", "int"),))
    values = options.parse(command, ["--n=3", "--", "--n", "y"])
    assert values.integer("n") == 3 and values.many("a") == ["--n", "y"]


def test_fit_of_a_real_model_is_the_runners_plan(paddock, models_dir):
    path = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    done = paddock("fit", str(path), "--ctx", "2048", "--batch", "4", "--device", "cpu", "--json")
    assert done.code == 0
    report = done.json["reports"][0]
    assert report["verdict"] == "fits" and report["plan"]["max_ctx_tokens"] == 2048
    assert sum(line["bytes"] for line in report["plan"]["lines"]) == report["plan"]["total_bytes"]
    assert all(line["source"] in ("header", "planner", "table", "measured") for line in report["plan"]["lines"])


def test_fit_refuses_with_numbers_and_with_what_fits(paddock, models_dir):
    path = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    where = ("--device", "cpu", "--threads", "2", "--vram", "350MiB")
    done = paddock("fit", str(path), "--ctx", "8192", *where, "--json")
    assert done.code == 9
    report = done.json["reports"][0]
    assert not report["fits"] and report["headroom_bytes"] < 0 and report["alternatives"]
    for other in report["alternatives"]:
        words = {"max_ctx_tokens": "--ctx", "max_batch": "--batch", "kv_format": "--kv"}
        asked = {"--ctx": "8192", **{words[k]: str(v) for k, v in other.items() if k in words}}
        again = paddock("fit", str(path), *where, "--json", *(x for pair in asked.items() for x in pair))
        assert again.code == 0, other
    said = paddock("fit", str(path), "--ctx", "8192", *where)
    assert said.code == 9 and "DOES NOT FIT" in said.out and f"these fit:\n    paddock fit {path} --ctx " in said.err


def test_fit_says_when_requests_share_their_context_as_the_runner_does(paddock, models_dir):
    path = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    done = paddock("fit", str(path), "--ctx", "8192", "--batch", "64", "--device", "cpu", "--vram", "2GiB", "--json")
    report = done.json["reports"][0]
    assert (done.code, report["verdict"]) == (0, "shared")
    assert 8192 <= report["plan"]["pool_tokens"] < 64 * 8192 and report["headroom_bytes"] >= 0


def test_fit_of_a_remote_model_equals_that_of_the_file(paddock, hub, models_dir):
    path = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    hub.add("org/smol", {path.name: path.read_bytes()})
    far = paddock("fit", "org/smol", "--device", "cpu", "--json").json["reports"][0]
    near = paddock("fit", str(path), "--device", "cpu", "--json").json["reports"][0]
    assert far["plan"] == near["plan"]
    assert len(hub.data_requests()) <= 3 and hub.served_bytes <= 16 << 20


def test_fit_without_a_gpu_says_why(paddock, models_dir, monkeypatch):
    from paddock_manager.fit import fit

    monkeypatch.setattr(fit, "gpus", lambda: ([], "no NVIDIA driver is installed"))
    done = paddock("fit", str(models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"), "--device", "cuda")
    assert done.code == 10 and "no NVIDIA driver" in done.err


def test_unknown_architecture_is_exit_12_and_not_a_guess(paddock, tmp_path):
    from tests.cli.conftest import tiny_gguf

    path = tmp_path / "x.gguf"
    path.write_bytes(tiny_gguf(arch="nosucharch"))
    done = paddock("fit", str(path), "--json")
    assert done.code == 12 and json.dumps(done.json["error"]["facts"]).count("llama")
