"""Several models behind one port: what each needs, what there is for all of them, and the gateway that is started."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paddock_runner.errors import UsageError, WontFit
from paddock_runner.files.checkpoint import Checkpoint, open_checkpoint

from paddock_manager import paths
from paddock_manager.commands import target
from paddock_manager.commands.target import Target
from paddock_manager.disk import write_json
from paddock_manager.fit import fit
from paddock_manager.fleet import spawn
from paddock_manager.fleet.spawn import Launch
from paddock_manager.options import Values
from paddock_manager.paths import Places
from paddock_manager.store import headline
from paddock_manager.ui import gib
from paddock_manager.web.pool import Plan

DEFAULT_CTX_TOKENS = 8192
DEFAULT_BATCH = 4
DEFAULT_IDLE_S = 600.0


@dataclass(frozen=True, slots=True)
class Ask:
    """Where the gateway listens, and who may call."""

    name: str
    host: str
    port: int
    key_file: Path | None
    start_s: float
    tls: tuple[str, ...] = ()
    is_watched: bool = True


def gateway(places: Places, found: list[Target], ask: Ask, values: Values) -> Launch:
    """The gateway for these models, ready to be started.

    Raises: WontFit when one of them needs more than the budget; UsageError for two of one name.
    """
    names = [f.name for f in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two models are called {name}", "`paddock add PATH --name` gives another name")
    given = {**_told(), **target.asked(values)}
    where = fit.find_where(given.get("gpu") or given.get("device", "auto"), None, "", values.integer("threads"))[0]
    budget = values.integer("budget") or where.facts.free_bytes
    models = [_model(f, given, where, budget, ask.name) for f in found]
    idle = values.number("idle")
    doors = _doors(given)
    plan = Plan(
        ask.host,
        str(ask.key_file) if ask.key_file else "",
        budget,
        DEFAULT_IDLE_S if idle is None else idle,
        ask.start_s,
        list(spawn.RUNNER),
        models,
        list(ask.tls),
        **doors,
    )
    path = places.fleet / f"{spawn.log_path(places, ask.name).stem}.plan.json"
    write_json(path, asdict(plan), 0o600)
    command = (sys.executable, "-m", "paddock_manager.web", str(path))
    asked = {"models": names, "budget_bytes": budget, "contexts": {m["name"]: m.get("max_ctx_tokens", 0) for m in models}}
    return Launch(
        ask.name,
        "",
        Path(),
        host=ask.host,
        port=ask.port,
        key_file=ask.key_file,
        asked=asked,
        command=command,
        is_watched=ask.is_watched,
        tls=ask.tls,
    )


def _told() -> dict[str, str]:
    """What variables of the runner say that a plan or the gateway's own port must know, as target.asked has it. Raises: UsageError."""
    fields = {"PADDOCK_MAX_CTX_TOKENS": "ctx", "PADDOCK_MAX_BATCH": "batch", "PADDOCK_KV_FORMAT": "kv", "PADDOCK_WINDOW_KV_FORMAT": "window_kv", "PADDOCK_DEVICE": "device", "PADDOCK_GPU": "gpu"}
    lists = {"PADDOCK_ALLOW_HOST": "--allow-host", "PADDOCK_ALLOW_ORIGIN": "--allow-origin"}
    others = {"PADDOCK_MAX_BODY_MIB": "--max-body-mib", "PADDOCK_KEEP_ALIVE_S": "--keep-alive-s"}
    told = paths.own_variables()
    for name in ("PADDOCK_MAX_CTX_TOKENS", "PADDOCK_MAX_BATCH"):
        if not told.get(name, "1").isdecimal() or told.get(name) == "0":
            raise UsageError(f"{name}: {told[name]!r} is not a whole number from 1 on", variable=name)
    return {key: told[name] for name, key in {**fields, **lists, **others}.items() if name in told}


def _doors(given: dict[str, str]) -> dict[str, Any]:
    """The runner's flags that hold for the gateway's own port, too. Raises: UsageError."""

    def number(flag: str, otherwise: float, least: float) -> float:
        try:
            found = float(given.get(flag, otherwise))
        except ValueError:
            raise UsageError(f"--runner {flag[2:]}={given[flag]}: {given[flag]!r} is not a number", option="--runner") from None
        if not least <= found < 1 << 20:
            raise UsageError(f"--runner {flag[2:]}={given[flag]}: that is from {least:g} to {1 << 20}", option="--runner")
        return found

    hosts, origins = (
        [name for line in given.get(flag, "").split("\n") for part in line.split(",") if (name := part.strip())] for flag in ("--allow-host", "--allow-origin")
    )
    return {
        "hosts": hosts, "origins": origins,
        "max_body_bytes": int(number("--max-body-mib", 32, 0.001) * (1 << 20)), "keep_alive_s": number("--keep-alive-s", 75, 1),
    }  # fmt: skip


def _model(found: Target, given: dict[str, str], where: fit.Where, budget_bytes: int, by: str) -> dict[str, Any]:
    """One model's launch and what its plan needs. The context and batch that are planned are those it is started with."""
    wish = fit.Wish(_number(given, "ctx"), _number(given, "batch"), given.get("kv"), DEFAULT_CTX_TOKENS, DEFAULT_BATCH, window_kv_format=given.get("window_kv"))
    checkpoint = open_checkpoint(found.path)
    report = fit.report(found.name, checkpoint, where, wish)
    sizes, need = report.plan.sizes, report.plan.peak_bytes
    if need > budget_bytes:
        raise WontFit(
            f"{found.name} needs {gib(need)} GiB for {sizes.n_slots} contexts of {sizes.max_ctx_tokens} tokens, the budget is {gib(budget_bytes)} GiB",
            "raise --budget, or lower --ctx or --batch",
            need_bytes=need,
            free_bytes=budget_bytes,
            alternatives=report.alternatives,
        )
    flags = {"ctx": str(min(sizes.max_ctx_tokens, report.model_ctx_tokens)), "batch": str(sizes.n_slots), **given}
    return {
        "name": found.name,
        "ref": found.ref,
        "path": str(found.path),
        "flags": list(target.runner_flags(flags, found)),
        "asked": {**given, "by": by},
        "need_bytes": need,
        "max_ctx_tokens": int(flags["ctx"]),
        "facts": _facts(found, checkpoint),
    }


def _facts(found: Target, checkpoint: Checkpoint) -> dict[str, Any]:
    """What lists of models say of it, by the names that its runner uses."""
    told = headline.of(checkpoint)
    kept = {name: told[name] for name in ("family", "task", "format")}
    quant = (found.model.quant if found.model else "") or told["format"] or ""
    return {**kept, "quant": quant, "parameters": told["n_params"], "files": checkpoint.kind}


def _number(given: dict[str, str], key: str) -> int | None:
    return int(given[key]) if key in given else None
