"""paddock config: settings of the manager, each with where its value comes from."""

from __future__ import annotations

from typing import Any

from paddock_runner.errors import UsageError

from paddock_manager import paths, settings
from paddock_manager.options import Argument, Command, Values
from paddock_manager.ui import Ui

COMMAND = Command(
    "config",
    "Show settings and where each value comes from; set one.",
    (
        Argument("verb", "get, set, unset or explain", required=False),
        Argument("key", "a setting", required=False),
        Argument("value", "its new value", required=False),
    ),
    (),
    "A flag beats a variable (serve.port is PADDOCK_SERVE_PORT), a variable beats the file, the file beats the default.",
    ("paddock config", "paddock config explain serve.port", "paddock config set pull.connections 4"),
)


def run(values: Values, ui: Ui) -> int:
    """List, get, set, unset or explain."""
    places = paths.places()
    verb, key = values.text("verb", "list"), values.text("key")
    if verb not in ("list", "get", "set", "unset", "explain"):
        raise UsageError(f"config does not know {verb!r}", "it knows get, set, unset and explain")
    if verb in ("set", "unset"):
        if verb == "set" and "value" not in values.found:
            raise UsageError("config set needs KEY and VALUE")
        settings.change(places.config_file, key, values.text("value") if verb == "set" else None)
    found = settings.load(places.config_file)
    if key:
        found = {key: settings.one(found, key)}
    rows: list[dict[str, Any]] = [
        {"key": s.key, "value": s.value, "origin": s.origin, "default": s.default, "about": s.about}
        for s in found.values()
    ]

    def human(out: Ui) -> None:
        if verb == "get" and key:
            out.line(str(rows[0]["value"]))
            return
        out.table(
            ("SETTING", "VALUE", "FROM", "ABOUT"), [(r["key"], str(r["value"]), r["origin"], r["about"]) for r in rows]
        )

    ui.result("config", {"settings": rows, "file": str(places.config_file)}, human)
    return 0
