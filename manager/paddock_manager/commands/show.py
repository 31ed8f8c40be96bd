"""paddock show: what a model is, from its record; its template and tensors from its header when asked for."""

from __future__ import annotations

from paddock_manager import paths
from paddock_manager.catalog import catalog, names
from paddock_manager.commands.ls import state
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.store import headline, index
from paddock_manager.store.record import Model
from paddock_manager.ui import Ui, ago, count, plain, size

GIVES = {"generate": "text", "embed": "vectors (embeddings)", "rank": "scores (reranking)"}
COMMAND = Command(
    "show",
    "Say what a model is: files, origin, licence, sizes.",
    (Argument("model", "a model that is here, or a name of the catalog", kind="model"),),
    (
        Option("--template", "print its chat template"),
        Option(
            "--diff", "compare its chat template with that of another model, here or on the hub", "text", value="MODEL"
        ),
        Option("--files", "list its files with their hashes"),
        Option("--path", "print only where it is"),
    ),
)


def run(values: Values, ui: Ui) -> int:
    """Print it."""
    ref = names.parse(values.text("model"))
    if values.text("diff"):
        return diff(values.text("model"), values.text("diff"), ui)
    if ref.path is not None:
        from paddock_manager.commands import inspect

        return inspect.run(Values({"file": values.text("model"), "template": values.flag("template")}), ui)
    entry = catalog.find(ref.short) if ref.short else None
    if entry is not None and not index.matches(paths.places(), ref) and not values.flag("path") and not values.flag("template"):
        return show_entry(entry, ui)
    model = index.find(paths.places(), ref)
    if values.flag("path"):
        ui.result("show", {"path": str(model.path)}, lambda u: u.line(str(model.path)))
        return 0
    if values.flag("template"):
        text = template(model)
        ui.result("show", {"template": text}, lambda u: u.line(plain(text, keep="\n\t")))
        return 0
    files = [
        {"name": f.name, "size_bytes": f.size_bytes, "sha256": f.sha256, "git_sha1": f.git_sha1} for f in model.files
    ]
    from paddock_manager.fit import fit

    problem = fit.refusal(model.path) if model.state == "ok" else ""
    body = {"model": model.facts() | ({"problem": problem} if problem else {}), "files": files}
    ui.result("show", body, lambda u: human(u, model, problem, values.flag("files")))
    return 0


def show_entry(entry: catalog.Entry, ui: Ui) -> int:
    """What the catalog knows of a model that is not here, and who knows the rest."""
    told = catalog.told(entry)
    unknown = f"not known before the hub is asked: `paddock ls --remote {entry.name}`"
    rows = [
        ("name", entry.name),
        ("title", entry.title),
        ("full name", f"{told['repo']}:{entry.quant}" if entry.quant else told["repo"]),
        ("commit", told["rev"] or "the newest, pinned when a pull begins"),
        ("licence", entry.licence),
        ("family", entry.family),
        ("parameters", entry.params),
        ("recommended", advice_of(entry.name)),
        ("size", size(told["size_bytes"]) if "size_bytes" in told else unknown),
        ("state", f"not here: `paddock pull {entry.name}` fetches it, `paddock fit {entry.name}` says whether it fits"),
    ]
    ui.result("show", {"catalog": told}, lambda u: u.pairs((k, v) for k, v in rows if v))
    return 0


def diff(left: str, right: str, ui: Ui) -> int:
    """How the second model's chat template differs from the first's; only headers are read."""
    import difflib

    from paddock_manager.commands.fit import opened

    one, other = (headline.template_of(opened(word, ui)[1]) or "" for word in (left, right))
    lines = list(difflib.unified_diff(one.splitlines(), other.splitlines(), left, right, lineterm=""))
    same = one == other

    def human(out: Ui) -> None:
        if same:
            out.say("the chat templates are the same" if one else "neither has a chat template")
        for line in lines:
            out.line(plain(line, keep="\t"))

    ui.result("show", {"diff": "\n".join(lines), "same": same}, human)
    return 0


def template(model: Model) -> str:
    """The chat template; "" when there is none.

    Raises: FileError when the model cannot be opened, or its template is not the one that was pulled.
    """
    from paddock_manager.commands import target

    return headline.pinned_template(target.of_model(model).path, str(model.headline.get("template_sha256") or ""))


def advice_of(short: str) -> str:
    """Sampling that the makers of a model of the catalog recommend; the runner takes it for requests that do not say, unless the files say otherwise."""
    return ", ".join(f"{key} {value:g}" for key, value in catalog.sampling(short).items()) if short else ""


def _format(model: Model) -> str:
    """The file's quant, and what most of its weights are where that is another word."""
    most, kind = str(model.headline.get("format") or "?"), model.headline.get("kind") or "?"
    is_mixed = model.quant and model.quant.lower() != most
    return f"{model.quant}, mostly {most} ({kind})" if is_mixed else f"{most} ({kind})"


def human(out: Ui, model: Model, problem: str, with_files: bool) -> None:
    """For people."""
    head = model.headline
    entry = catalog.find(model.alias) if model.alias else None
    rows = [
        ("name", model.name),
        ("title", entry.title if entry else ""),
        ("full name", model.ref),
        ("commit", model.commit),
        ("source", model.source),
        ("licence", model.licence),
        ("family", str(head.get("family") or "unknown architecture")),
        ("format", _format(model)),
        ("parameters", count(head["n_params"]) if head.get("n_params") else "?"),
        ("gives", GIVES.get(str(head.get("task")), "text")),
        ("context", f"{head['max_ctx_tokens']} tokens" if head.get("max_ctx_tokens") else "?"),
        ("recommended", advice_of(model.alias)),
        ("chat template", f"sha256 {head['template_sha256'][:16]}" if head.get("template_sha256") else "none"),
        ("size", size(model.size_bytes) + f" in {len(model.files)} file(s)"),
        ("state", state(model)),
        ("since", ago(model.pulled_at) if model.pulled_at else ""),
        ("path", str(model.path)),
        ("problem", problem),
    ]
    out.pairs((k, v) for k, v in rows if v)
    if with_files:
        out.line()
        out.table(
            ("FILE", "BYTES", "HASH"),
            [(f.name, str(f.size_bytes), f.sha256 or f.git_sha1) for f in model.files],
            right=(1,),
        )
