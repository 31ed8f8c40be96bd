"""What the gateway answers itself, without a runner: that it is there, its version, and its models as OpenAI's and Ollama's clients list them."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from paddock_runner.edge import lists
from paddock_runner.edge.lists import FOR_EVER, Listed
from paddock_runner.errors import PaddockError
from paddock_runner.version import our_version

from paddock_manager.fleet import spawn
from paddock_manager.paths import child_environment
from paddock_manager.store import headline
from paddock_manager.web.pool import Entry, Pool

OPEN = {"/", "/health", "/health/live", "/health/ready", "/ping", "/version", "/api/version"}
"""Paths that need no key."""
LISTS = {"/v1/models", "/api/tags", "/api/ps"}
TIMEOUT_S = 60.0
"""For a program that is asked what it is."""
ABILITIES = {"generate": ["completion"], "embed": ["embedding"], "rank": []}


class Own:
    """The gateway's own answers. created_s: since when it serves."""

    def __init__(self, pool: Pool, created_s: int):
        self._pool, self._created_s = pool, created_s
        self._described: dict[str, Any] | None = None
        self._asking = asyncio.Lock()

    def open(self, path: str) -> dict[str, Any] | str:
        """The answer at a path of OPEN."""
        if path == "/":
            return "Paddock is running"
        if path == "/api/version":
            return lists.ollama_version(our_version())
        if path == "/version":
            return {"version": our_version()}
        return {"status": "ready", "models": len(self._pool.entries)}

    async def description(self) -> dict[str, Any]:
        """What the runner's program says of its API, asked once: no model need be loaded for it. Raises: PaddockError."""
        async with self._asking:
            if self._described is None:
                words = next((e.launch.runner for e in self._pool.entries.values()), ()) or spawn.RUNNER
                self._described = await asyncio.to_thread(_described_by, words)
        return self._described

    def listed(self, path: str) -> dict[str, Any]:
        """The answer at a path of LISTS."""
        entries = self._pool.entries.values()
        if path == "/v1/models":
            return lists.openai_list([self._of(e) for e in entries])
        if path == "/api/tags":
            return {"models": [lists.ollama_entry(self._of(e)) for e in entries]}
        return {"models": [lists.ollama_loaded(self._of(e)) for e in entries if e.server is not None]}

    def model(self, path: str) -> dict[str, Any]:
        """The answer at /v1/models/NAME. Raises: UnknownModel."""
        name = path.removeprefix("/v1/models/")
        return lists.openai_entry(self._of(self._pool.entry(name if name in self._pool.entries else lists.plain_name(name))))

    def show(self, name: str) -> dict[str, Any]:
        """The answer to Ollama's /api/show; the model is not loaded for it. Raises: UnknownModel."""
        entry = self._pool.entry(name)
        template = headline.template_at(entry.launch.path)
        abilities = list(ABILITIES.get(str(entry.facts.get("task")), ABILITIES["generate"]))
        if "completion" in abilities and "tools" in template:
            abilities.append("tools")
        return lists.ollama_show(self._of(entry), template, abilities)

    def _of(self, entry: Entry) -> Listed:
        facts = {**entry.facts, "memory_bytes": entry.need_bytes, "state": entry.state}
        left_s = self._pool.may_idle_s(entry) + (entry.last_used - time.monotonic() if not entry.in_flight else 0)
        expires = FOR_EVER if math.isinf(left_s) or entry.server is None else datetime.fromtimestamp(time.time() + left_s, UTC).isoformat().replace("+00:00", "Z")
        return Listed(entry.launch.name, self._created_s, entry.ctx_tokens, entry.need_bytes, facts, expires)


def _described_by(words: Sequence[str]) -> dict[str, Any]:
    """What that program prints. Raises: PaddockError."""
    try:
        done = subprocess.run(
            [*words, "openapi"], stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=True, env=child_environment()
        )
        described: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise PaddockError(f"the runner's program does not describe its API: {error}", "`paddock-runner openapi` shows why") from None
    return described
