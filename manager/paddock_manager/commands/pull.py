"""paddock pull: what will be fetched is printed first, then fetched, verified and recorded."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddock_runner.errors import Cancelled, HubError, PaddockError, UsageError

from paddock_manager import paths, settings
from paddock_manager.catalog import catalog, names
from paddock_manager.options import Argument, Command, Option, Values, usage
from paddock_manager.store import index, lock
from paddock_manager.store import pull as store
from paddock_manager.store.download import Limits
from paddock_manager.store.record import Model
from paddock_manager.ui import Ui, count, size

WORTH_A_VERDICT_BYTES = 1 << 30
"""Smaller models fit nearly everywhere, and are here sooner than their header could be read on its own."""

COMMAND = Command(
    "pull",
    "Download a model, verify every byte, and keep it under its own name.",
    (Argument("ref", "org/repo[@revision][:quant], a short name of the catalog, or an address of the hub", required=False, kind="catalog"),),
    (
        Option("--quant", "which variant of a GGUF repository", "text", value="NAME"),
        Option("--rev", "branch, tag or commit", "text", also=("--revision",)),
        Option("--file", "one GGUF file of the repository, by name", "text", value="NAME"),
        Option("--lock", f"write what the names stand for, with all hashes, to ./{lock.NAME}"),
        Option("--locked", f"fetch exactly what ./{lock.NAME} says, without names: all of it"),
        Option(
            "--root", "the store root to keep it in (see `paddock config explain store.roots`)", "path", value="FOLDER"
        ),
        Option("--require-fit", "refuse (exit code 9) a model that does not fit on this machine"),
        Option("--dry-run", "say what would be fetched, and fetch nothing"),
        Option("--connections", "parallel connections (default 8)", "int", value="N"),
        Option("--limit-rate", "at most so many bytes a second, as 20M", "size", value="RATE"),
        Option("--reserve", "disk space to leave free (default 2 GiB or 2 %)", "size", value="SIZE"),
        Option("--progress", "how to show progress", "text", value="KIND", choices=("auto", "bar", "ndjson", "none")),
    ),
    "An interrupted pull continues where it stopped. Two quants of one repository can be here side by side.",
    ("paddock pull smollm2-135m", "paddock pull Qwen/Qwen3-8B-GGUF:Q4_K_M", "paddock pull Qwen/Qwen3-0.6B --dry-run"),
)


def run(values: Values, ui: Ui) -> int:
    """Resolve, print, fetch."""
    ui.progress_kind = values.text("progress", "auto")
    shop = store.Shop(paths.places(), paths.hub_settings(), limits_of(values))
    shop.reserve_bytes = values.integer("reserve")
    shop.root = root_of(shop.places, values.text("root"))
    wish = store.Wish(values.text("quant"), values.text("rev"), values.text("file"))
    if values.flag("locked"):
        return locked(shop, values, ui)
    text = values.text("ref")
    if not text:
        raise UsageError("`paddock pull` needs REF", usage(COMMAND))
    orders = shop.resolve(names.parse(text), wish)
    if values.flag("require_fit"):
        require_fit(shop, orders[0])
    if values.flag("lock"):
        lock.remember(Path(lock.NAME), text, orders[0])
    if values.flag("dry_run"):
        say_order(ui, shop, orders[0])
        ui.say(verdict(shop, orders[0]))
        ui.result("pull", {"dry_run": True, **facts(shop, orders[0])}, lambda _: None)
        return 0
    model = obtain(shop, orders, ui)
    ui.result(
        "pull", {"dry_run": False, "model": model.facts()}, lambda u: u.line(f"{model.name} is here: {model.path}")
    )
    return 0


def locked(shop: store.Shop, values: Values, ui: Ui) -> int:
    """Fetch what the lock file says, whatever the hub says today."""
    path = Path(lock.NAME)
    found = lock.orders(path, values.text("ref"), shop.settings.endpoint)
    if values.flag("dry_run"):
        for _, order in found:
            say_order(ui, shop, order)
        ui.result("pull", {"dry_run": True, "lock": str(path), "models": [], "orders": [facts(shop, order) for _, order in found]}, lambda _: None)
        return 0
    models = [obtain(shop, [order], ui) for _, order in found]

    def human(out: Ui) -> None:
        for model in models:
            out.line(f"{model.name} is here: {model.path}")

    ui.result("pull", {"dry_run": False, "lock": str(path), "models": [m.facts() for m in models]}, human)
    return 0


def root_of(places: paths.Places, word: str) -> Path | None:
    """The root that was named. Raises: UsageError when it is none of the store's, or away."""
    if not word:
        return None
    root = paths.expanded(word).absolute()
    if root not in places.roots:
        known = os.pathsep.join(map(str, [*places.more_roots, root]))
        raise UsageError(f"{root} is no root of the store", f"`paddock config set store.roots {known}` makes it one")
    if root != places.models and not root.is_dir():
        raise UsageError(f"{root} is not there", "is its disk mounted?", path=str(root))
    return root


