"""paddock ps: the servers that run."""

from __future__ import annotations

from typing import Any

from paddock_manager import paths
from paddock_manager.commands.serve import facts
from paddock_manager.fleet import client, state, watch
from paddock_manager.fleet.state import Server
from paddock_manager.options import Command, Values
from paddock_manager.ui import Ui, ago, plain, size

COMMAND = Command(
    "ps",
    "List running servers.",
    (),
    (),
    "STATE is ready when the server answers its health check, restarting after its runner died; what it said last is told.",
)


def row(places: paths.Places, server: Server) -> dict[str, Any]:
    """One server, and what its watch reported."""
    told = watch.report_of(places.fleet, server.name)
    state = (
        "ready"
        if client.is_ready(server.host, server.port, 2.0, server.tls_cert)
        else "restarting"
        if told
        else "not answering"
    )
    last = {
        "restarts": told.get("restarts", 0),
        "ended": told.get("ended", ""),
        "last_lines": told.get("last_lines", []),
    }
    return facts(server) | {"state": state, **last}


def run(values: Values, ui: Ui) -> int:
    """List them."""
    places = paths.places()
    rows = [row(places, s) for s in state.servers(places)]

    def human(out: Ui) -> None:
        if not rows:
            out.say("nothing is running; `paddock serve MODEL` starts a server")
            return
        cells = [
            (
                r["name"],
                str(r["pid"]),
                r["device"],
                str(r["max_ctx_tokens"] or "?"),
                str(r["max_batch"] or "?"),
                size(r["planned_bytes"]) if r["planned_bytes"] else "?",
                r["state"],
                ago(r["started_at"]),
                r["url"],
            )
            for r in rows
        ]
        for r in rows:
            if r["restarts"]:
                last = r["last_lines"][-1:] or [""]
                out.say(
                    f"{r['name']} was started again {r['restarts']} time(s); it ended {r['ended']}: {plain(last[0])}"
                )
        out.table(
            ("NAME", "PID", "DEVICE", "CTX", "BATCH", "MEMORY", "STATE", "STARTED", "URL"), cells, right=(1, 3, 4, 5)
        )

    ui.result("ps", {"servers": rows}, human)
    return 0
