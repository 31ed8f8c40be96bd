"""paddock ps: the servers that run."""

from __future__ import annotations

from paddock_manager import paths
from paddock_manager.commands.serve import facts
from paddock_manager.fleet import client, state
from paddock_manager.options import Command, Values
from paddock_manager.ui import Ui, ago

COMMAND = Command("ps", "List running servers.", (), (), "STATE is ready when the server answers its health check.")


def run(values: Values, ui: Ui) -> int:
    """List them."""
    found = state.servers(paths.places())
    rows = [facts(s) | {"state": "ready" if client.is_ready(s.host, s.port, 2.0) else "not answering"} for s in found]

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
                r["state"],
                ago(r["started_at"]),
                r["url"],
            )
            for r in rows
        ]
        out.table(("NAME", "PID", "DEVICE", "CTX", "BATCH", "STATE", "STARTED", "URL"), cells, right=(1, 3, 4))

    ui.result("ps", {"servers": rows}, human)
    return 0