def limits_of(values: Values) -> Limits:
    """Connections and rate from the command line."""
    file = paths.places().config_file
    connections = settings.value(file, "pull.connections", values.integer("connections"))
    rate = settings.value(file, "pull.limit_rate", values.integer("limit_rate"))
    if not 1 <= connections <= 32:
        raise UsageError(f"--connections is from 1 to 32, not {connections}")
    return Limits(connections=connections, rate_bytes_per_s=float(rate))


def obtain(shop: store.Shop, orders: list[store.Order], ui: Ui) -> Model:
    """Fetch by the first way that works, and say which one it was.

    Raises: the first way's error when none works.
    """
    trouble: PaddockError | None = None
    for order in orders:
        say_order(ui, shop, order)
        missing = shop.missing(order)
        if order.size_bytes >= WORTH_A_VERDICT_BYTES and missing:
            ui.say(verdict(shop, order))
        try:
            with ui.progress(order.alias or order.ref, order.size_bytes) as bar:
                model = shop.execute(order, bar.move_by) if missing else _as_it_is(shop, order, bar.move_by)
        except KeyboardInterrupt:
            raise Cancelled("the pull was stopped", f"`paddock pull {order.alias or order.ref}` continues it") from None
        except HubError as error:
            trouble = trouble or error
            if order is not orders[-1]:
                ui.say(f"{order.source.shown} cannot be had: {error.message}")
            continue
        if missing:
            ui.say(f"verified {size(sum(f.size_bytes for f in missing))} from {order.shown_source}")
        else:
            ui.say(f"nothing was fetched; `paddock verify {model.name}` reads every byte again")
        from paddock_manager.fit import fit

        trouble_ahead = fit.refusal(model.path)
        if trouble_ahead:
            ui.warn(f"Paddock cannot run it: {trouble_ahead}")
        return model
    raise trouble or HubError("no source")


def _as_it_is(shop: store.Shop, order: store.Order, moved: Callable[[int], None]) -> Model:
    """A model of which all is here: recorded anew, or where the store is closed to us as it is recorded."""
    try:
        return shop.execute(order, moved)
    except OSError as error:
        here = [m for m in index.in_folder(shop.places, shop.folder(order)) if m.quant == order.quant and m.state == "ok"]
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not here:
            raise
        return here[0]


def verdict(shop: store.Shop, order: store.Order) -> str:
    """Does it fit here: from its header, before its weights are fetched. One line; never stops a pull."""
    from paddock_manager.commands import fit
    from paddock_manager.fit import remote

    try:
        checkpoint = remote.of_order(shop, order).checkpoint
        n_params = sum(view.n_elements for view in checkpoint.tensors.values())
        return f"{count(n_params)} parameters; {fit.verdict(order.alias or order.ref, checkpoint)}"
    except PaddockError as error:
        return f"cannot say whether it fits: {error.message}"


def require_fit(shop: store.Shop, order: store.Order) -> None:
    """Raises: WontFit, with the numbers; what keeps the header from being read."""
    from paddock_manager.commands import fit as command
    from paddock_manager.fit import fit, remote

    checkpoint = remote.of_order(shop, order).checkpoint
    reports = [
        fit.report(order.alias or order.ref, checkpoint, w, fit.Wish()) for w in fit.find_where("auto", None, "", None)
    ]
    if all(r.verdict == "no" for r in reports):
        raise command.wont_fit(reports[0])


def say_order(ui: Ui, shop: store.Shop, order: store.Order) -> None:
    """What was resolved, before bytes move."""
    for note in order.notes:
        ui.say(note)
    missing = shop.missing(order)
    need = sum(f.size_bytes for f in missing)
    pinned = f"@{order.commit[:12]}" if order.commit else ""
    licence = f", licence {order.licence}" if order.licence else ""
    entry = catalog.find(order.alias) if order.alias else None
    params = f"{entry.params} parameters, " if entry else ""
    bulk = f"{params}{size(order.size_bytes)} in {len(order.files)} file(s){licence}"
    ui.say(f"{order.alias or order.ref} is {order.ref}{pinned}, {bulk}")
    for what, why in order.skipped[:6]:
        ui.say(f"  left out {what}: {why}")
    if len(order.skipped) > 6:
        ui.say(f"  left out {len(order.skipped) - 6} more files for the same reasons")
    lack = "" if need == order.size_bytes else f": {size(need)} of it is missing here" if need else ": all of it is here"
    ui.say(f"from {order.shown_source}{lack}")


def facts(shop: store.Shop, order: store.Order) -> dict[str, Any]:
    """An order for --json."""
    missing = {f.name for f in shop.missing(order)}
    files = [
        {"name": f.name, "size_bytes": f.size_bytes, "sha256": f.sha256, "missing": f.name in missing}
        for f in order.files
    ]
    return {
        "ref": order.ref,
        "commit": order.commit,
        "quant": order.quant,
        "source": order.shown_source,
        "licence": order.licence,
        "size_bytes": order.size_bytes,
        "need_bytes": sum(f.size_bytes for f in order.files if f.name in missing),
        "files": files,
        "skipped": [{"name": n, "why": w} for n, w in order.skipped],
        "notes": order.notes,
    }
