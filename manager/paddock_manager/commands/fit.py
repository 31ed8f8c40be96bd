"""paddock fit: the runner's own memory plan for a model, here or on the hub, on a device, here or told."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paddock_runner.errors import PaddockError, UnsupportedError, UsageError, WontFit
from paddock_runner.files.checkpoint import Checkpoint, open_checkpoint

from paddock_manager import paths, settings
from paddock_manager.catalog import catalog, names
from paddock_manager.commands import target
from paddock_manager.fit import fit, history
from paddock_manager.fit.fit import Report, Where
from paddock_manager.options import Argument, Command, Option, Values, usage
from paddock_manager.store import index
from paddock_manager.ui import Ui, ago, gib

COMMAND = Command(
    "fit",
    "Say whether a model fits, with which context and batch, and what would fit instead.",
    (
        Argument(
            "model",
            "a model that is here, a path, a URL, or one on the hub (only its header is read)",
            required=False,
            kind="model",
        ),
    ),
    (
        Option("--ctx", "context per request (default 32768, or the model's)", "int", value="TOKENS", also=("-c", "--ctx-size", "--max-model-len", "--context-length", "--num-ctx"), least=1),
        Option("--batch", "requests at a time (default 1)", "int", value="N", also=("--parallel", "--max-num-seqs"), least=1),
        Option("--kv", "format of the KV cache", "text", value="FORMAT", choices=target.KV_FORMATS, also=("--kv-dtype", "--kv-cache-dtype")),
        Option("--window-kv", "format of the KV cache of layers with a sliding window, where it is another", "text", value="FORMAT", choices=target.KV_FORMATS),
        Option("--expert-vram-gib", "device memory for the experts of a mixture; the others stay in host memory", "float", value="GIB", least=-1),
        Option("--device", "auto, cpu, cuda, or a GPU by number, UUID or name", "text", value="DEVICE", also=("--gpu",)),
        Option("--threads", "CPU threads", "int", value="N", also=("-t",), least=0, most=target.MAX_THREADS),
        Option("--vram", "a device with so much memory that is not here, as 24GiB", "size", value="SIZE"),
        Option("--arch", "its architecture (default sm_90)", "text", value="sm_NN"),
        Option("--history", "planned against measured, of every runner that was started here"),
        Option("--max-ctx", "print the largest context that fits, and nothing else"),
        Option("--max-batch", "print the largest batch that fits, and nothing else"),
    ),
    "The plan is the runner's own: it allocates exactly these bytes. Exit code 9 when not even one context fits on any device asked about.",
    (
        "paddock fit smollm2-135m --ctx 8192 --batch 8",
        "paddock fit Qwen/Qwen3-8B-GGUF:Q4_K_M --vram 12GiB --arch sm_89",
    ),
)


def run(values: Values, ui: Ui) -> int:
    """Plan on every device asked about."""
    if values.flag("history"):
        return past(values.text("model"), ui)
    if not values.text("model"):
        raise UsageError("`paddock fit` needs MODEL", usage(COMMAND))
    name, checkpoint, notes = opened(values.text("model"), ui)
    where = fit.find_where(
        values.text("device"), values.integer("vram"), values.text("arch"), values.integer("threads")
    )
    known = settings.load(paths.places().config_file)
    wish = fit.Wish(
        values.integer("ctx"),
        values.integer("batch"),
        values.text("kv") or None,
        int(known["fit.ctx"].value),
        int(known["fit.batch"].value),
        values.number("expert_vram_gib"),
        values.text("window_kv") or None,
    )
    reports = [fit.report(name, checkpoint, w, wish) for w in where]
    for report in reports:
        report.notes = notes + report.notes
        if report.verdict == "no":
            report.alternatives += smaller(values.text("model"), report)
    ui.result("fit", {"reports": [r.facts() for r in reports]}, lambda u: human(u, reports, values))
    if any(r.verdict != "no" for r in reports):
        return 0
    if ui.as_json or values.flag("max_ctx") or values.flag("max_batch"):
        return WontFit.exit_code
    raise wont_fit(reports[0], values)


def past(word: str, ui: Ui) -> int:
    """What runners were planned to take, and what they took."""
    found = [r for r in history.runs(paths.places()) if not word or r.model == word]
    rows = [{**asdict(r), "is_over": r.is_over} for r in found]

    def human(out: Ui) -> None:
        if not found:
            out.say("nothing was started yet" + (f" as {word}" if word else ""))
            return
        cells = [
            (
                r.model,
                r.device,
                str(r.max_ctx_tokens),
                str(r.max_batch),
                gib(r.planned_bytes),
                gib(r.measured_bytes),
                _share(r),
                ago(r.at),
            )
            for r in found
        ]
        names = ("MODEL", "DEVICE", "CTX", "BATCH", "PLANNED GiB", "MEASURED GiB", "OF THE PLAN", "STARTED")
        out.table(names, cells, right=(2, 3, 4, 5, 6))

    ui.result("fit", {"history": rows}, human)
    return 0


def _share(run: history.Run) -> str:
    return f"{run.measured_bytes / run.planned_bytes:.1%}" if run.measured_bytes and run.planned_bytes else "?"


def opened(word: str, ui: Ui) -> tuple[str, Checkpoint, list[str]]:
    """The header that is meant: here, or read from afar."""
    ref = names.parse(word)
    if ref.path is not None:
        found = target.of_path(ref.path)
        return found.name, open_checkpoint(found.path), []
    places = paths.places()
    if not ref.url:
        hits = index.matches(places, ref)
        if len(hits) > 1 or (hits and hits[0].state != "partial"):
            found = target.of_model(index.find(places, ref))
            return found.name, open_checkpoint(found.path), []
        if not ref.repo and catalog.find(ref.short) is None:
            raise index.unknown(places, ref)
    from paddock_manager.fit import remote
    from paddock_manager.store.pull import Shop, Wish

    shop = Shop(places, paths.hub_settings())
    if ref.url:
        far = remote.of_url(shop, ref.url)
        return word, far.checkpoint, [f"only the header was read: {far.n_bytes} bytes in {far.n_requests} request(s)"]
    order = shop.resolve(ref, Wish())[0]
    ui.say(f"{word} is {order.ref}" + (f"@{order.commit[:12]}" if order.commit else ""))
    far = remote.of_order(shop, order)
    return (
        order.alias or order.ref,
        far.checkpoint,
        [f"only headers were read: {far.n_bytes} bytes in {far.n_requests} request(s)"],
    )


def human(out: Ui, reports: list[Report], values: Values) -> None:
    """The answer for people."""
    if values.flag("max_ctx") or values.flag("max_batch"):
        for r in reports:
            out.line(str(r.largest_ctx_tokens if values.flag("max_ctx") else r.largest_batch))
        return
    for number, r in enumerate(reports):
        if number:
            out.line()
        _one(out, r)


def _one(out: Ui, r: Report) -> None:
    device, plan = r.where.facts, r.plan
    out.line(
        f"{r.name} on {r.where.label}: {gib(device.free_bytes)} of {gib(device.memory_bytes)} GiB free{_holders(r.where)}"
    )
    rows = [(f"  {line.name}", _little(line.n_bytes), line.source) for line in plan.lines]
    rows.append(("  total", gib(plan.total_bytes), ""))
    if plan.peak_bytes > plan.total_bytes:
        rows.append(("  at most, while loading", gib(plan.peak_bytes), "planner"))
    out.table(("  WHAT FOR", "GiB", "SOURCE"), rows, right=(1,))
    word = {"fits": "FITS", "tight": "FITS, TIGHTLY", "shared": "FITS, SHARING", "no": "DOES NOT FIT"}[r.verdict]
    lack = f"{gib(r.headroom_bytes)} GiB left" if r.headroom_bytes >= 0 else f"{gib(-r.headroom_bytes)} GiB missing"
    out.line(f"{word}: context {plan.sizes.max_ctx_tokens} x {plan.sizes.n_slots}, KV in {plan.kv_format}; {lack}")
    out.line(
        f"largest context at batch {plan.sizes.n_slots}: {r.largest_ctx_tokens} (the model's is {r.model_ctx_tokens}); largest batch at this context: {r.largest_batch}"
    )
    if r.verdict == "shared":
        full = plan.sizes.max_ctx_tokens * plan.sizes.n_slots
        out.line(
            f"the requests share {plan.pool_tokens} tokens of context, not {full}: each may be full, all at once may not"
        )
    if plan.host_bytes:
        out.line(f"experts: {plan.sizes.n_expert_slots} of a layer stay on the device; all lie in host memory, which takes {gib(plan.host_bytes)} GiB of it")
    for note in r.notes:
        out.line(f"note: {note}")


def _little(n_bytes: int) -> str:
    """GiB; what rounds to nothing says that it is something."""
    return "<0.01" if 0 < n_bytes < 0.005 * 2**30 else gib(n_bytes)


def _holders(where: Where) -> str:
    """Who holds memory on the device."""
    if not where.holders:
        return ""
    return " (" + ", ".join(f"{h['name']} pid {h['pid']} holds {gib(h['used_bytes'])}" for h in where.holders[:4]) + ")"


def wont_fit(r: Report, values: Values | None = None) -> WontFit:
    """The refusal, with what to type instead: the same question with what has to change."""
    words = {"kv_format": "--kv", "max_batch": "--batch", "max_ctx_tokens": "--ctx", "expert_vram_gib": "--expert-vram-gib"}
    given = values.found if values else {}
    names = ("ctx", "batch", "kv", "device", "arch", "window_kv", "expert_vram_gib")
    asked = {f"--{k.replace('_', '-')}": str(given[k]) for k in names if k in given}
    if "vram" in given:
        gibs, rest = divmod(int(given["vram"]), 2**30)
        asked["--vram"] = str(given["vram"]) if rest else f"{gibs}GiB"
    commands = []
    for other in r.alternatives:
        changed = {**asked, **{words[k]: str(v) for k, v in other.items() if k in words}}
        if "kv_format" in other:  # of all layers
            changed.pop("--window-kv", None)
        commands.append(
            " ".join(
                [
                    "paddock fit",
                    str(other.get("ref", given.get("model", r.name))),
                    *(f"{k} {v}" for k, v in changed.items()),
                ]
            )
        )
    hint = "no context fits: take a smaller quantization or a larger device"
    if commands:
        hint = "these fit:\n" + "\n".join(f"    {c}" for c in commands)
    facts: dict[str, Any] = {
        "need_bytes": r.plan.peak_bytes,
        "free_bytes": r.where.facts.free_bytes,
        "alternatives": r.alternatives,
    }
    needs = f"{gib(r.plan.peak_bytes)} GiB, {gib(r.where.facts.free_bytes)} are free"
    if r.plan.peak_bytes <= r.where.facts.free_bytes:
        needs = f"{gib(r.plan.host_bytes)} GiB of host memory for its experts, {gib(r.where.host_free_bytes)} are free"
    return WontFit(f"{r.name} needs {needs}", hint, **facts)


def smaller(word: str, r: Report) -> list[dict[str, Any]]:
    """Other quants of the same repository that fit, the largest first: their files take the place of the weights in the plan.

    Nothing when the model is not from a repository, or the hub does not answer.
    """
    from paddock_runner.errors import HubError

    from paddock_manager.store import choose, hub
    from paddock_manager.store.pull import Shop

    ref = names.parse(word)
    if not ref.repo or r.plan.group_bytes("weights") == 0:
        return []
    shop = Shop(paths.places(), paths.hub_settings())
    try:
        with shop.web() as web:
            files = hub.listing(web, ref.repo, ref.rev, tries=1).files
    except HubError:
        return []
    rest = r.plan.peak_bytes - r.plan.group_bytes("weights")
    sizes = {q: sum(n for _, n in g) for q, g in choose.gguf_variants([(f.name, f.size_bytes) for f in files]).items()}
    fitting = [q for q in sorted(sizes, key=lambda q: -sizes[q]) if sizes[q] + rest <= r.where.facts.free_bytes]
    rows = [{"change": "quant", "ref": f"{ref.repo}:{q}", "need_bytes": sizes[q] + rest} for q in fitting[:3]]
    return rows if r.plan.group_bytes("weights") > min(sizes.values(), default=0) else []


def verdict(name: str, checkpoint: Checkpoint) -> str:
    """One line for pull: does it fit here, as `paddock fit` would say without options; or why that cannot be said."""
    try:
        report = min(
            (fit.report(name, checkpoint, w, fit.Wish()) for w in fit.find_where("auto", None, "", None)), key=_rank
        )
    except UnsupportedError as error:
        return f"Paddock cannot run it: {error.message}"
    except PaddockError as error:
        return f"cannot say whether it fits: {error.message}"
    word = {"fits": "fits", "tight": "fits tightly", "shared": "fits, sharing context,", "no": "does not fit"}[
        report.verdict
    ]
    free = report.where.facts.free_bytes
    asked = f"context {report.plan.sizes.max_ctx_tokens} x {report.plan.sizes.n_slots}"
    more = f"; the largest context that fits is {report.largest_ctx_tokens}" if report.verdict == "no" else ""
    return (
        f"{word} here: {gib(report.plan.peak_bytes)} of {gib(free)} GiB free on {report.where.label}, at {asked}{more}"
    )


def _rank(report: Report) -> int:
    return ("fits", "tight", "shared", "no").index(report.verdict)
