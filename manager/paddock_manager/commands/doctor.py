"""paddock doctor: is this machine ready; each problem with what to do about it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from paddock_runner.errors import PaddockError

from paddock_manager import disk, paths, settings
from paddock_manager.fit import calibrate, gpus, history, packs
from paddock_manager.fit.calibrate import Finding
from paddock_manager.fleet import keys, spawn, state
from paddock_manager.options import Command, Option, Values
from paddock_manager.store import index
from paddock_manager.ui import Ui, size

if TYPE_CHECKING:
    from paddock_manager.store.web import Web

COMMAND = Command(
    "doctor",
    "Check this machine: disk, models, kernel packs, devices, ports; each problem with its fix.",
    (),
    (
        Option("--net", "also test the hub: every host that a pull contacts"),
        Option("--gpu", "also measure the GPUs: plans and `paddock fit` use what is found"),
    ),
    "Exit code 1 when something is wrong; warnings do not count.",
)
LOW_DISK_BYTES = 4 << 30


def run(values: Values, ui: Ui) -> int:
    """Run the checks."""
    places = paths.places()
    found = [
        *_python(),
        *_told("disk", _disk(places)),
        *_told("models", _models(places)),
        *_devices(),
        *_packs(),
        *_told("plans", _plans(places)),
        *_told("settings", _settings(places)),
        *_told("servers", _servers(places)),
        *_told("key", _key(places)),
    ]
    if values.flag("gpu"):
        found += calibrate.outcomes(places, spawn.RUNNER)
    if values.flag("net"):
        found += _hub()
    worst = "wrong" if any(f.state == "wrong" for f in found) else "ok"

    def human(out: Ui) -> None:
        for f in found:
            out.line(f"{f.state:<5}  {f.check}: {f.says}")
            if f.fix:
                out.line(f"       fix: {f.fix}")

    ui.result("doctor", {"state": worst, "findings": [asdict(f) for f in found]}, human)
    return 1 if worst == "wrong" else 0


def _told(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """What a check finds; what is closed to it is a finding, too."""
    try:
        yield from findings
    except OSError as error:
        path = "" if error.filename is None else os.fsdecode(error.filename)
        yield Finding(check, "wrong", f"{path}: {error.strerror}", f"chown or chmod {path}, or set PADDOCK_HOME to a folder of yours")


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if good else "wrong", version, "" if good else "install Python 3.11 or newer")


def _disk(places: paths.Places) -> Iterator[Finding]:
    """Our home, where pulls go, and the further folders of models, which may be away or read only."""
    yield _folder("disk", places.home, "set PADDOCK_HOME to a folder of yours", "set PADDOCK_HOME to a larger disk")
    for number, root in enumerate(places.more_roots, 1):
        name = f"disk {number}"
        if not root.is_dir():
            yield Finding(name, "warn", f"{root} is away: its models are offline", f"mount its disk, or take it out of store.roots ({places.config_file})")
        elif not os.access(root, os.R_OK | os.X_OK):
            yield Finding(name, "wrong", f"{root} cannot be read", f"chown or chmod {root}, or take it out of store.roots")
        elif not os.access(root, os.W_OK):
            yield Finding(name, "ok", f"{root}, {disk.file_system(root)}, read only: its models can be used")
        else:
            yield _folder(name, root, "take it out of store.roots", "free some space")


def _folder(name: str, folder: Path, elsewhere: str, larger: str) -> Finding:
    """Can it be written, on what file system does it lie, and is there room."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, "wrong", f"{there} cannot be written", f"chown or chmod {there}, or {elsewhere}")
    free = shutil.disk_usage(there).free
    low = free < LOW_DISK_BYTES
    return Finding(name, "warn" if low else "ok", f"{folder}, {disk.file_system(there)}, {size(free)} free", f"free some space, or {larger}" if low else "")


def _models(places: paths.Places) -> Iterator[Finding]:
    problems: list[PaddockError] = []
    found = index.models(places, problems)
    for problem in problems:
        yield Finding("models", "wrong", problem.message, problem.hint)
    for model in found:
        if model.state in ("missing", "changed"):
            yield Finding("models", "wrong", f"{model.name} is {model.state}", f"paddock verify {model.name} --repair")
        elif model.state in ("partial", "offline"):
            fix = f"paddock pull {model.name}" if model.state == "partial" else f"mount the disk of {model.folder}"
            yield Finding("models", "warn", f"{model.name} is {model.state}", fix)
    yield Finding("models", "ok", f"{len(found)} here")


