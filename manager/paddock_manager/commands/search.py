"""paddock search: names of the catalog, and repositories of the hub."""

from __future__ import annotations

from typing import Any

from paddock_runner.errors import HubError

from paddock_manager import paths
from paddock_manager.catalog import catalog
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.ui import Ui, count, size

COMMAND = Command(
    "search",
    "Find models: in the catalog, and on the hub.",
    (Argument("words", "what the name contains; nothing lists the catalog", required=False, many=True),),
    (
        Option("--local", "the catalog only, no network"),
        Option("--limit", "so many of the hub (default 20)", "int", value="N", least=1),
    ),
    "Repositories of the hub are those with GGUF files, the most downloaded first. A size that the catalog does not know is told by `paddock ls --remote NAME`.",
    ("paddock search qwen3", "paddock search --local"),
)


def run(values: Values, ui: Ui) -> int:
    """Look both up."""
    words = [w.lower() for w in values.many("words")]
    entries = [
        e for e in catalog.entries().values() if all(w in f"{e.name} {e.title} {e.family}".lower() for w in words)
    ]
    named = [catalog.told(e) for e in entries]
    found: list[dict[str, Any]] = []
    settings = paths.hub_settings()
    if words and not values.flag("local") and not settings.offline:
        try:
            found = _hub(settings, " ".join(words), max(1, min(100, values.integer("limit") or 20)))
        except HubError as error:
            ui.warn(f"the hub was not searched: {error.message}")

    def human(out: Ui) -> None:
        if named:
            out.table(
                ("CATALOG", "TITLE", "PARAMS", "QUANT", "SIZE", "LICENCE"),
                [
                    (n["name"], n["title"], n["params"], n["quant"] or "-", size(n["size_bytes"]) if "size_bytes" in n else "-", n["licence"])
                    for n in named
                ],
                right=(2, 4),
            )
            if not all("size_bytes" in n for n in named):
                out.say("sizes shown as - are told by the hub: `paddock ls --remote NAME`")
        if found:
            if named:
                out.line()
            out.table(
                ("HUB REPOSITORY", "DOWNLOADS", "LIKES"),
                [(f["repo"], count(f["downloads"]), str(f["likes"])) for f in found],
                right=(1, 2),
            )
        if not named and not found:
            out.say("nothing found")

    ui.result("search", {"catalog": named, "hub": found}, human)
    return 0


def _hub(settings: paths.HubSettings, words: str, limit: int) -> list[dict[str, Any]]:
    from paddock_manager.store import hub
    from paddock_manager.store.web import Timing, Web

    with Web(settings.endpoint, settings.token, Timing(5.0, 15.0)) as web:
        return hub.search(web, words, limit)
