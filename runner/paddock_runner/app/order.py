"""What the engine waits for: the device to open, then the model to load. Everything that can be refused before that is refused here."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from dataclasses import dataclass

from .. import log
from ..config import Config
from ..edge import auth
from ..edge.keyfile import KeyFile
from ..edge.listen import bind, check_tls
from ..engine.order import Opening, Order, send
from ..errors import UsageError
from ..files.folder import require_tokenizer
from ..wire.channel import Channel
from .opening import Opened, choose_place, plan_model


@dataclass(frozen=True, slots=True)
class Given:
    """An engine with its order, and the door that clients will come to: its socket, who is let in (None: everybody), the certificate and key of https."""

    process: subprocess.Popen[bytes]
    channel: Channel
    opened: Opened
    listener: socket.socket
    keys: KeyFile | None
    tls: tuple[str, str] | None

    def close(self) -> None:
        """Takes no more clients."""
        self.listener.close()


def give(config: Config, channel: Channel, process: subprocess.Popen[bytes], stages: log.Stages) -> Given:
    """Tells the engine its device, then its model. Raises: PaddockError when the runner cannot serve as it was told to."""
    auth.check_exposure(config.host, config.auth)
    if config.state_file is not None and not config.state_file.absolute().parent.is_dir():
        raise UsageError(f"--state-file: there is no folder {config.state_file.absolute().parent}")
    place = choose_place(config)
    send(process, Opening(str(place.pack), place.gpu, config.threads, config.log_level, os.getpid(), int(config.untried_kernels), config.deterministic))
    stages.end("place")
    tls = check_tls(config.tls_cert, config.tls_key)
    _allow_many_files()
    keys, is_new = _keys(config)
    listener = bind(config.host, config.port)
    try:
        opened = plan_model(config, config.model_path, place)
        if opened.checkpoint.kind != "gguf":
            require_tokenizer(opened.checkpoint.path)
    except BaseException:
        listener.close()
        raise
    send(process, _order(config, opened, channel))
    stages.end("order")
    log.say(f"{place.why}{place.label}")
    if place.doubt:
        log.warning("pack", file=place.pack.name, text=place.doubt)
    if is_new:
        log.say(f"a new API key was written to {config.key_file}")
    for note in opened.blueprint.notes:
        log.warning("note", text=note)
    return Given(process, channel, opened, listener, keys, tls)


def _allow_many_files() -> None:
    """As many open connections as the system lets us have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _keys(config: Config) -> tuple[KeyFile | None, bool]:
    """Who is let in, None for everybody; and whether a key was made for it."""

    def tell(text: str) -> None:
        log.warning("keys", text=text)

    if not config.auth:
        return None, False
    if config.api_key_file is not None:
        return KeyFile(config.api_key_file, tell), False
    is_new = auth.make_key(config.key_file)
    return KeyFile(config.key_file, tell), is_new


def _order(config: Config, opened: Opened, channel: Channel) -> Order:
    return Order(
        str(config.model_path.absolute()), channel.text, opened.plan.sizes, opened.plan.kv_format, config.max_queue, config.task,
        int(config.host_cache_gib * (1 << 30)), int(config.disk_cache_gib * (1 << 30)), str(config.page_folder),
        config.idle_release_s, config.guesses, config.long_prompt_delay, config.cold_experts,
    )  # fmt: skip
