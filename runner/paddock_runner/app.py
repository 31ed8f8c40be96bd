"""The composition root: opens the model, plans, starts the engine's process and the front, joins them by rings, obeys signals."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from . import hardware, log
from .blueprint.blueprint import Blueprint
from .blueprint.names import tensors_by_name
from .blueprint.read import read_blueprint
from .config import Config
from .engine.order import Order, send, spawn
from .errors import PackError, PaddockError, UnknownModel, UsageError
from .files.checkpoint import Checkpoint, open_checkpoint
from .files.view import TensorView
from .front import auth
from .front.server import Server, bind, check_tls
from .front.service import Front
from .manifest import verify, wheel_name
from .memory import calibration
from .memory.calibration import Calibration, applied
from .memory.plan import DeviceFacts, MemoryPlan, PlanRequest, cpu_facts, cuda_facts, with_pages
from .memory.solve import Solver, require_fit, solver
from .pack.library import find_pack
from .text.answer import AnswerFormat
from .text.load import load_tokenizer
from .text.template import load_template
from .text.vectors import VectorForm
from .turns.desk import Desk
from .turns.served import Served
from .wire.channel import Channel
from .wire.port import FrontPort

KILL_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the model will run: the pack's file, the device's facts, its name for people, why it was chosen, what speaks against it."""

    pack: Path
    facts: DeviceFacts
    label: str
    why: str = ""
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that was opened and planned: what `plan`, `explain` and `serve` share."""

    checkpoint: Checkpoint
    blueprint: Blueprint
    views: dict[str, TensorView]
    plan: MemoryPlan
    place: Place


def choose_place(config: Config) -> Place:
    """The device and its pack, as --device and --kernel-pack say. Raises: PackError with a hint."""
    told = config.kernel_pack
    kind = config.device
    if told is not None and not told.exists():
        raise PackError(f"kernel pack {told} does not exist", "check --kernel-pack")
    if kind == "auto":
        kind = (
            ("cuda" if "cuda" in told.name else "cpu") if told is not None else "cuda" if hardware.has_gpu() else "cpu"
        )
    limit = int(config.memory_gib * (1 << 30))
    if kind == "cuda":
        gpu = hardware.gpu(config.gpu)
        if hardware.is_old(gpu.driver):
            needs = f"kernel packs need {hardware.OLDEST_DRIVER} or newer"
            raise PackError(
                f"the NVIDIA driver {gpu.driver} is too old: {needs}",
                "update the driver; --device cpu serves on the CPU",
            )
        free = min(gpu.memory.free_bytes, limit) if limit else gpu.memory.free_bytes
        facts = cuda_facts(gpu.n_processors, gpu.memory.total_bytes, free, gpu.name)
        facts = applied(facts, calibration.read(config.home_folder, gpu.name, gpu.driver))
        pack = told or _cuda_pack(gpu)
        manifest = verify(pack)
        return Place(
            pack, facts, f"{gpu.name} (GPU {gpu.index}), {pack.name}", doubt=manifest.doubt if manifest else ""
        )
    memory = hardware.memory()
    free = min(memory.free_bytes, limit) if limit else memory.free_bytes
    threads = config.threads or hardware.n_threads()
    why = "" if config.device == "cpu" or told is not None else "no NVIDIA GPU here: "
    return Place(told or find_pack("cpu"), cpu_facts(threads, memory.total_bytes, free), f"CPU, {threads} threads", why)


def _cuda_pack(gpu: hardware.Gpu) -> Path:
    names = hardware.pack_names(gpu.capability)
    for name in names:
        try:
            return find_pack(name)
        except PackError:
            continue
    said = "sm_{}{}".format(*gpu.capability)
    made = hardware.pack_arch(gpu.capability)
    if not made:
        raise PackError(
            f"there is no kernel pack for {gpu.name} ({said}): they begin at sm_80",
            "--device cpu serves on the CPU",
            tried=names,
        )
    raise PackError(
        f"no kernel pack for {gpu.name} ({said}) is installed",
        f"pip install {wheel_name(made)}; --device cpu serves on the CPU",
        tried=names,
    )


def open_model(config: Config, path: Path) -> Opened:
    """Opens a model's header and plans it. Raises: UnknownModel, FileError, UnsupportedError, UsageError, WontFit, PackError."""
    if not path.exists():
        raise UnknownModel(f"{path}: there is no such file or folder", "check --model", name=str(path))
    place = choose_place(config)
    checkpoint = open_checkpoint(path)
    blueprint = read_blueprint(checkpoint, config.task)
    views = tensors_by_name(checkpoint, blueprint)
    ctx = config.max_ctx_tokens
    if config.is_default("max_ctx_tokens"):
        ctx = min(ctx, blueprint.max_ctx_tokens)
    kv_format = "" if config.kv_format == "auto" else config.kv_format
    request = PlanRequest(ctx, config.max_batch, place.facts, kv_format, config.max_step_tokens, state_cache_bytes=_state_cache(config))
    answer = solver(blueprint, views, place.facts.free_bytes, place.facts.kind)
    return Opened(checkpoint, blueprint, views, _plan(answer, request), place)


