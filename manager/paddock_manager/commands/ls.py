"""paddock ls: the models that are here, from their records; no checkpoint is opened."""

from __future__ import annotations

from typing import Any

from paddock_runner.errors import PaddockError, UsageError

from paddock_manager import paths
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.store import index
from paddock_manager.store.record import Model
from paddock_manager.ui import Ui, ago, count, size

COMMAND = Command(
    "ls",
    "List the models that are here.",
    (Argument("words", "only models whose name holds all of these", required=False, many=True),),
    (
        Option("--remote", "list what a hub repository (or catalog name) offers", "text", value="REF"),
        Option("--elsewhere", "list what other programs keep on this machine; `paddock add` uses it in place"),
        Option("--fit", "also say which fit here now, and up to which context (opens every header: slower)"),
        Option("--names", "names only, one a line"),
        Option("--full", "full names, org/repo:quant"),
    ),
    "STATE: ok, partial (a pull was interrupted), unverified (put there by hand), missing, changed, damaged (`paddock verify` found other bytes), offline.",
)


def run(values: Values, ui: Ui) -> int:
    """List them."""
    places = paths.places()
    if values.flag("elsewhere"):
        return elsewhere(places, ui)
    if values.text("remote"):
        return remote(values.text("remote"), places, ui)
    problems: list[PaddockError] = []
    words = [w.lower() for w in values.many("words")]
    found = [m for m in index.models(places, problems) if all(w in f"{m.name} {m.ref}".lower() for w in words)]
    for problem in problems:
        ui.warn(problem.message)
    fits = {m.ref: fit_of(m) for m in found} if values.flag("fit") else {}

    def human(out: Ui) -> None:
        if values.flag("names"):
            for model in found:
                out.line(model.ref if values.flag("full") else model.name)
        elif not found and words:
            out.say(f"no model here is called {' '.join(words)}; `paddock search {' '.join(words)}` looks further")
        elif not found:
            out.say(f"no models in {places.home}; `paddock pull smollm2-135m` fetches a small one")
        else:
            rows = [row(m, values.flag("full")) for m in found]
            heads: tuple[str, ...] = ("NAME", "QUANT", "PARAMS", "SIZE", "CTX MAX", "STATE", "MODIFIED")
            if fits:
                heads = (*heads[:5], "FITS", *heads[5:])
                rows = [(*r[:5], fits[m.ref]["says"], *r[5:]) for r, m in zip(rows, found, strict=True)]
            out.table(heads, rows, right=(2, 3, 4))

    models = [m.facts() | ({"fit": fits[m.ref]} if fits else {}) for m in found]
    body = {"models": models, "problems": [p.message for p in problems], "home": str(places.home)}
    ui.result("ls", body, human)
    return 0


def fit_of(model: Model) -> dict[str, Any]:
    """Whether a model fits here now: at the context that `paddock fit` asks for, at a smaller one, or why not."""
    from paddock_runner.files.checkpoint import open_checkpoint

    from paddock_manager.fit import fit

    try:
        where = fit.find_where("auto", None, "", None)[0]
        found = fit.report(model.name, open_checkpoint(model.path), where, fit.Wish())
    except PaddockError as error:
        return {"verdict": "unknown", "largest_ctx_tokens": 0, "need_bytes": 0, "says": f"? {error.code}"}
    least = found.largest_ctx_tokens
    says = "yes" if found.verdict in ("fits", "tight") else f"up to {least}" if least else "no"
    return {"verdict": found.verdict, "largest_ctx_tokens": least, "need_bytes": found.plan.peak_bytes, "says": says}


def elsewhere(places: paths.Places, ui: Ui) -> int:
    """Checkpoints of other programs, with what to type to use them."""
    from paddock_manager.store import elsewhere as others

    ours = {str(m.path) for m in index.models(places, [])}
    found = others.find(paths.folders_of_others(), ours)
    rows = [{"program": f.program, "path": str(f.path), "size_bytes": f.size_bytes} for f in found]

    def human(out: Ui) -> None:
        if not rows:
            out.say("nothing found in the folders of " + ", ".join(paths.folders_of_others()))
            return
        out.table(
            ("PROGRAM", "SIZE", "PATH"), [(f.program, size(f.size_bytes), str(f.path)) for f in found], right=(1,)
        )
        out.say("`paddock add PATH` uses one where it lies")

    ui.result("ls", {"elsewhere": rows}, human)
    return 0


def remote(word: str, places: paths.Places, ui: Ui) -> int:
    """The variants of a repository, with their sizes, from its listing alone."""
    from paddock_manager.catalog import catalog, names
    from paddock_manager.store import choose, hub
    from paddock_manager.store.pull import Shop

    ref = names.parse(word)
    entry = catalog.find(ref.short) if ref.short else None
    name = entry.sources[0].repo if entry else ref.repo
    if not name:
        raise UsageError(
            f"{word!r} is neither a repository nor a name of the catalog", "repositories are named org/repo"
        )
    with Shop(places, paths.hub_settings()).web() as web:
        found = hub.listing(web, name, ref.rev)
    files = [(f.name, f.size_bytes) for f in found.files]
    variants = [
        {"ref": f"{name}:{q}", "size_bytes": sum(s for _, s in g), "files": len(g)}
        for q, g in choose.gguf_variants(files).items()
    ]
    weights = [s for n, s in files if n.endswith(".safetensors") and "/" not in n]
    if weights:
        variants.append({"ref": f"{name}:safetensors", "size_bytes": sum(weights), "files": len(weights)})
    advice = catalog.sampling(ref.short) if entry else {}
    variants.sort(key=lambda v: int(str(v["size_bytes"])))

    def human(out: Ui) -> None:
        out.table(
            ("REF", "SIZE", "FILES"),
            [(str(v["ref"]), size(int(str(v["size_bytes"]))), str(v["files"])) for v in variants],
            right=(1, 2),
        )
        out.say(f"{name}@{found.commit[:12]}, licence {found.licence or 'not said'}")
        if advice:
            out.say("recommended: " + ", ".join(f"{key} {value:g}" for key, value in advice.items()))

    body = {"remote": name, "commit": found.commit, "licence": found.licence, "variants": variants, "recommended": advice}
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
