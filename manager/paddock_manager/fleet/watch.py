"""The process between `paddock serve` and its runner: `python -m paddock_manager.fleet.watch SPEC.json`.

It starts the runner, and starts it again, with growing pauses and on the same port, when it dies after it had once been ready. A
runner that dies before that ends the watch with its exit code: what cannot start is never tried in silence.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from paddock_manager.disk import is_same_process, read_json, tail, write_json
from paddock_manager.paths import file_word

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
STEADY_S = 60.0
"""A runner that lived so long starts again with the first pause."""
LOG_LINES = 12
POLL_S = 0.02
PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


class Watch:
    """One runner and what became of it.

    spec: words (the runner's command line), inner (its ready file), outer (the one that the manager waits for, and takes away when the server is in its list),
    starter (the manager's process: number and birth), report, log.
    """

    def __init__(self, spec: dict[str, Any]):
        self.words: list[str] = spec["words"]
        self.inner, self.outer = Path(spec["inner"]), Path(spec["outer"])
        self.report, self.log = Path(spec["report"]), Path(spec["log"])
        self._starter: tuple[int, float] = tuple(spec["starter"])
        self.restarts, self.port = 0, 0
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Until stopped, or until the runner fails at its first start. Returns an exit code, negative for a signal."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        self.report.unlink(missing_ok=True)
        pause_s = FIRST_PAUSE_S
        while True:
            begun = time.monotonic()
            code = self._once()
            if self._stopping.is_set():
                return 0
            if not self.port:
                return code
            pause_s = FIRST_PAUSE_S if time.monotonic() - begun > STEADY_S else pause_s
            self.restarts += 1
            self._tell(code, pause_s)
            if self._stopping.wait(pause_s):
                return 0
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _once(self) -> int:
        """Start the runner, on the port that it had before, and wait until it ends. Returns its exit code."""
        self.inner.unlink(missing_ok=True)
        words = _with_port(self.words, self.port) if self.port else self.words
        self._child = subprocess.Popen(words, stdin=subprocess.DEVNULL, preexec_fn=dies_with(os.getpid()), process_group=0)
        if self._stopping.is_set():
            self._child.terminate()
        begun, told = time.monotonic(), False
        try:
            while not told or self.outer.exists():
                told = told or self._publish()
                # Until the manager has heard of the first start: commands end when they have.
                if (not self.port or self.outer.exists()) and not self._stopping.is_set() and not is_same_process(*self._starter):
                    self.outer.unlink(missing_ok=True)
                    self._stop(signal.SIGTERM, None)  # nobody will know of this server
                code = _wait(self._child, POLL_S if time.monotonic() - begun < 5 else 10 * POLL_S)
                if code is not None:
                    self._publish()
                    return code
            return self._child.wait()
        finally:
            self.inner.unlink(missing_ok=True)

    def _publish(self) -> bool:
        """Once the runner is ready: note its port; the first time, tell the manager."""
        port = _port_of(self.inner)
        if port and not self.port:
            part = self.outer.with_suffix(".part")
            part.write_bytes(self.inner.read_bytes())
            os.replace(part, self.outer)
        self.port = port or self.port
        return port > 0

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass it on."""
        self._stopping.set()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _tell(self, code: int, pause_s: float) -> None:
        """In the log, and in the file that `paddock ps` reads. A full disk must not keep the runner from being started again."""
        how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
        body = {"restarts": self.restarts, "ended": how, "at": round(time.time(), 3), "last_lines": tail(self.log, LOG_LINES)}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with suppress(OSError):
            os.write(sys.stderr.fileno(), f"{stamp} paddock: the runner ended {how}; it is started again in {pause_s:g} s\n".encode())
        with suppress(OSError):
            write_json(self.report, body)


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def dies_with(parent: int) -> Callable[[], None]:
    """For the child of this process: who is killed takes its runner along, so that port and memory are free again."""
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it had gone before we asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def _port_of(ready: Path) -> int:
    try:
        port = json.loads(ready.read_bytes()).get("port", 0)
    except (OSError, ValueError, AttributeError):
        return 0
    return port if isinstance(port, int) else 0


def _with_port(words: list[str], port: int) -> list[str]:
    """The same command line, on the port that clients know by now."""
    out = list(words)
    out[out.index("--port") + 1] = str(port)
    return out


def report_of(fleet: Path, name: str) -> dict[str, Any]:
    """What the watch of a server wrote last; {} when its runner never died."""
    return read_json(report_path(fleet, name)) or {}


def report_path(fleet: Path, name: str) -> Path:
    """Where the watch of a server reports."""
    return fleet / f"{file_word(name)}.watch.json"


def main(path: str) -> int:
    """Run one watch; end as its runner ended."""
    spec = json.loads(Path(path).read_bytes())
    os.unlink(path)
    code = Watch(spec).run()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
