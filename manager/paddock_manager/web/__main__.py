"""The gateway process: `python -m paddock_manager.web PLAN.json --port N --state-file FILE`, started by `paddock serve` for several models."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from paddock_runner.errors import FileError, PaddockError, UsageError

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
    listener = _listen(plan.host, port)
    port = listener.getsockname()[1]
    gateway = Gateway(pool, keys.key(places) if key_file else "", keys.Ring(keys.entries(places)), plan.hosts, plan.origins)
    tls: dict[str, Any] = {"ssl_certfile": plan.tls[0], "ssl_keyfile": plan.tls[1]} if plan.tls else {}
    config = uvicorn.Config(
        gateway, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=10, **tls
    )
    try:
        config.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise FileError(f"{plan.tls[0]} and {plan.tls[1]} cannot be used for TLS: {error}", path=plan.tls[0]) from None
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


def _listen(host: str, port: int) -> socket.socket:
    """Raises: UsageError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).partition(" (while")[0]
        hint = "--port 0 takes a free one" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "check --host"
        raise UsageError(f"cannot listen on {host} port {port}: {reason}", hint, port=port) from None
    return listener


def _say(text: str) -> None:
    sys.stderr.write(f"{stamp()} {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    spawn.CHILDREN.clear()
    sys.exit(main(sys.argv[1:]))
