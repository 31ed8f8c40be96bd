"""paddock key: the key that clients of this machine's servers present, and keys for others."""

from __future__ import annotations

from typing import Any

from paddock_runner.errors import UsageError

from paddock_manager import paths
from paddock_manager.fleet import keys
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.ui import Ui

COMMAND = Command(
    "key",
    "Print the key that clients send as a bearer token; it is made at first use. Give others keys of their own.",
    (
        Argument("verb", "add, rm or ls: keys for others", required=False),
        Argument("name", "whose key", required=False),
    ),
    (
        Option(
            "--scope",
            "what an added key may do: ask models, or also read metrics and state",
            "text",
            choices=keys.SCOPES,
        ),
        Option("--weight", "how many times the share of another key it gets of a busy server (default 1)", "int", value="N", least=1, most=keys.MAX_WEIGHT),
        Option("--new", "make a new key for this machine"),
        Option("--path", "print where it is kept, not the key"),
    ),
    "It lies in a file that only you can read, and never appears in logs; servers check hashes. An added key is shown once. "
    "Servers that run take a change within a second.",
    (
        'curl -H "Authorization: Bearer $(paddock key)" http://127.0.0.1:11660/v1/models',
        "paddock key add phone --scope inference",
    ),
)


def run(values: Values, ui: Ui) -> int:
    """Print it, or change the list."""
    places = paths.places()
    verb, name = values.text("verb"), values.text("name")
    if verb not in ("", "add", "rm", "ls"):
        raise UsageError(f"key does not know {verb!r}", "it knows add, rm and ls")
    for option in ("scope", "weight"):
        if option in values.found and verb != "add":
            raise UsageError(f"--{option} is for a key that is added", "paddock key add NAME")
    if verb in ("add", "rm") and not name:
        raise UsageError(f"key {verb} needs NAME")
    if verb == "ls":
        return listed(places, ui)
    if verb == "add":
        fresh = keys.add(places, name, values.text("scope", "inference"), values.integer("weight") or 1)
        ui.result("key", {"path": str(keys.server_file(places)), "key": fresh}, lambda u: u.line(fresh))
        return 0
    if verb == "rm":
        keys.remove(places, name)
        return listed(places, ui)
    if values.flag("new"):
        keys.make(places)
        keys.server_file(places)
    path = keys.key_file(places)
    word = str(path) if values.flag("path") else keys.key(places)
    ui.result("key", {"path": str(path)} | ({} if values.flag("path") else {"key": word}), lambda u: u.line(word))
    return 0


def listed(places: paths.Places, ui: Ui) -> int:
    """Whose keys are let in."""
    path = keys.server_file(places)
    rows: list[dict[str, Any]] = [{"name": e.name, "scope": e.scope, "weight": e.weight} for e in keys.entries(places)]
    body = {"path": str(path), "keys": rows}
    ui.result("key", body, lambda u: u.table(("KEY", "SCOPE", "WEIGHT"), [(r["name"], r["scope"], str(r["weight"])) for r in rows], right=(2,)))
    return 0
