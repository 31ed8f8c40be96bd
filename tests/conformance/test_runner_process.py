"""The runner as users start it: a process with the real engine and a tiny model, from its flags to its exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from paddock_runner.manifest import pack_folders

from tests import tiny_gguf

pytestmark = pytest.mark.skipif(
    not any((f / "libpaddock_cpu.so").exists() for f in pack_folders()), reason="the CPU pack is not built"
)
ROOT = Path(__file__).resolve().parents[2]
ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("model") / "tiny.gguf")


def environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join((str(ROOT / "runner"), os.environ.get("PYTHONPATH", "")))
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PADDOCK_HOME": str(home / "paddock"), "PYTHONPATH": path}


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """A runner, its output in files."""
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "paddock_runner", "--port", "0", "--state-file", str(folder / "state.json"), "--threads", "1", *flags],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True, env=environment(folder), start_new_session=True,
        )  # fmt: skip


def until(condition: object, timeout_s: float = 60.0) -> bool:
    """Polls another process: there is nothing to wait on."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


class Runner:
    """A ready runner."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process
        self.facts = json.loads((folder / "state.json").read_text())
        self.url = f"http://127.0.0.1:{self.facts['port']}"
        self.children = psutil.Process(process.pid).children(recursive=True)

    @property
    def key(self) -> str:
        return (self.folder / "paddock/keys/api_key").read_text().strip()

    def said(self) -> str:
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()

    def is_gone(self) -> bool:
        return all(not c.is_running() or c.status() == psutil.STATUS_ZOMBIE for c in self.children)


@contextmanager
def running(folder: Path, model: Path, *flags: str) -> Iterator[Runner]:
    process = start(folder, "--model", str(model), *flags)
    try:
        assert until(lambda: (folder / "state.json").exists() or process.poll() is not None), "not ready in time"
        assert process.poll() is None, (folder / "err").read_text()
        yield Runner(folder, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Runner]:
    with running(tmp_path_factory.mktemp("runner"), model, "--max-batch", "4") as found:
        yield found


def test_ready_runner_says_where_it_is_and_what_it_serves(runner: Runner) -> None:
    facts = runner.facts
    assert facts["pid"] == runner.process.pid and facts["model"] == "tiny" and facts["host"] == "127.0.0.1"
    assert (facts["max_ctx_tokens"], facts["max_batch"], facts["device"]) == (512, 4, "cpu")
    said = (runner.folder / "out").read_text()
    assert "no NVIDIA GPU here: CPU" in said and "is ready at" in said and "api_key" in said
    key_file = runner.folder / "paddock/keys/api_key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert httpx.get(runner.url + "/health/ready").status_code == 200
    assert httpx.get(runner.url + "/v1/models").status_code == 401


def test_openai_client_gets_the_same_greedy_answer_streamed_and_whole(runner: Runner) -> None:
    with openai.OpenAI(base_url=runner.url + "/v1", api_key=runner.key, max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=ASK, temperature=0, max_tokens=24, logprobs=True)
        chunks = list(client.chat.completions.create(model="tiny", messages=ASK, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}))
        seeded = [client.completions.create(model="tiny", prompt="abc", seed=5, max_tokens=20, temperature=1.5).choices[0].text for _ in range(2)]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert len(whole.choices[0].logprobs.content) == 24
    assert seeded[0] == seeded[1]


def test_counters_return_to_zero_after_a_client_left(runner: Runner) -> None:
    headers = {"authorization": f"Bearer {runner.key}"}
    body = {"messages": ASK, "stream": True, "max_tokens": 400, "ignore_eos": True, "n": 50}
    with httpx.Client(headers=headers) as client:
        with client.stream("POST", runner.url + "/v1/chat/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if '"content"' in line)
            for _ in range(120):  # 50 beginnings, and more tokens than one of those that have a slot
                next(lines)

        def state() -> dict:
            return client.get(runner.url + "/v1/paddock/state").json()

        assert until(lambda: state()["engine"]["slots"]["free"] == 4)
        found = state()
        assert found["engine"]["counters"]["ended"]["abort"] > 0 and found["front"]["open_asks"] == 0
        metrics = client.get(runner.url + "/metrics").text
    assert "paddock_output_tokens_total" in metrics and "paddock_engine_slots_free 4" in metrics
    assert "paddock_aborted_requests_total 0" not in metrics.splitlines(), "it left a stream whose status was 200"
    planned, held = found["memory"]["planned_bytes"], found["memory"]["held_bytes"]
    assert planned["kv"] >= held["kv"] > 0 and planned["weights"] == held["weights"] and set(held) <= set(planned)
    line = next(line for line in runner.said().splitlines() if 'end="client left"' in line)
    assert all(f" {name}=" in line for name in ("queue_ms", "prefill_ms", "first_token_ms", "gap_ms", "gap_p50_ms", "gap_p99_ms"))


@contextmanager
def begun(runner: Runner, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream behind the first."""
    body = {"prompt": "a", "stream": True, "ignore_eos": True, **fields}
    with httpx.Client(timeout=60) as client, client.stream("POST", runner.url + "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def test_sigterm_lets_running_requests_finish_and_exits_0(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, model, "--no-auth") as runner:
        with begun(runner, max_tokens=200, stream_options={"include_usage": True}) as lines:
            runner.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: {")]
        assert json.loads(rest[-1][6:])["usage"]["completion_tokens"] == 200
        assert runner.process.wait(30) == 0
        assert runner.is_gone() and not (tmp_path / "state.json").exists()
        assert "Traceback" not in runner.said()


def test_engine_that_is_killed_ends_open_requests_and_the_runner_with_one_sentence(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, model, "--no-auth") as runner:
        with begun(runner, max_tokens=480, n=100) as lines:
            (engine,) = runner.children
            engine.kill()
            rest = [line for line in lines if line]
        assert "the engine process ended" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        assert runner.process.wait(30) == 10
        assert "the engine process was ended by SIGKILL" in runner.said() and "Traceback" not in runner.said()


def test_engine_that_is_killed_while_requests_are_finished_is_told_and_not_success(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, model, "--no-auth") as runner:
        with begun(runner, max_tokens=480, n=100) as lines:
            runner.process.send_signal(signal.SIGTERM)
            assert until(lambda: "draining" in runner.said())
            (engine,) = runner.children
            engine.kill()
            rest = [line for line in lines if line]
        assert "the engine process ended" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        assert runner.process.wait(30) == 10 and not (tmp_path / "state.json").exists()
        assert "the engine process was ended by SIGKILL" in runner.said() and "Traceback" not in runner.said()


def test_a_session_that_is_ended_while_the_model_loads_blames_no_engine(tmp_path: Path, model: Path) -> None:
    process = start(tmp_path, "--model", str(model), "--no-auth")
    assert until(lambda: "CPU, 1 threads" in (tmp_path / "out").read_text() + (tmp_path / "err").read_text())
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) in (0, -signal.SIGTERM)
    assert "engine process" not in (tmp_path / "err").read_text() + (tmp_path / "out").read_text()


def test_engine_does_not_outlive_a_front_that_was_killed(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, model, "--no-auth") as runner:
        runner.process.kill()
        runner.process.wait(10)
        assert until(runner.is_gone, 10)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_killed_runner_comes_back_with_its_pages_from_disk(tmp_path: Path, model: Path, kv: str) -> None:
    body = {"model": "tiny", "prompt": "once upon a time there was " * 6, "max_tokens": 4, "temperature": 0}
    keys = tmp_path / "keys"
    keys.write_text("the-key-of-both\n")
    flags = ("--kv-dtype", kv, "--disk-cache-gib", "0.01", "--cache-dir", str(tmp_path / "pages"), "--api-key-file", str(keys))
    headers = {"authorization": "Bearer the-key-of-both"}
    answers, cached = [], []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        with running(folder, model, *flags) as r:
            answer = httpx.post(f"{r.url}/v1/completions", json=body, headers=headers, timeout=60).json()
            answers.append(answer["choices"][0]["text"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

            def is_kept(r: Runner = r) -> bool:
                tiers = httpx.get(f"{r.url}/v1/paddock/state", headers=headers, timeout=60).json()["engine"]["tiers"]
                return bool(tiers["disk"] and tiers["disk"] >= tiers["host"])

            assert until(is_kept)
            for child in r.children:
                child.kill()
    assert cached[0] == 0 and cached[1] >= 32 and answers[0] == answers[1]


def test_a_second_runner_on_one_page_cache_is_refused_before_it_loads_anything(tmp_path: Path, model: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    flags = ("--no-auth", "--disk-cache-gib", "0.01", "--cache-dir", str(tmp_path / "pages"))
    with running(folders[0], model, "--kv-dtype", "fp8", *flags):
        second = start(folders[1], "--model", str(model), "--kv-dtype", "fp8", "--log-level", "debug", *flags)
        assert second.wait(30) == 13
        said = (folders[1] / "err").read_text() + (folders[1] / "out").read_text()
        assert [line for line in said.splitlines() if "error" in line] == [
            f"paddock-runner: error: the page cache {tmp_path / 'pages'} is used by another runner (give each runner its own --cache-dir)"
        ]
        assert "header" in said and "weights" not in said, "what its engine had done until then"
        with running(folders[2], model, "--kv-dtype", "bf16", *flags):
            pass  # another folder of it


def test_faults_at_start_are_one_sentence_and_an_exit_code(tmp_path: Path, model: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-1000])
    odd = tiny_gguf.write(tmp_path / "odd.gguf", arch="frobnicator")
    bad_pack = tmp_path / "libpaddock_bad.so"
    bad_pack.write_bytes(b"no library")
    cases = [
        (["--model", str(tmp_path / "nothing.gguf")], 3, "no such file"),
        (["--model", str(model), "--port", str(taken.getsockname()[1])], 2, "in use"),
        (["--model", str(model), "--api-key-file", str(tmp_path / "none")], 7, "cannot be read"),
        (["--model", str(cut)], 7, "cut.gguf"),
        (["--model", str(odd)], 12, "frobnicator"),
        (["--model", str(model), "--kernel-pack", str(bad_pack)], 10, "libpaddock_bad.so"),
        (["--model", str(model), "--max-ctx", "4096"], 2, "512"),
        (["--model", str(model), "--memory-gib", "0.001"], 9, "GiB"),
    ]
    for flags, code, words in cases:
        process = start(tmp_path, *flags)
        assert process.wait(60) == code, (flags, (tmp_path / "err").read_text())
        said = (tmp_path / "err").read_text()
        assert said.startswith("paddock-runner: error: ") and words in said and said.count("\n") == 1, said
        assert not (tmp_path / "state.json").exists()
    taken.close()


def test_512_idle_connections_cost_nothing_measurable(runner: Runner) -> None:
    process = psutil.Process(runner.process.pid)

    def spent(seconds: float) -> float:
        """Processor seconds that the front takes meanwhile."""
        before = sum(process.cpu_times()[:2])
        threading.Event().wait(seconds)
        return sum(process.cpu_times()[:2]) - before

    clients = [socket.create_connection(("127.0.0.1", runner.facts["port"])) for _ in range(512)]
    try:
        for client in clients:
            client.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert all(client.recv(4096).startswith(b"HTTP/1.1 200") for client in clients)
        assert spent(1.0) < 0.05
    finally:
        for client in clients:
            client.close()
