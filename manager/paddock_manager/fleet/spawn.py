"""Starts, watches and stops runner processes. A runner outlives the manager; one that dies at start is reported with its log.

Nothing that was asked for is changed here: the runner gets it as it is and refuses what it cannot do.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from paddock_runner import errors
from paddock_runner.errors import Cancelled, PackError, PaddockError

from paddock_manager import paths
from paddock_manager.disk import born, is_at, is_same_process, lock, tail, write_json
from paddock_manager.fleet import client, state, watch
from paddock_manager.fleet.state import Server
from paddock_manager.paths import Places

RUNNER = (sys.executable, "-m", "paddock_runner")
POLL_S = 0.02
LOG_LINES = 12
REFUSALS = (2, 3, 7, 9, 12)
"""Exit codes of a runner that refused what it was told, and said why in one sentence."""
CHILDREN: dict[int, subprocess.Popen[bytes]] = {}
"""Runners that this process started, by pid: kept so that they can outlive it, and be reaped when they are stopped here."""


class RunnerDied(PaddockError):
    """A runner ended before it was ready (facts: exit_code, log, last_lines). Its exit code becomes ours where it has a meaning."""

    code = "runner_died"

    def __init__(self, message: str, hint: str, runner_exit: int, **facts: Any):
        super().__init__(message, hint, runner_exit=runner_exit, **facts)
        self.exit_code = runner_exit if 1 <= runner_exit <= 13 else 11  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start. name: of the server; model: what its API calls the model ("": the same).

    flags: the runner's own options, as words, beside those that are set here. runner: the program, (): the one installed here.
    command: the first words, for a program that is no runner: --port and --state-file follow. is_watched: started again when it dies.
    tls: certificate and key files. ends_with_us: killed when the thread that starts it ends, however it does.
    """

    name: str
    ref: str
    path: Path
    model: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    key_file: Path | None = None
    flags: tuple[str, ...] = ()
    asked: dict[str, Any] = field(default_factory=dict)
    runner: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    is_watched: bool = False
    tls: tuple[str, ...] = ()
    ends_with_us: bool = False

    @property
    def shown(self) -> str:
        """The model's name, for messages and for the API."""
        return self.model or self.name

    def words(self, ready_file: Path) -> list[str]:
        """The command line."""
        if self.command:
            return [*self.command, "--port", str(self.port), "--state-file", str(ready_file)]
        out = [
            *(self.runner or RUNNER),
            "--model",
            str(self.path),
            "--name",
            self.shown,
            "--host",
            self.host,
            "--port",
            str(self.port),
        ]
        out += ["--api-key-file", str(self.key_file)] if self.key_file else ["--no-auth"]
        out += ["--tls-cert", self.tls[0], "--tls-key", self.tls[1]] if self.tls else []
        return [*out, *self.flags, "--state-file", str(ready_file)]


def log_path(places: Places, name: str) -> Path:
    """A server's log file."""
    return places.logs / f"{paths.file_word(name)}.log"


def new_ready_file(places: Places) -> Path:
    """A name that nothing has yet."""
    return places.fleet / f"ready-{uuid.uuid4().hex[:12]}.json"


def reap(server: Server) -> None:
    """Collect a dead runner that this process started."""
    child = CHILDREN.pop(server.pid, None)
    if child is not None:
        child.wait(5.0)


def start(places: Places, launch: Launch, timeout_s: float, waiting: Callable[[float], None] | None = None) -> Server:
    """Start a runner in its own session and wait until it is ready.

    waiting(s): called while it loads, with the seconds so far.
    Raises: RunnerDied, with the last lines of its log; Cancelled (the runner is stopped first); UsageError when its name is taken, Locked while another
    command takes it.
    """
    with state.starting(places, launch.name, launch.path, launch.asked.get("models", ()), launch.ends_with_us):
        return _start(places, launch, timeout_s, waiting)


def _start(places: Places, launch: Launch, timeout_s: float, waiting: Callable[[float], None] | None) -> Server:
    state.refuse_taken(state.servers(places), launch.name, str(launch.asked.get("by", "")))
    places.fleet.mkdir(parents=True, exist_ok=True)
    places.logs.mkdir(parents=True, exist_ok=True)
    ready_file = new_ready_file(places)
    log = log_path(places, launch.name)
    with _new_log(log) as out:
        process = subprocess.Popen(
            _watched(places, launch, ready_file, log) if launch.is_watched else launch.words(ready_file), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env=paths.child_environment(), close_fds=True, preexec_fn=watch.dies_with(os.getpid()) if launch.ends_with_us else None,
        )  # fmt: skip
    try:
        facts = _wait(process, ready_file, log, launch, timeout_s, waiting)
        server = Server(
            launch.name, launch.ref, str(launch.path), process.pid, born(process.pid), str(facts.get("host", launch.host)),
            int(facts["port"]), str(facts.get("device", "")), int(facts.get("max_ctx_tokens", 0)), int(facts.get("max_batch", 0)),
            str(log), round(time.time(), 3), launch.asked, launch.shown,
            launch.tls[0] if launch.tls else "",
            int(facts.get("memory_bytes", 0)), os.getpid() if launch.ends_with_us else 0,
        )  # fmt: skip
        state.remember(places, server)
        CHILDREN[process.pid] = process
        return server
    except BaseException:
        _end(process.pid, 5.0)
        process.wait()
        raise
    finally:
        ready_file.unlink(missing_ok=True)


