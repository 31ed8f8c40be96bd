"""paddock verify: are the bytes on disk the ones that were published?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paddock_runner.errors import FileError, Locked

from paddock_manager import paths
from paddock_manager.catalog import names
from paddock_manager.commands import target
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.store import index
from paddock_manager.store.pull import Shop
from paddock_manager.store.record import Model
from paddock_manager.store.verify import Verdict, repair, verify
from paddock_manager.ui import Ui, plain, size

COMMAND = Command(
    "verify",
    "Read every byte of a model and compare it with the published hashes.",
    (Argument("models", "models that are here", required=False, many=True, kind="model"),),
    (
        Option("--all", "every model"),
        Option("--repair", "fetch the parts that are wrong again"),
        Option("--deep", "also read every scale and plain number of the weights: NaN and infinity are found"),
    ),
    "Exit code 7 when something is wrong and was not repaired. What --deep finds was published so: no repair helps.",
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
        if model.state == "offline":
            if values.many("models"):
                target.of_model(model)
            rows.append(facts(model, [], 0) | {"state": "offline"})
            continue
        with ui.progress(model.name, model.size_bytes) as bar:
            verdicts = verify(model, bar.move_by)
        bad = [v for v in verdicts if v.state in ("wrong", "missing")]
        fetched = 0
        if bad and values.flag("repair"):
            fetched = repair(Shop(places, paths.hub_settings()), model, bad)
            verdicts = verify(model, lambda n: None)
        row = facts(model, verdicts, fetched)
        try:
            index.mark(places, model, is_damaged=any(v.state == "wrong" for v in verdicts))
        except (OSError, Locked) as error:  # what was found is said all the same
            ui.warn(f"{model.name}: not noted for `paddock ls`: {error.message if isinstance(error, Locked) else error.strerror}")
        rows.append(row | (deep(model, ui) if values.flag("deep") and row["state"] != "wrong" else {}))

    def human(out: Ui) -> None:
        for r in rows:
            note = f" (repaired, {size(r['fetched_bytes'])} fetched)" if r["fetched_bytes"] else ""
            out.line(f"{r['name']}: {r['state']}{note}")
            for t in r.get("not_finite", []):
                out.line(
                    f"  tensor {plain(t['tensor'])} ({t['format']}): {t['n_blocks']} block(s) hold NaN or infinity, from byte {t['first']}"
                )
            for f in r["files"]:
                if f["state"] != "ok":
                    out.line(
                        f"  {f['name']}: {f['state']}"
                        + (f" in {len(f['bad_parts'])} part(s)" if f["bad_parts"] else "")
                    )

    wrong = [r for r in rows if r["state"] == "wrong"]
    spoilt = [r for r in rows if r.get("not_finite")]
    ui.result("verify", {"models": rows}, human)
    if wrong and not ui.as_json:
        raise FileError(
            f"{', '.join(r['name'] for r in wrong)}: the bytes on disk are not the published ones",
            "`--repair` fetches what is wrong again",
        )
    if spoilt and not ui.as_json:
        raise FileError(
            f"{', '.join(r['name'] for r in spoilt)}: weights that are no numbers", "take another quantization of it"
        )
    return FileError.exit_code if wrong or spoilt else 0


def deep(model: Model, ui: Ui) -> dict[str, Any]:
    """What of the weights is no number."""
    from paddock_runner.files.checkpoint import open_checkpoint
    from paddock_runner.files.finite import scan

    checkpoint = open_checkpoint(model.path)
    with ui.progress(f"{model.name}, deep", checkpoint.n_bytes) as bar:
        return {"not_finite": [asdict(found) for found in scan(checkpoint, bar.move_by)]}


def facts(model: Model, verdicts: list[Verdict], fetched_bytes: int) -> dict[str, Any]:
    """One model for --json."""
    states = {v.state for v in verdicts}
    state = "wrong" if states & {"wrong", "missing"} else "no published hash" if "unknown" in states else "ok"
    files = [
        {"name": v.file.name, "state": v.state, "expected": v.expected, "actual": v.actual, "bad_parts": v.bad_parts}
        for v in verdicts
    ]
    return {"name": model.name, "ref": model.ref, "state": state, "fetched_bytes": fetched_bytes, "files": files}
