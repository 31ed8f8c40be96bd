"""paddock verify: are the bytes on disk the ones that were published?"""

from __future__ import annotations

from typing import Any

from paddock_runner.errors import FileError

from paddock_manager import paths
from paddock_manager.catalog import names
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.store import index
from paddock_manager.store.pull import Shop
from paddock_manager.store.record import Model
from paddock_manager.store.verify import Verdict, repair, verify
from paddock_manager.ui import Ui

COMMAND = Command(
    "verify",
    "Read every byte of a model and compare it with the published hashes.",
    (Argument("models", "models that are here", required=False, many=True, kind="model"),),
    (Option("--all", "every model"), Option("--repair", "fetch the parts that are wrong again")),
    "Exit code 7 when something is wrong and was not repaired.",
)


def run(values: Values, ui: Ui) -> int:
    """Verify, repair where asked."""
    places = paths.places()
    if values.flag("all") or not values.many("models"):
        found = index.models(places)
    else:
        found = [index.find(places, names.parse(w)) for w in values.many("models")]
    rows: list[dict[str, Any]] = []
    for model in found:
        with ui.progress(model.name, model.size_bytes) as bar:
            verdicts = verify(model, bar.move_by)
        bad = [v for v in verdicts if v.state in ("wrong", "missing")]
        fetched = 0
        if bad and values.flag("repair"):
            fetched = repair(Shop(places, paths.hub_settings()), model, bad)
            verdicts = verify(model, lambda n: None)
        rows.append(facts(model, verdicts, fetched))

    def human(out: Ui) -> None:
        for r in rows:
            note = f" (repaired, {r['fetched_bytes']} bytes fetched)" if r["fetched_bytes"] else ""
            out.line(f"{r['name']}: {r['state']}{note}")
            for f in r["files"]:
                if f["state"] != "ok":
                    out.line(
                        f"  {f['name']}: {f['state']}"
                        + (f" in {len(f['bad_parts'])} part(s)" if f["bad_parts"] else "")
                    )

    wrong = [r for r in rows if r["state"] == "wrong"]
    ui.result("verify", {"models": rows}, human)
    if wrong and not ui.as_json:
        raise FileError(
            f"{', '.join(r['name'] for r in wrong)}: the bytes on disk are not the published ones",
            "`--repair` fetches what is wrong again",
        )
    return FileError.exit_code if wrong else 0


def facts(model: Model, verdicts: list[Verdict], fetched_bytes: int) -> dict[str, Any]:
    """One model for --json."""
    states = {v.state for v in verdicts}
    state = "wrong" if states & {"wrong", "missing"} else "no published hash" if "unknown" in states else "ok"
    files = [
        {"name": v.file.name, "state": v.state, "expected": v.expected, "actual": v.actual, "bad_parts": v.bad_parts}
        for v in verdicts
    ]
    return {"name": model.name, "ref": model.ref, "state": state, "fetched_bytes": fetched_bytes, "files": files}
