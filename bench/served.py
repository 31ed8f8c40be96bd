"""A runner for the time of a measurement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def use_this_tree() -> None:
    """Children of this process import this tree's packages and benches, wherever they are started."""
    told = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*(str(ROOT / folder) for folder in ("runner", "manager", "")), *([told] if told else [])])


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for at in found:
        for task in Path(f"/proc/{at}/task").glob("*/children"):
            found += [int(x) for x in task.read_text().split()]
    return found


@contextmanager
def runner(model: Path | str, *flags: str, limit_s: float = 600.0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A runner of the model on a free port, for the time of a with block: its URL and its process.

    Raises: RuntimeError with its last words when it ends, or is not ready within limit_s (then with where its threads stand).
    """
    with tempfile.TemporaryDirectory(prefix="paddock-bench-") as folder:
        state, out = Path(folder) / "state.json", Path(folder) / "log"
        command = [sys.executable, "-m", "paddock_runner", "--model", str(Path(model).resolve()), "--port", "0", "--no-auth", "--state-file", str(state), *flags]
        with out.open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONFAULTHANDLER": "1"})
        begun = time.monotonic()
        try:
            while not state.exists():
                if time.monotonic() - begun > limit_s:
                    for pid in family(process.pid):
                        os.kill(pid, signal.SIGABRT)
                        time.sleep(0.3)
                    raise RuntimeError(f"the runner is not ready after {limit_s:.0f} s: {out.read_text()[-6000:]}")
                if process.poll() is not None:
                    raise RuntimeError(f"the runner ended with {process.returncode}: {out.read_text()[-2000:]}")
                time.sleep(0.01)
            yield f"http://127.0.0.1:{json.loads(state.read_text())['port']}", process
        finally:
            process.terminate()
            process.wait(60)
