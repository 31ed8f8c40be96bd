"""paddock logs: what a server said, running or not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paddock_runner.errors import UnknownModel, UsageError

from paddock_manager import disk, paths
from paddock_manager.fleet import spawn, state
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.ui import Ui, plain

COMMAND = Command(
    "logs",
    "Print what a server said.",
    (Argument("name", "a server, by name or port", required=False, kind="running"),),
    (
        Option("--follow", "go on until Ctrl-C", short="-f"),
        Option("--lines", "so many of the last lines (default 100)", "int", short="-n", value="N", also=("--tail",), least=0),
    ),
    "Without a name: the only server that runs.",
)


def run(values: Values, ui: Ui) -> int:
    """Print the tail, then follow."""
    name, path = find(values.text("name"))
    wanted = values.integer("lines")
    lines = disk.tail(path, 100 if wanted is None else wanted)
    if ui.as_json and values.flag("follow"):
        raise UsageError("--follow and --json do not go together")

    def human(out: Ui) -> None:
        for line in lines:
            out.line(plain(line, keep="\t"))

    ui.result("logs", {"name": name, "path": str(path), "lines": lines}, human)
    if values.flag("follow"):
        follow(path, ui, ui.is_read)
    return 0


def find(word: str) -> tuple[str, Path]:
    """The log of a server.

    Raises: UnknownModel, UsageError.
    """
    places = paths.places()
    running = state.servers(places)
    known = sorted(p.stem for p in places.logs.glob("*.log")) if places.logs.is_dir() else []
    if not word:
        if not running:
            raise UsageError("no server is running; say whose log", "logs: " + (", ".join(known) or "none"))
        if len(running) != 1:
            raise UsageError("several servers run; say whose log", "running: " + ", ".join(s.name for s in running))
        return running[0].name, Path(running[0].log)
    if state.matches(running, word):
        server = state.find(places, word)
        return server.name, Path(server.log)
    path = spawn.log_path(places, word)
    if not path.exists():
        alike = [stem for stem in known if stem.startswith(path.stem + "_")]
        if len(alike) != 1:
            raise UnknownModel(f"there is no log of {word!r}", "logs: " + (", ".join(known) or "none"), name=word, known=known)
        path = path.with_name(f"{alike[0]}.log")
    return word, path


def follow(path: Path, ui: Ui, is_on: Callable[[], bool]) -> None:
    """Print what is appended, until Ctrl-C, or nothing more comes and it is not on any more."""
    try:
        with path.open("r", encoding="utf-8", errors="replace") as f:
            f.seek(0, 2)
            while True:
                text = f.read()
                if text:
                    ui.piece(plain(text, keep="\n\t"))
                elif not is_on():
                    return
                else:
                    time.sleep(0.2)
    except KeyboardInterrupt:
        return
