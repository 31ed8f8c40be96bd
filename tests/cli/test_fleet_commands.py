"""run, serve, ps, stop, logs, key: against a runner that needs no model."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from paddock_manager.commands import chat
from paddock_manager.fleet import spawn, state
from paddock_manager.paths import places

from tests.cli.conftest import tiny_gguf

pytestmark = pytest.mark.usefixtures("fake_runner")


def test_serve_waits_until_it_is_ready_and_ps_stop_know_it(paddock, model_file):
    done = paddock("serve", str(model_file), "--port", "0", "--ctx", "512", "--batch", "3", "--json")
    assert done.code == 0, done.err
    server = done.json["server"]
    assert (server["name"], server["max_ctx_tokens"], server["max_batch"], server["device"]) == ("mine.Q4_0", 512, 3, "cpu")
    listed = paddock("ps", "--json").json["servers"]
    assert [(s["pid"], s["state"], s["url"]) for s in listed] == [(server["pid"], "ready", server["url"])]
    assert paddock("ps").out.splitlines()[0].split() == ["NAME", "PID", "DEVICE", "CTX", "BUSY", "KV", "MEMORY", "STATE", "STARTED", "URL"]
    stopped = paddock("stop", "mine.Q4_0")
    assert stopped.code == 0 and stopped.out == f"stopped mine.Q4_0 (pid {server['pid']})\n"
    assert paddock("ps", "--json").json["servers"] == []


def test_ps_tells_how_busy_a_server_is_and_what_it_takes(paddock, tmp_path):
    (tmp_path / "busy.gguf").write_bytes(tiny_gguf())
    assert paddock("serve", str(tmp_path / "busy.gguf"), "--port", "0").code == 0
    row = paddock("ps", "--json").json["servers"][0]
    assert (row["busy"], row["waiting"], row["answered_tokens"], row["kv_format"], row["planned_bytes"]) == (3, 2, 77, "fp8", 1 << 30)
    assert 1 << 20 < row["used_bytes"] < 1 << 30
    line = paddock("ps").out.splitlines()[1]
    assert "3/8 +2" in line and "fp8" in line and "of 1.00 GiB" in line


def test_systemd_unit_runs_the_same_program_in_the_foreground(paddock, model_file):
    done = paddock("serve", str(model_file), "--systemd", "--ctx", "512")
    assert done.code == 0 and f'"--model" "{model_file}"' in done.out and '"--max-ctx" "512"' in done.out and "Restart=on-failure" in done.out
    assert state.servers(places()) == []


def test_systemd_unit_takes_every_name_as_it_is(paddock, tmp_path, monkeypatch):
    odd = tmp_path / 'a "b" %h $HOME c'
    odd.mkdir()
    (odd / "m%n.gguf").write_bytes(tiny_gguf())
    monkeypatch.setenv("PADDOCK_HOME", str(odd))
    text = paddock("serve", str(odd / "m%n.gguf"), "--systemd").out
    assert f'"{tmp_path}/a \\"b\\" %%h $$HOME c/m%%n.gguf"' in text
    assert f'Environment="PADDOCK_HOME={tmp_path}/a \\"b\\" %%h $HOME c"' in text and "Description=Paddock: m%%n\n" in text


def test_serve_waits_for_a_runner_that_is_not_ready_at_once(paddock, tmp_path):
    path = tmp_path / "slowstart.gguf"
    path.write_bytes(tiny_gguf())
    assert paddock("serve", str(path), "--port", "0").code == 0


def test_runner_that_dies_at_start_is_reported_with_its_exit_code_and_log(paddock, tmp_path):
    path = tmp_path / "dies.gguf"
    path.write_bytes(tiny_gguf())
    done = paddock("serve", str(path), "--port", "0", "--json")
    assert done.code == 7
    error = done.json["error"]
    assert error["code"] == "runner_died" and error["facts"]["runner_exit"] == 7
    assert error["message"] == f"dies cannot be served: {path}: truncated, need 10 bytes, have 9"
    assert f"loading {path}" in error["facts"]["last_lines"][0] and error["facts"]["log"] in done.err and "loading" not in done.err
    assert paddock("ps", "--json").json["servers"] == []
    assert paddock("logs", "dies").out.splitlines()[0] == f"loading {path}"


def test_runner_that_crashes_names_the_signal(paddock, tmp_path):
    path = tmp_path / "crash.gguf"
    path.write_bytes(tiny_gguf())
    done = paddock("serve", str(path), "--port", "0")
    assert done.code == 11 and "signal 11 (SIGSEGV)" in done.err


def test_same_model_and_same_port_are_served_once(paddock, model_file):
    first = paddock("serve", str(model_file), "--port", "0", "--json").json["server"]
    again = paddock("serve", str(model_file), "--port", "0")
    assert again.code == 2 and "already served at" in again.err
    other = paddock("serve", str(model_file), "--name", "other", "--port", str(first["port"]))
    assert other.code == 2 and f"port {first['port']} is taken" in other.err


def test_port_that_a_stranger_holds_is_the_runners_own_error(paddock, model_file):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        done = paddock("serve", str(model_file), "--port", str(s.getsockname()[1]))
    assert done.code == 2 and "Address already in use" in done.err


def test_server_without_a_key_is_for_loopback_only(paddock, model_file):
    done = paddock("serve", str(model_file), "--no-auth", "--host", "0.0.0.0")
    assert done.code == 2 and "loopback only" in done.err


def test_server_that_was_killed_is_not_listed(paddock, model_file):
    pid = paddock("serve", str(model_file), "--port", "0", "--json").json["server"]["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert paddock("ps", "--json").json["servers"] == []
    assert paddock("stop", "mine.Q4_0").code == 3


def test_damaged_state_file_is_no_obstacle(paddock, model_file):
    home = places()
    home.fleet.mkdir(parents=True)
    (home.fleet / "state.json").write_text('{"servers": [{"na')
    assert paddock("ps").code == 0
    assert paddock("serve", str(model_file), "--port", "0").code == 0


def test_stop_without_a_name_ends_the_only_server_and_names_several(paddock, model_file):
    assert (paddock("stop").code, paddock("stop").err) == (0, "nothing is running\n")
    for name in ("one", "two"):
        paddock("serve", str(model_file), "--port", "0", "--name", name)
    done = paddock("stop")
    assert done.code == 2 and "running: one, two" in done.err
    assert paddock("stop", "one", "--json").json["stopped"][0]["killed"] is False
    assert paddock("stop", "--json").json["stopped"][0]["name"] == "two"


def test_logs_of_the_only_server(paddock, model_file):
    paddock("serve", str(model_file), "--port", "0")
    done = paddock("logs", "-n", "5", "--json")
    assert done.code == 0 and any(x.startswith("ready on") for x in done.json["lines"])
    assert paddock("logs", "nobody").code == 3


def test_run_answers_one_prompt_and_stops_its_runner(paddock, model_file):
    done = paddock("run", str(model_file), "hello", "world")
    assert (done.code, done.out) == (0, "1: hello world\n")
    assert state.servers(places()) == []
    assert list(places().logs.iterdir()) == []


def test_run_json_holds_answer_usage_and_times(paddock, model_file):
    done = paddock("run", str(model_file), "hello", "--system", "be brief", "--temperature", "0", "--json")
    assert done.code == 0
    assert (done.json["answer"], done.json["finish_reason"], done.json["usage"]["prompt_tokens"]) == ("2: hello", "stop", 1)
    assert done.json["timings"]["total_ms"] >= done.json["timings"]["first_token_ms"] > 0


def test_run_uses_the_server_that_runs(paddock, model_file):
    pid = paddock("serve", str(model_file), "--port", "0", "--json").json["server"]["pid"]
    assert paddock("run", str(model_file), "again").out == "1: again\n"
    assert [s.pid for s in state.servers(places())] == [pid]


def test_run_keep_leaves_the_server(paddock, model_file):
    assert paddock("run", str(model_file), "hi", "--keep").code == 0
    assert [s.name for s in state.servers(places())] == ["mine.Q4_0"]


def test_run_takes_piped_text_after_the_prompt(paddock, model_file, tmp_path, monkeypatch):
    notes = tmp_path / "notes.txt"
    notes.write_text("some notes\n")
    with notes.open() as f:
        monkeypatch.setattr("sys.stdin", f)
        assert paddock("run", str(model_file), "Summarise:").out == "1: Summarise: some notes\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("from a dash"))
    assert paddock("run", str(model_file), "-").out == "1: from a dash\n"


def test_run_without_a_prompt_and_without_a_terminal_is_a_usage_error(paddock, model_file):
    done = paddock("run", str(model_file))
    assert done.code == 2 and "there is no prompt" in done.err


def test_run_passes_the_runners_refusal_on(paddock, model_file):
    done = paddock("run", str(model_file), "too long", "--json")
    assert done.code == 2 and done.json["error"]["code"] == "context_length_exceeded" and "9 tokens" in done.json["error"]["message"]
    assert "--ctx" in done.json["error"]["hint"]


def test_stream_that_breaks_off_is_exit_11(paddock, tmp_path):
    path = tmp_path / "breaks.gguf"
    path.write_bytes(tiny_gguf())
    done = paddock("run", str(path), "one two three")
    assert done.code == 11 and "ended early" in done.err


def test_run_pulls_what_is_not_here_and_says_so(paddock, hub, monkeypatch):
    hub.add("org/tiny", {"tiny.Q4_0.gguf": tiny_gguf()})
    monkeypatch.setattr(shutil, "disk_usage", None)
    done = paddock("run", "org/tiny", "hello")
    assert done.code == 0 and done.out == "1: hello\n"
    assert "org/tiny is not here yet" in done.err and "verified" in done.err
    assert paddock("run", "nosuchmodel", "hello").code == 3


def test_rm_refuses_a_model_that_is_served(paddock, hub):
    hub.add("org/tiny", {"tiny.Q4_0.gguf": tiny_gguf()})
    assert paddock("pull", "org/tiny").code == 0
    assert paddock("serve", "org/tiny", "--port", "0").code == 0
    done = paddock("rm", "org/tiny")
    assert done.code == 13 and "paddock stop org/tiny:Q4_0" in done.err


def test_rm_refuses_a_model_that_is_being_loaded(paddock, hub, monkeypatch):
    hub.add("org/tiny", {"tiny.Q4_0.gguf": tiny_gguf()})
    assert paddock("pull", "org/tiny").code == 0
    said = []

    def wait(process, ready_file, *args):
        assert process.poll() is None
        said.append(paddock("rm", "org/tiny"))
        return real(process, ready_file, *args)

    real = spawn._wait
    monkeypatch.setattr(spawn, "_wait", wait)
    assert paddock("serve", "org/tiny", "--port", "0", "--name", "first").code == 0
    assert said[0].code == 13 and "org/tiny:Q4_0 is being loaded by first" in said[0].err
    assert paddock("stop", "first").code == 0 and paddock("rm", "org/tiny").code == 0
    assert not list(places().fleet.glob("*.start"))


def test_rm_does_not_mind_a_start_that_was_killed(paddock, hub):
    hub.add("org/tiny", {"tiny.Q4_0.gguf": tiny_gguf()})
    assert paddock("pull", "org/tiny").code == 0
    path = paddock("show", "org/tiny", "--json").json["model"]["path"]
    places().fleet.mkdir(parents=True, exist_ok=True)
    (places().fleet / "dead.start").write_text(json.dumps({"name": "dead", "path": path, "models": []}))
    assert paddock("rm", "org/tiny").code == 0


def chat_with(monkeypatch: pytest.MonkeyPatch, lines: list[str | BaseException]) -> None:
    """A person at the terminal who types these lines."""
    queue = iter(lines)

    def typed(prompt: str = "") -> str:
        line = next(queue, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)


def test_chat_keeps_the_conversation_and_knows_its_commands(paddock, model_file, monkeypatch, tmp_path):
    saved = tmp_path / "chat.json"
    lines = ["hi", '"""first', 'second"""', "/set temperature 0.5", "/set nothing 1", "/system be kind", "/show", "/stats", "/retry", f"/save {saved}"]
    chat_with(monkeypatch, [*lines, "/clear", "fresh", f"/load {saved}", "back", "/nonsense", "/help", KeyboardInterrupt(), "/bye"])
    done = paddock("run", str(model_file))
    assert done.code == 0
    for answer in ("1: hi\n", "3: first second\n", "4: first second\n", "2: fresh\n", "6: back\n"):
        assert answer in done.out
    assert "there is no setting nothing" in done.err and "there is no command /nonsense" in done.err
    assert "temperature = 0.5" in done.err and "prompt 2 tokens" in done.err
    assert chat.HELP in done.out


def test_ctrl_c_stops_the_answer_and_not_the_chat(paddock, model_file, monkeypatch):
    from paddock_manager.fleet.client import Chat

    pieces = Chat.pieces
    calls = []

    def interrupted(self):
        calls.append(1)
        for number, piece in enumerate(pieces(self)):
            if len(calls) == 1 and number == 2:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(Chat, "pieces", interrupted)
    chat_with(monkeypatch, ["one two three four", "go on"])
    done = paddock("run", str(model_file))
    assert done.code == 0 and "(stopped)" in done.err
    assert done.out == "1: one \n3: go on\n\n"


def test_key_is_made_once_with_mode_0600(paddock):
    first = paddock("key")
    assert first.code == 0 and first.out.startswith("pk-") and paddock("key").out == first.out
    path = Path(paddock("key", "--path").out.strip())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert paddock("key", "--new").out != first.out
    path.chmod(0o644)
    assert paddock("key").code == 7


def test_key_is_on_no_command_line_and_in_no_log(paddock, model_file):
    key = paddock("key").out.strip()
    pid = paddock("serve", str(model_file), "--port", "0", "--json").json["server"]["pid"]
    assert key not in Path(f"/proc/{pid}/cmdline").read_text()
    assert paddock("run", str(model_file), "hello").code == 0
    assert key not in paddock("logs").out


def child_of(pid: int) -> int:
    """The runner of a watch."""
    import psutil

    return psutil.Process(pid).children()[0].pid


def until(is_so) -> bool:
    """Asked again until it is so, at most ten seconds."""
    import time

    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        if is_so():
            return True
        time.sleep(0.02)
    return False


def test_runner_that_dies_is_started_again_on_its_port_and_its_last_words_are_told(paddock, model_file):
    # Served by a process of its own, which has long ended when the runner dies.
    words = [sys.executable, "-c", RUN, "|".join(spawn.RUNNER), "serve", str(model_file), "--port", "0", "--json"]
    server = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=60).stdout)["server"]
    for n_deaths in (1, 2):
        first = child_of(server["pid"])
        os.kill(first, signal.SIGKILL)
        assert until(lambda first=first: (s := paddock("ps", "--json").json["servers"][0])["state"] == "ready" and child_of(s["pid"]) != first)
        row = paddock("ps", "--json").json["servers"][0]
        assert (row["pid"], row["port"], row["restarts"], row["ended"]) == (server["pid"], server["port"], n_deaths, "by signal 9 (SIGKILL)")
        assert any("ready on" in line for line in row["last_lines"])
    assert "was started again 2 time(s); it ended by signal 9 (SIGKILL)" in paddock("ps").err
    assert any("started again in 1 s" in line for line in paddock("logs", "-n", "50", "--json").json["lines"])
    assert paddock("run", str(model_file), "hello").out == "1: hello\n"
    assert paddock("stop", "--all", "--json").json["stopped"][0]["killed"] is False


def test_watch_that_is_killed_takes_its_runner_along(paddock, model_file):
    import psutil

    pid = paddock("serve", str(model_file), "--port", "0", "--json").json["server"]["pid"]
    runner = child_of(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert until(lambda: not psutil.pid_exists(runner))


def test_watch_costs_little_memory(paddock, model_file):
    import psutil

    pid = paddock("serve", str(model_file), "--port", "0", "--json").json["server"]["pid"]
    assert psutil.Process(pid).memory_info().rss < 40 << 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_runner_of_a_command_that_is_ended_from_outside_ends_with_it(paddock, tmp_path, number):
    path = tmp_path / "endless.gguf"
    path.write_bytes(tiny_gguf())

    def end() -> None:
        until(lambda: any("POST" in log.read_text() for log in places().logs.glob("endless*")))
        os.kill(os.getpid(), number)

    before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGHUP)}  # under nohup the second is ignored, by us too
    thread = threading.Thread(target=end)
    try:
        thread.start()
        with pytest.raises(SystemExit) as ended:
            paddock("run", str(path), "go on")
    finally:
        thread.join()
        for n, handler in before.items():
            signal.signal(n, handler)
    assert ended.value.code == 128 + number and state.servers(places()) == []


# SIGQUIT is ignored by what a shell starts in the background, and so by all that it starts.
RUN = "import signal, sys; signal.signal(signal.SIGQUIT, signal.SIG_DFL); from paddock_manager import cli; from paddock_manager.fleet import spawn; spawn.RUNNER = tuple(sys.argv[1].split('|')); cli.main(sys.argv[2:])"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_runner_of_a_command_that_is_killed_ends_with_it(paddock, tmp_path, number):
    """Nobody else would end it: no list has one that was still being loaded."""
    path = tmp_path / "endless.gguf"
    path.write_bytes(tiny_gguf())
    command = subprocess.Popen([sys.executable, "-c", RUN, "|".join(spawn.RUNNER), "run", str(path), "go on"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert until(lambda: any("POST" in log.read_text() for log in places().logs.glob("endless*")))
    (server,) = state.servers(places())
    command.send_signal(number)
    assert command.wait(60) == -number and until(lambda: not server.is_alive)


@pytest.mark.parametrize("is_up", [False, True])
def test_server_whose_command_is_killed_while_it_starts_ends_too(paddock, tmp_path, is_up):
    """It would hold its port for good, in no list."""
    import psutil

    path = tmp_path / "neverready.gguf"
    path.write_bytes(tiny_gguf())
    command = subprocess.Popen([sys.executable, "-c", RUN, "|".join(spawn.RUNNER), "serve", str(path), "--port", "0"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert until(lambda: any("GET /health" in log.read_text() for log in places().logs.glob("neverready*")) if is_up else any(places().fleet.glob("ready-*.spec")))
    command.kill()
    command.wait(60)

    def is_about_it(process):
        try:
            return str(path) in process.cmdline() or any(str(places().fleet) in word for word in process.cmdline())
        except psutil.Error:
            return False

    assert until(lambda: not any(map(is_about_it, psutil.process_iter())))
    assert state.servers(places()) == [] and not any(places().fleet.glob("ready-*.json"))


def test_server_that_another_command_starts_is_told_as_that(paddock, model_file, monkeypatch):
    """Both would write one log, and the second's error would be read from it."""
    found = []
    wait = spawn._wait

    def slow(*words):
        monkeypatch.setattr(spawn, "_wait", wait)
        found.append(paddock("serve", str(model_file), "--port", "0"))
        return wait(*words)

    monkeypatch.setattr(spawn, "_wait", slow)
    assert paddock("serve", str(model_file), "--port", "0").code == 0
    assert found[0].code == 13 and "mine.Q4_0 is being started by another command\nhint:  `paddock ps` shows it when it is ready\n" in found[0].err


