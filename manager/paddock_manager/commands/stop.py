"""paddock stop: end servers."""

from __future__ import annotations

from paddock_runner.errors import UsageError

from paddock_manager import paths
from paddock_manager.fleet import spawn, state
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.ui import Ui

COMMAND = Command(
    "stop",
    "Stop running servers: answers under way are ended, memory is freed.",
    (Argument("names", "servers, by name or port", required=False, many=True, kind="running"),),
    (
        Option("--all", "every server"),
        Option("--timeout", "seconds until a server is killed (default 15)", "float", value="SECONDS", least=0),
    ),
    "Without a name: the only server that runs.",
)


def run(values: Values, ui: Ui) -> int:
    """Stop what was named."""
    places = paths.places()
    words = values.many("names")
    running = state.servers(places)
    own = [s.name for s in running if not s.asked.get("by")]  # a gateway ends its runners itself
    if not words and not values.flag("all") and len(own) > 1:
        raise UsageError("say which server, or --all", "running: " + ", ".join(own))
    found = running if values.flag("all") or not words else [state.find(places, w) for w in dict.fromkeys(words)]
    done = []
    for server in found:
        gently = end(places, server, values.number("timeout"))
        done.append({"name": server.name, "pid": server.pid, "killed": not gently})
        if not gently:
            ui.warn(f"{server.name} did not end in time and was killed")

    def human(out: Ui) -> None:
        for row in done:
            out.line(f"stopped {row['name']} (pid {row['pid']})")
        if not done:
            out.say("nothing is running")

    ui.result("stop", {"stopped": done}, human)
    return 0


def end(places: paths.Places, server: state.Server, timeout_s: float | None = None) -> bool:
    """Stop a server, and the runners that a gateway left. Returns False when it had to be killed."""
    patience_s = 45.0 if server.asked.get("models") else 15.0  # a gateway stops its runners first
    gently = spawn.stop(places, server, patience_s if timeout_s is None else timeout_s)
    for left in [s for s in state.servers(places) if s.asked.get("by") == server.name]:
        spawn.stop(places, left)
    return gently
