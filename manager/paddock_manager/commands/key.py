"""paddock key: the key that clients of this machine's servers present."""

from __future__ import annotations

from paddock_manager import paths
from paddock_manager.fleet import keys, state
from paddock_manager.options import Command, Option, Values
from paddock_manager.ui import Ui

COMMAND = Command(
    "key",
    "Print the key that clients send as a bearer token; it is made at first use.",
    (),
    (
        Option("--new", "make a new key; servers that run keep the old one until they are restarted"),
        Option("--path", "print where it is kept, not the key"),
    ),
    "It lies in a file that only you can read, and never appears in logs.",
    ('curl -H "Authorization: Bearer $(paddock key)" http://127.0.0.1:11660/v1/models',),
)


def run(values: Values, ui: Ui) -> int:
    """Print it."""
    places = paths.places()
    if values.flag("new"):
        keys.make(places)
        running = [s.name for s in state.servers(places)]
        if running:
            ui.warn(f"{', '.join(running)} still take the old key; restart them")
    path = keys.key_file(places)
    word = str(path) if values.flag("path") else keys.key(places)
    ui.result("key", {"path": str(path)} | ({} if values.flag("path") else {"key": word}), lambda u: u.line(word))
    return 0