def meanwhile(act) -> threading.Thread:
    """Once a server is there, this is done to it, in a thread."""

    def run() -> None:
        until(lambda: state.servers(places()))
        act(state.servers(places())[0])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_server_in_the_foreground_ends_with_ctrl_c(paddock, model_file):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
    thread = meanwhile(lambda server: os.kill(os.getpid(), signal.SIGINT))
    try:
        done = paddock("serve", str(model_file), "--port", "0", "--foreground")
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert done.code in (0, 130) and state.servers(places()) == []


def test_server_in_the_foreground_that_ends_is_an_error(paddock, model_file):
    thread = meanwhile(lambda server: os.kill(server.pid, signal.SIGKILL))
    done = paddock("serve", str(model_file), "--port", "0", "--foreground")
    thread.join()
    assert done.code == 11 and "mine.Q4_0 is served at " in done.out and "error: mine.Q4_0 has ended\n" in done.err
    assert "do not go together" in paddock("serve", str(model_file), "--foreground", "--json").err


def test_runner_whose_log_is_on_a_full_disk_is_told_by_its_exit_code(tmp_path):
    log = tmp_path / "empty.log"
    log.write_text("")
    assert str(spawn.died("m", 8, log)).startswith("the runner of m ended with exit code 8 before it was ready: not enough room on the target file system")
    assert spawn.died("m", 1, log).message == "the runner of m ended with exit code 1 before it was ready"
