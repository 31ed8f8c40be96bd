"""The gateway process: `python -m paddock_manager.web PLAN.json --port N --state-file FILE`, started by `paddock serve` for several models."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import uvicorn
from paddock_runner.edge.auth import Guard
from paddock_runner.edge.keyfile import KeyFile
from paddock_runner.edge.listen import BACKLOG, bind, check_tls
from paddock_runner.edge.protocol import Protocol
from paddock_runner.errors import PaddockError

from paddock_manager import paths
from paddock_manager.fleet import keys, spawn
from paddock_manager.fleet.spawn import Launch
from paddock_manager.web.gateway import Gateway, stamp
from paddock_manager.web.pool import Entry, Plan, Pool


def main(words: list[str]) -> int:
    """Serve until SIGTERM. Returns an exit code of the error tree."""
    try:
        plan, _, port, _, ready_file = words
        return serve(Plan(**json.loads(Path(plan).read_bytes())), int(port), Path(ready_file))
    except PaddockError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def serve(plan: Plan, port: int, ready_file: Path) -> int:
    """Listen first, so that a port in use is an error before anything is started. ready_file: written when requests are taken."""
    places = paths.places()
    key_file = Path(plan.key_file) if plan.key_file else None
    entries = [
        Entry(
            Launch(
                m["name"],
                m["ref"],
                Path(m["path"]),
                key_file=key_file,
                flags=tuple(m["flags"]),
                asked=m["asked"],
                runner=tuple(plan.runner),
            ),
            m["need_bytes"],
            m.get("max_ctx_tokens", 0),
            m.get("facts", {}),
        )
        for m in plan.models
    ]
    pool = Pool(places, entries, plan.budget_bytes, plan.idle_s, plan.start_s)
    pool.log = lambda text: _say(text)
    pool.adopt()
    tls = check_tls(Path(plan.tls[0]), Path(plan.tls[1])) if plan.tls else None
    listener = bind(plan.host, port)
    port = listener.getsockname()[1]
    guard = Guard(KeyFile(key_file, _say).now if key_file else (), (*plan.hosts, plan.host), plan.origins)
    gateway = Gateway(pool, (lambda: keys.key(places)) if key_file else (lambda: ""), guard, plan.max_body_bytes)
    settings: dict[str, Any] = {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]} if tls else {}
    config = uvicorn.Config(
        gateway, http=Protocol, log_level="warning", access_log=False, server_header=False, date_header=False, ws="none", proxy_headers=False, lifespan="on",
        timeout_keep_alive=max(1, int(plan.keep_alive_s)), timeout_graceful_shutdown=10, backlog=BACKLOG, **settings,
    )  # fmt: skip
    ready = {
        "pid": os.getpid(),
        "host": plan.host,
        "port": port,
        "model": "gateway",
        "max_ctx_tokens": 0,
        "max_batch": 0,
        "device": "gateway",
    }
    part = ready_file.with_suffix(".part")
    part.write_text(json.dumps(ready))
    os.replace(part, ready_file)
    _say(f"{len(entries)} models on port {port}")
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{stamp()} {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    spawn.CHILDREN.clear()
    sys.exit(main(sys.argv[1:]))