def _devices() -> Iterator[Finding]:
    machine = gpus.host()
    yield Finding(
        "cpu",
        "ok",
        f"{machine.name or 'CPU'}, {machine.n_threads} threads, {size(machine.free_bytes)} of {size(machine.memory_bytes)} memory free",
    )
    found, why = gpus.gpus()
    if not found:
        driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
        fix = "in a container, pass the GPUs through (--gpus all); else reinstall the driver" if driver else ""
        yield Finding("gpu", "wrong" if driver else "ok", f"none: {why}", fix)
    for gpu in found:
        held = ", ".join(f"{h.name} pid {h.pid} holds {size(h.used_bytes)}" for h in gpu.holders)
        says = f"{gpu.name} {gpu.uuid} {gpu.arch}, driver {gpu.driver}, {size(gpu.free_bytes)} of {size(gpu.memory_bytes)} free"
        wrong, fix = packs.trouble(gpu, packs.packs())
        says += (f" ({held})" if held else "") + (f": {wrong}" if wrong else "")
        yield Finding(f"gpu {gpu.index}", "wrong" if wrong else "ok", says, fix)


def _plans(places: paths.Places) -> Iterator[Finding]:
    """Did runners take more than was planned?"""
    found = [r for r in history.runs(places) if r.measured_bytes]
    over = [r for r in found if r.is_over]
    if over:
        worst = max(over, key=lambda r: r.measured_bytes / r.planned_bytes)
        says = f"{len(over)} of {len(found)} runs took more than planned, {worst.model} {size(worst.measured_bytes - worst.planned_bytes)} more"
        yield Finding("plans", "warn", says, "paddock fit --history; leave that much free, and report it")
    elif found:
        most = max(r.measured_bytes / r.planned_bytes for r in found)
        yield Finding("plans", "ok", f"{len(found)} runs were measured, none over its plan, at most {most:.1%} of it")


def _packs() -> Iterator[Finding]:
    found = packs.packs()
    for pack in found:
        if pack.fault:
            yield Finding("packs", "wrong", pack.fault, pack.fix)
        else:
            says = f"{pack.name} ({pack.doubt})" if pack.doubt else pack.name
            yield Finding("packs", "warn" if pack.doubt else "ok", says)
    if not found:
        yield Finding(
            "packs",
            "wrong",
            "no kernel pack is installed",
            "pip install paddock builds the CPU pack; it needs a C++20 compiler",
        )


def _settings(places: paths.Places) -> Iterator[Finding]:
    try:
        settings.load(places.config_file)
    except PaddockError as error:
        yield Finding("settings", "wrong", error.message, error.hint or f"change it in {places.config_file}, or remove it there")


def _servers(places: paths.Places) -> Iterator[Finding]:
    running = state.servers(places)
    yield Finding("servers", "ok", ", ".join(f"{s.name} at {s.url}" for s in running) or "none running")
    try:
        port = settings.value(places.config_file, "serve.port", None)
    except PaddockError:
        return  # that is found by itself
    if not port or any(s.port == port for s in running):
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            yield Finding(
                "port", "warn", f"port {port} is taken by another program", "paddock serve MODEL --port 0"
            )
            return
    yield Finding("port", "ok", f"{port} is free")


def _key(places: paths.Places) -> Iterator[Finding]:
    if not places.key_file.exists():
        yield Finding("key", "ok", "is made at first use")
        return
    try:
        keys.key(places)
        yield Finding("key", "ok", "only you can read it")
    except PaddockError as error:
        yield Finding("key", "wrong", error.message, error.hint)


def _hub() -> list[Finding]:
    from paddock_manager.store import hub
    from paddock_manager.store.web import Timing, Web

    told = paths.hub_settings()
    if told.offline:
        return [Finding("hub", "warn", "HF_HUB_OFFLINE is set: nothing is asked", "unset it")]
    with Web(told.endpoint, told.token, Timing(5.0, 10.0)) as web:
        trouble = hub.reachable(web)
        data = [] if trouble else _data_hosts(web)
    token = "with a token" if told.token else "without a token"
    if trouble is None:
        return [Finding("hub", "ok", f"{told.endpoint} answers ({token})"), *data]
    return [
        Finding(
            "hub",
            "wrong",
            f"{told.endpoint}: {trouble.message}",
            "check proxy variables and certificates, or set HF_ENDPOINT to a mirror",
        )
    ]


def _data_hosts(web: Web) -> list[Finding]:
    """The hosts that the bytes of a small model of the catalog come from: often not the hub's own."""
    from paddock_manager.catalog import catalog
    from paddock_manager.store import hub

    source = catalog.entries()["smollm2-135m"].sources[0]
    trouble = hub.data_host(web, source.repo, source.rev, source.file)
    others = ", ".join(sorted(web.hosts - {urlsplit(web.endpoint).netloc})) or "the hub itself"
    if trouble is None:
        return [Finding("data", "ok", f"bytes come from {others}, which answers")]
    return [
        Finding(
            "data",
            "wrong",
            trouble.message,
            f"let {others} through the proxy or firewall, or set HF_ENDPOINT to a mirror",
        )
    ]