def _new_log(log: Path) -> BinaryIO:
    """An empty log under a lock, which the runner inherits and has until it ends: whether a log is in use is asked of this."""
    while True:
        if log.exists():
            os.replace(log, log.with_suffix(".log.1"))
        out = log.open("xb")
        lock(out.fileno(), fcntl.LOCK_SH)
        if is_at(out.fileno(), log):  # else gc was between the two
            return out
        out.close()


def _watched(places: Places, launch: Launch, ready_file: Path, log: Path) -> list[str]:
    """The command line of a watch over the runner."""
    inner = new_ready_file(places)
    report = watch.report_path(places.fleet, launch.name)
    body = {
        "words": launch.words(inner),
        "inner": str(inner),
        "outer": str(ready_file),
        "starter": [os.getpid(), born(os.getpid())],
        "report": str(report),
        "log": str(log),
    }
    spec = ready_file.with_suffix(".spec")
    write_json(spec, body, 0o600)
    return [sys.executable, "-m", "paddock_manager.fleet.watch", str(spec)]


def _wait(
    process: subprocess.Popen[bytes],
    ready_file: Path,
    log: Path,
    launch: Launch,
    timeout_s: float,
    waiting: Callable[[float], None] | None,
) -> dict[str, Any]:
    """Until the ready file is there and /health/ready says yes."""
    begun = time.monotonic()
    facts: dict[str, Any] = {}
    while True:
        code = process.poll()
        if code is not None:
            raise died(launch.shown, code, log)
        if not facts:
            facts = _read_ready(ready_file)
        if facts and client.is_ready(
            str(facts.get("host", launch.host)), int(facts["port"]), tls_cert=launch.tls[0] if launch.tls else ""
        ):
            return facts
        passed = time.monotonic() - begun
        if passed > timeout_s:
            raise Cancelled(
                f"{launch.shown} was not ready after {timeout_s:.0f} s and was stopped",
                "`--timeout` sets how long to wait",
                log=str(log),
            )
        if waiting is not None:
            waiting(passed)
        time.sleep(POLL_S if passed < 2 else 0.1)


def _read_ready(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
        return body if isinstance(body, dict) and isinstance(body.get("port"), int) else {}
    except (OSError, ValueError):
        return {}


def died(name: str, code: int, log: Path) -> RunnerDied:
    """A dead runner, in its own words."""
    lines = tail(log, LOG_LINES)
    how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
    said = next((x for x in reversed(lines) if "error" in x.lower()), lines[-1] if lines else "")
    said = re.sub(r"^(paddock-runner: )?(error: )?", "", said.strip())
    refused = said and code in REFUSALS
    if not said and code > 0:
        said = meaning(code)  # its log may be on a full disk
    message = f"{name} cannot be served: {said}" if refused or (said and code == PackError.exit_code) else f"the runner of {name} ended {how} before it was ready" + (f": {said}" if said else "")
    shown = "\n".join(f"    {x}" for x in lines)
    hint = f"its log, {log}, ends with\n{shown}" if len(lines) > 1 and not refused else f"its log is {log}"
    return RunnerDied(message, hint, code, log=str(log), last_lines=lines)


def meaning(code: int) -> str:
    """What an exit code of ours says, in the words of its error's class; "" for another program's."""
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, PaddockError) and k.exit_code == code]
    return str(kinds[0].__doc__).split(" (facts")[0].rstrip(".").lower() if kinds and code != 1 else ""


def stop(places: Places, server: Server, timeout_s: float = 15.0) -> bool:
    """Ask a runner to end, then make it, also where its record cannot be taken out: who is dead is in no list. Returns False when it had to be killed."""
    gently = _end(server.pid, timeout_s, server.born)
    reap(server)
    with suppress(OSError):
        state.forget(places, server.name)
        watch.report_path(places.fleet, server.name).unlink(missing_ok=True)
    return gently


def _end(pid: int, timeout_s: float, born_at: float = 0.0) -> bool:
    """SIGTERM to the whole session, SIGKILL after a while."""
    for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 5.0)):
        if not is_same_process(pid, born_at):
            return True
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):
            return True
        limit = time.monotonic() + wait_s
        while time.monotonic() < limit:
            if not is_same_process(pid, born_at):
                return number == signal.SIGTERM
            time.sleep(POLL_S)
    return False
