"""Calls of tools that a model wants: shown to the user, made when they agree. Nothing is called without a yes, given now or before."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paddock_runner.errors import PaddockError

from paddock_manager.fleet.mcp import Toolbox
from paddock_manager.ui import Ui, plain

SHOWN_CHARACTERS = 2000
REFUSED = "The user did not allow this call."


@dataclass(slots=True)
class Tools:
    """Open tools, and those that need no asking. "*" stands for all."""

    box: Toolbox
    allowed: set[str] = field(default_factory=set)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """All tools in OpenAI's shape."""
        return [tool.as_function for tool in self.box.tools.values()]

    def may(self, name: str) -> bool:
        """Whether a tool needs no asking."""
        return name in self.allowed or "*" in self.allowed


def call(tools: Tools, wanted: dict[str, Any], ui: Ui) -> dict[str, Any]:
    """The message that answers one call: its result, or why there is none."""
    name, arguments = wanted["function"]["name"], wanted["function"]["arguments"] or "{}"
    answer = {"role": "tool", "tool_call_id": wanted["id"]}
    try:
        given = json.loads(arguments)
    except ValueError:
        given = None
    if name not in tools.box.tools or not isinstance(given, dict):
        ui.say(f"({plain(name)} was called in a way that cannot be: {plain(arguments[:200])})")
        reason = "the arguments are no JSON object" if name in tools.box.tools else f"there is no tool {name}"
        return {**answer, "content": f"Error: {reason}."}
    if not _is_allowed(tools, name, given, ui):
        return {**answer, "content": REFUSED}
    try:
        text, is_error = tools.box.call(name, given)
    except PaddockError as error:
        ui.fail(error)
        return {**answer, "content": f"Error: {error.message}"}
    ui.say(f"({plain(name)}: {'error, ' if is_error else ''}{len(text)} characters)")
    return {**answer, "content": f"Error: {text}" if is_error else text}


def _is_allowed(tools: Tools, name: str, arguments: dict[str, Any], ui: Ui) -> bool:
    server = tools.box.tools[name].server
    shown = plain(json.dumps(arguments, ensure_ascii=False))
    if len(shown) > SHOWN_CHARACTERS:
        shown = f"{shown[:SHOWN_CHARACTERS]} ... ({len(shown)} characters)"
    if tools.may(name):
        ui.say(f"(calls {plain(name)} of {plain(server)} with {shown})")
        return True
    if not ui.can_ask():
        ui.warn(f"{plain(name)} was not called: nobody can be asked here; --mcp-allow {plain(name)} allows it")
        return False
    ui.say(f"The model wants to call {plain(name)} of {plain(server)} with {shown}")
    try:
        said = input("Call it? [y]es, [n]o, [a]lways this tool: ").strip().lower()
    except (EOFError, KeyboardInterrupt):
        ui.line()
        return False
    if said in ("a", "always"):
        tools.allowed.add(name)
    return said in ("y", "yes", "a", "always")


def show(tools: Tools | None, ui: Ui) -> None:
    """All tools with their servers."""
    if tools is None or not tools.box.tools:
        ui.say("no tools; `paddock run MODEL --mcp CONFIG` brings some")
        return
    rows = (
        (tool.name, tool.server, "yes" if tools.may(tool.name) else "asks", _first_line(tool.description))
        for tool in tools.box.tools.values()
    )
    ui.table(("tool", "server", "allowed", "what it does"), ([plain(cell) for cell in row] for row in rows))


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:80]


def names(told: str) -> Iterable[str]:
    """The tools that an option names."""
    return (name.strip() for name in told.split(",") if name.strip())