def calibrate(config: Config) -> Calibration:
    """Measures the GPU that the config names and keeps what was found for this machine's plans. Raises: PackError, UsageError."""
    from .engine.calibrate import measure

    place = choose_place(config)
    if place.facts.kind != "cuda":
        raise UsageError(f"only a GPU is measured, this is {place.label}", "--device cuda --gpu N chooses one")
    gpu = hardware.gpu(config.gpu)

    def used() -> int:
        memory = hardware.gpu(config.gpu).memory
        return memory.total_bytes - memory.free_bytes

    x = measure(place.pack, place.facts, used, config.gpu)
    found = Calibration(
        gpu.name, gpu.driver, x.process_bytes, round(x.memory_bytes_per_s), round(x.host_bytes_per_s), x.pack, round(time.time())
    )
    if not found.is_sane:
        raise PackError(
            f"{gpu.name}: a process without a model seems to take {found.process_bytes} bytes, which cannot be",
            "does another program take or free memory of the GPU just now? measure again",
        )
    calibration.write(config.home_folder, found)
    return found


def _state_cache(config: Config) -> int | None:
    return None if config.state_cache_gib < 0 else int(config.state_cache_gib * (1 << 30))


def _plan(answer: Solver, request: PlanRequest) -> MemoryPlan:
    """The plan with full contexts for every slot; else with the largest page pool that fits, at least one context."""
    if not answer.fits(request):
        pages = answer.most_pages(request)
        if pages:
            return require_fit(answer, with_pages(request, pages))
    return require_fit(answer, request)


def serve(config: Config) -> int:
    """Serves a model until told to stop; returns the exit code. Raises: PaddockError before it is ready."""
    log.start(config.log_level)
    path = config.model_path
    if not path.exists():
        raise UnknownModel(f"{path}: there is no such file or folder", "check --model", name=str(path))
    auth.check_exposure(config.host, config.auth)
    if config.state_file is not None and not config.state_file.absolute().parent.is_dir():
        raise UsageError(f"--state-file: there is no folder {config.state_file.absolute().parent}")
    tls = check_tls(config.tls_cert, config.tls_key)
    _allow_many_files()
    keys, is_new = _keys(config)
    listener = bind(config.host, config.port)
    channel = Channel.create()
    process = spawn(channel)
    try:
        opened = open_model(config, path)
        print(f"paddock-runner: {opened.place.why}{opened.place.label}", flush=True)
        if opened.place.doubt:
            log.warning("pack", file=opened.place.pack.name, text=opened.place.doubt)
        if is_new:
            print(f"paddock-runner: a new API key was written to {config.key_file}", flush=True)
        for note in opened.blueprint.notes:
            log.warning("note", text=note)
        send(process, _order(config, opened, channel))
        return _run(config, opened, listener, Door(keys, tls), Desk(FrontPort(channel)), process)
    finally:
        listener.close()
        end(process)


