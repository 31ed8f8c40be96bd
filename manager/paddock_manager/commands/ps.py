"""paddock ps: the servers that run."""

from __future__ import annotations

from typing import Any

from paddock_manager import paths
from paddock_manager.commands.serve import facts
from paddock_manager.fit import history
from paddock_manager.fleet import client, keys, state, watch
from paddock_manager.fleet.state import Server
from paddock_manager.options import Command, Values
from paddock_manager.ui import Ui, ago, plain, size

COMMAND = Command(
    "ps",
    "List running servers.",
    (),
    (),
    "BUSY is how many requests are answered at a time, of how many, and how many wait. MEMORY is what it takes now, of what was planned. "
    "STATE is ready when the server answers its health check, restarting after its runner died; what it said last is told.",
)
HEADS = ("NAME", "PID", "DEVICE", "CTX", "BUSY", "KV", "MEMORY", "STATE", "STARTED", "URL")


def row(places: paths.Places, server: Server) -> dict[str, Any]:
    """One server: what its watch reported, what its runner says of itself, and what it takes now."""
    told = watch.report_of(places.fleet, server.name)
    is_ready = client.is_ready(server.host, server.port, 2.0, server.tls_cert)
    state = "ready" if is_ready else "restarting" if told else "not answering"
    last = {
        "restarts": told.get("restarts", 0),
        "ended": told.get("ended", ""),
        "last_lines": told.get("last_lines", []),
    }
    return facts(server) | {"state": state, **last, **(inside(places, server) if is_ready else {})}


def inside(places: paths.Places, server: Server) -> dict[str, Any]:
    """How busy a runner is, and the bytes that it holds; {} for one that does not tell."""
    if not server.planned_bytes:
        return {}
    found = client.state_of(server, keys.key(places))
    engine, more = found.get("engine") or {}, found.get("facts") or {}
    slots, queue, counters = (engine.get(k) or {} for k in ("slots", "queue", "counters"))
    if not slots:
        return {}
    return {
        "used_bytes": history.measure(server.pid, server.device),
        "busy": int(slots.get("all", 0)) - int(slots.get("free", 0)),
        "waiting": int(queue.get("waiting", 0)),
        "answered_tokens": int(counters.get("output_tokens", 0)),
        "kv_format": str(more.get("kv_format", "")),
    }


def cells(r: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    unknown = "-" if r["device"] == "gateway" else "?"
    planned = size(r["planned_bytes"]) if r["planned_bytes"] else unknown
    memory = f"{size(r['used_bytes'])} of {planned}" if r.get("used_bytes") else planned
    slots = f"{r['busy']}/{r['max_batch']}" if "busy" in r else str(r["max_batch"] or unknown)
    waiting = f" +{r['waiting']}" if r.get("waiting") else ""
    return (
        r["name"],
        str(r["pid"]),
        r["device"],
        str(r["max_ctx_tokens"] or unknown),
        slots + waiting,
        r.get("kv_format") or unknown,
        memory,
        r["state"],
        ago(r["started_at"]),
        r["url"],
    )


def run(values: Values, ui: Ui) -> int:
    """List them."""
    places = paths.places()
    rows = [row(places, s) for s in state.servers(places)]

    def human(out: Ui) -> None:
        if not rows:
            out.say("nothing is running; `paddock serve MODEL` starts a server")
            return
        for r in rows:
            if r["restarts"]:
                last = r["last_lines"][-1:] or [""]
                out.say(
                    f"{r['name']} was started again {r['restarts']} time(s); it ended {r['ended']}: {plain(last[0])}"
                )
        out.table(HEADS, [cells(r) for r in rows], right=(1, 3, 4))

    ui.result("ps", {"servers": rows}, human)
    return 0
