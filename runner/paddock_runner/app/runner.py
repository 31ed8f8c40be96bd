"""Front and engine of one runner, from loading to the last byte."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from .. import log
from ..blueprint.blueprint import Blueprint
from ..config import Config
from ..edge import auth
from ..errors import DiskFull, PackError, PaddockError, UsageError
from ..files.quant import n_parameters, quant_name
from ..front.server import Server
from ..front.service import Front
from ..text.answer import AnswerFormat
from ..text.load import load_tokenizer
from ..text.recommended import recommended
from ..text.template import load_template
from ..text.vectors import VectorForm
from ..turns.desk import Desk
from ..turns.served import Served
from ..wire.port import FrontPort
from .opening import Opened
from .order import Given

EARLY_S = 0.02
"""An engine that does not answer within this is still loading."""
IDLE_S = 1.0
"""A front that was ready after its engine builds the tables of grammars when it has been idle: nothing else runs in it meanwhile."""


def run(given: Given, config: Config, stages: log.Stages) -> int:
    """Makes the front ready while the engine loads, then serves until told to stop. Returns the exit code. Raises: PaddockError."""
    opened = given.opened
    tokenizer = load_tokenizer(opened.checkpoint, opened.blueprint.n_vocab)
    stages.end("tokenizer")
    template, sizes = load_template(opened.checkpoint, tokenizer), opened.plan.sizes
    advice = recommended(opened.checkpoint, config.recommended)
    served = Served(
        config.model_name, tokenizer, template, AnswerFormat(template.source, tokenizer), _max_tokens(opened),
        opened.blueprint.n_vocab, sizes.max_top, sizes.max_bias, config.max_queue + sizes.n_slots, config.steady_prompts, facts={**_facts(opened), **({"recommended": advice.facts()} if advice.source else {})},
        planned=opened.plan.groups, vectors=_vector_form(opened.blueprint), recommended=advice,
    )  # fmt: skip
    stages.end("template")
    runner = Runner(config, given, served, stages)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(runner.run())


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
    format = max(formats, key=lambda k: formats[k])
    return {
        "family": opened.blueprint.family, "task": opened.blueprint.task, "format": format, "device": opened.place.facts.kind,
        "quant": quant_name(opened.checkpoint, format), "parameters": n_parameters(opened.views.values()), "files": opened.checkpoint.kind,
        "max_batch": opened.plan.sizes.n_slots, "kv_format": opened.plan.kv_format, "pool_tokens": opened.plan.pool_tokens,
        "memory_bytes": opened.plan.total_bytes,
    }  # fmt: skip


class Runner:
    """Front and engine of one runner, from loading to the last byte."""

    def __init__(self, config: Config, given: Given, served: Served, stages: log.Stages) -> None:
        self._config, self._given, self._opened, self._served, self._stages = config, given, given.opened, served, stages
        self._desk, self._process = Desk(FrontPort(given.channel)), given.process
        self._code = 0
        self._is_stopping = self._has_killed = False

    async def run(self) -> int:
        """Serves until told to stop. Returns the exit code."""
        config, given, loop = self._config, self._given, asyncio.get_running_loop()
        guard = auth.Guard(given.keys.now if given.keys else (), (*config.allow_host, config.host), config.allow_origin)
        self._front = Front(self._served, self._desk, guard, int(config.max_body_mib * (1 << 20)), config.comment_s)
        self._front.start = self._stages.rows
        self._server = Server(self._front, config.keep_alive_s, config.drain_s, given.tls)
        self._desk.on_dead = self._on_dead
        self._desk.listen(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        sys.setswitchinterval(0.001)
        waiting = loop.create_task(self._become_ready())
        waiting.add_done_callback(self._on_start_ended)
        try:
            await self._server.serve(given.listener)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            if config.state_file is not None and self._front.phase != "loading":
                config.state_file.unlink(missing_ok=True)
            self._served.close()
            self._desk.close()
        return self._code

    async def _become_ready(self) -> None:
        engine = asyncio.ensure_future(self._desk.state(0))
        writes_text = self._served.vectors is None
        is_early = not (await asyncio.wait({engine}, timeout=EARLY_S))[0]
        if is_early and writes_text:
            self._served.prepare()
            self._stages.end("texts")
            await self._build_tables()
            self._stages.end("grammar")
        await engine
        self._stages.end("engine")
        self._stages.speak()
        self._say_ready()
        while writes_text and not is_early:
            await asyncio.sleep(IDLE_S)
            if not self._desk.n_open:
                await self._build_tables()
                return

    async def _build_tables(self) -> None:
        """What structured output needs. Where that fails, those that want it are told; others are served."""
        try:
            await asyncio.wrap_future(self._served.walker.warm())
        except Exception as fault:
            log.error("structured output does not work here", fault)

    def _say_ready(self) -> None:
        config, sizes = self._config, self._opened.plan.sizes
        host, port = self._given.listener.getsockname()[:2]
        self._front.phase = "ready"
        gc.collect()
        gc.freeze()
        gc.enable()
        self._stages.end("ready")
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
        log.say(
            f"{self._served.name} is ready at {url}/v1 after {self._stages.rows[-1]['at']:.1f} s: contexts of "
            f"{self._served.max_ctx_tokens} tokens, {sizes.n_slots} at a time, {pool} KV tokens in all"
        )

    def _on_start_ended(self, task: asyncio.Task[None]) -> None:
        """A start that failed ends the runner: nobody shall wait for it."""
        fault = None if task.cancelled() else task.exception()
        if fault is None or self._is_stopping or self._front.phase == "failed":
            return
        self._is_stopping = True
        self._code = fault.exit_code if isinstance(fault, PaddockError) else 1
        log.say(f"error: {fault if isinstance(fault, PaddockError) else repr(fault)}", is_error=True)
        self._kill()

    def _on_signal(self) -> None:
        at_once = self._is_stopping
        self._is_stopping = True
        if self._front.phase == "loading" or at_once:
            self._kill()
        elif self._front.phase == "ready":
            self._front.phase = "draining"
            log.event("draining", open=self._desk.n_open)
            self._server.stop()  # the engine ends when the front has let go of it: until then requests that have begun may have more to ask

    def _kill(self) -> None:
        """Nothing is waited for."""
        self._has_killed = True
        self._process.kill()
        self._server.stop(at_once=True)

    def _on_dead(self) -> None:
        """The engine has gone, also while requests were finished: those that are open have been told; nothing more can be served."""
        if self._has_killed:
            return
        self._is_stopping = True
        self._front.phase = "failed"
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        self._code = code if code is not None and code > 0 else PackError.exit_code
        if code is None or code <= 0:
            how = f"was ended by {signal.Signals(-code).name}" if code else "has gone"
            log.say(f"error: the engine process {how}", is_error=True)
        self._server.stop()


def write_atomically(path: Path, data: bytes) -> None:
    """A file that is there completely or not at all."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path} cannot be written: {error.strerror}", "free some space", path=str(path)) from None
        raise UsageError(f"{path} cannot be written: {error.strerror}", "check --state-file") from None