def _allow_many_files() -> None:
    """As many open connections as the system lets us have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True, slots=True)
class Door:
    """Who is let in, and the certificate and key of https."""

    keys: tuple[auth.Key, ...]
    tls: tuple[str, str] | None


def _keys(config: Config) -> tuple[tuple[auth.Key, ...], bool]:
    if not config.auth:
        return (), False
    if config.api_key_file is not None:
        return auth.read_keys(config.api_key_file), False
    return auth.made_keys(config.key_file)


def _order(config: Config, opened: Opened, channel: Channel) -> Order:
    return Order(
        str(config.model_path.absolute()), str(opened.place.pack), channel.text, opened.plan.sizes, opened.plan.kv_format,
        config.gpu, config.threads, config.max_queue, config.log_level, os.getpid(), config.task,
        int(config.host_cache_gib * (1 << 30)), int(config.disk_cache_gib * (1 << 30)), str(config.page_folder),
    )  # fmt: skip


def _run(
    config: Config, opened: Opened, listener: socket.socket, door: Door, desk: Desk, process: subprocess.Popen[bytes]
) -> int:
    tokenizer = load_tokenizer(opened.checkpoint, opened.blueprint.n_vocab)
    template, sizes = load_template(opened.checkpoint, tokenizer), opened.plan.sizes
    served = Served(
        config.model_name, tokenizer, template, AnswerFormat(template.source, tokenizer), _max_tokens(opened),
        opened.blueprint.n_vocab, sizes.max_top, sizes.max_bias, config.steady_prompts, facts=_facts(opened),
        vectors=_vector_form(opened.blueprint),
    )  # fmt: skip
    served.walker.warm()
    runner = Runner(config, opened, served, desk, process)
    factory = _loop_factory()
    with asyncio.Runner(loop_factory=factory) as loop:
        return loop.run(runner.run(listener, door))


def _loop_factory() -> Any:
    import uvloop

    return uvloop.new_event_loop


def _max_tokens(opened: Opened) -> int:
    """Tokens of a prompt and its answer; of a model that gives vectors, of a prompt."""
    ctx = opened.plan.sizes.max_ctx_tokens
    return ctx if opened.blueprint.pooling is None else min(ctx - 1, opened.blueprint.max_ctx_tokens)


def _vector_form(blueprint: Blueprint) -> VectorForm | None:
    """What the front must know of a model that gives vectors."""
    p = blueprint.pooling
    if p is None:
        return None
    is_language_model = p.task == "rank" and blueprint.is_causal and blueprint.has_out_norm
    return VectorForm(
        p.task, blueprint.vector_width, p.is_normalised, dict(p.prompts), blueprint.n_vocab, max(1, blueprint.n_token_types), is_language_model
    )


def _facts(opened: Opened) -> dict[str, Any]:
    formats: dict[str, int] = {}
    for view in opened.views.values():
        formats[view.format] = formats.get(view.format, 0) + view.n_bytes
    return {
        "family": opened.blueprint.family, "task": opened.blueprint.task, "format": max(formats, key=lambda k: formats[k]), "device": opened.place.facts.kind,
        "max_batch": opened.plan.sizes.n_slots, "kv_format": opened.plan.kv_format, "pool_tokens": opened.plan.pool_tokens,
        "memory_bytes": opened.plan.total_bytes,
    }  # fmt: skip


class Runner:
    """Front and engine of one runner, from loading to the last byte."""

    def __init__(
        self, config: Config, opened: Opened, served: Served, desk: Desk, process: subprocess.Popen[bytes]
    ) -> None:
        self._config, self._opened, self._served = config, opened, served
        self._desk, self._process = desk, process
        self._code = 0
        self._is_stopping = False

    async def run(self, listener: socket.socket, door: Door) -> int:
        """Serves until told to stop. Returns the exit code."""
        config, loop = self._config, asyncio.get_running_loop()
        guard = auth.Guard(door.keys, (*config.allow_host, config.host), config.allow_origin)
        self._front = Front(self._served, self._desk, guard, int(config.max_body_mib * (1 << 20)), config.comment_s)
        self._server = Server(self._front, config.keep_alive_s, config.drain_s, door.tls)
        self._desk.on_dead = self._on_dead
        self._desk.listen(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        sys.setswitchinterval(0.001)
        begun = time.monotonic()
        waiting = loop.create_task(self._become_ready(listener, begun))
        try:
            await self._server.serve(listener)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            if config.state_file is not None and self._front.phase != "loading":
                config.state_file.unlink(missing_ok=True)
            self._served.close()
            self._desk.close()
        return self._code

    async def _become_ready(self, listener: socket.socket, begun: float) -> None:
        await self._desk.state(0)
        config, sizes = self._config, self._opened.plan.sizes
        host, port = listener.getsockname()[:2]
        self._front.phase = "ready"
        gc.collect()
        gc.freeze()
        facts = {
            "pid": os.getpid(), "host": config.host, "port": port, "model": self._served.name,
            "max_ctx_tokens": self._served.max_ctx_tokens, "max_batch": sizes.n_slots, "device": self._opened.place.facts.kind,
            "memory_bytes": self._opened.plan.total_bytes,
        }  # fmt: skip
        if config.state_file is not None:
            write_atomically(config.state_file, msgspec.json.encode(facts) + b"\n")
        scheme = "https" if config.tls_cert else "http"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        pool = self._opened.plan.pool_tokens
        print(
            f"paddock-runner: {self._served.name} is ready at {url}/v1 after {time.monotonic() - begun:.1f} s: contexts of "
            f"{self._served.max_ctx_tokens} tokens, {sizes.n_slots} at a time, {pool} KV tokens in all",
            flush=True,
        )

    def _on_signal(self) -> None:
        at_once = self._is_stopping
        self._is_stopping = True
        if self._front.phase == "loading" or at_once:
            self._process.kill()
            self._server.stop(at_once=True)
        elif self._front.phase == "ready":
            self._front.phase = "draining"
            log.event("draining", open=self._desk.n_open)
            self._desk.drain()
            self._server.stop()

    def _on_dead(self) -> None:
        """The engine has gone: open requests have been told; nothing more can be served."""
        if self._is_stopping:
            return
        self._front.phase = "failed"
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        self._code = code if code is not None and code > 0 else PackError.exit_code
        if code is None or code <= 0:
            how = f"was ended by {signal.Signals(-code).name}" if code else "has gone"
            print(f"paddock-runner: error: the engine process {how}", file=sys.stderr, flush=True)
        self._server.stop()


def end(process: subprocess.Popen[bytes]) -> None:
    """The engine's process ends: by itself in a moment, else by force. One that never got its order has nothing to finish."""
    if process.stdin is not None and not process.stdin.closed:
        process.kill()
        process.stdin.close()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        try:
            process.wait(KILL_AFTER_S)
            return
        except subprocess.TimeoutExpired:
            continue


def write_atomically(path: Path, data: bytes) -> None:
    """A file that is there completely or not at all."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}", "check --state-file") from None


__all__ = [
    "Opened",
    "PaddockError",
    "Place",
    "Runner",
    "choose_place",
    "end",
    "open_model",
    "serve",
    "write_atomically",
]
