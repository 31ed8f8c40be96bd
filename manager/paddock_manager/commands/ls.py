"""paddock ls: the models that are here, from their records; no checkpoint is opened."""

from __future__ import annotations

from paddock_runner.errors import PaddockError

from paddock_manager import paths
from paddock_manager.options import Command, Option, Values
from paddock_manager.store import index
from paddock_manager.store.record import Model
from paddock_manager.ui import Ui, ago, count, size

COMMAND = Command(
    "ls",
    "List the models that are here.",
    (),
    (Option("--names", "names only, one a line"), Option("--full", "full names, org/repo:quant")),
    "STATE: ok, partial (a pull was interrupted), unverified (put there by hand), missing, changed, offline.",
)


def run(values: Values, ui: Ui) -> int:
    """List them."""
    places = paths.places()
    problems: list[PaddockError] = []
    found = index.models(places, problems)
    for problem in problems:
        ui.warn(problem.message)

    def human(out: Ui) -> None:
        if values.flag("names"):
            for model in found:
                out.line(model.ref if values.flag("full") else model.name)
        elif not found:
            out.say(f"no models in {places.home}; `paddock pull smollm2-135m` fetches a small one")
        else:
            rows = [row(m, values.flag("full")) for m in found]
            out.table(("NAME", "QUANT", "PARAMS", "SIZE", "CTX MAX", "STATE", "MODIFIED"), rows, right=(2, 3, 4))

    body = {"models": [m.facts() for m in found], "problems": [p.message for p in problems], "home": str(places.home)}
    ui.result("ls", body, human)
    return 0


def row(model: Model, full: bool) -> tuple[str, ...]:
    """One line of the table."""
    head = model.headline
    params, context = head.get("n_params"), head.get("max_ctx_tokens")
    return (
        model.ref if full else model.name,
        model.quant or str(head.get("format") or "?"),
        count(params) if params else "?",
        size(model.size_bytes),
        str(context) if context else "?",
        state(model),
        ago(model.pulled_at) if model.pulled_at else "",
    )


def state(model: Model) -> str:
    """The state, with how far a partial one is."""
    if model.state == "partial" and model.size_bytes:
        return f"partial {model.done_bytes / model.size_bytes:.0%}"
    return f"{model.state}, in place" if model.is_added else model.state
