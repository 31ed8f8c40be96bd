"""Who runs where: one JSON file under a lock. A runner counts as running only while its own process lives."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paddock_runner.errors import AmbiguousModel, Locked, UnknownModel, UsageError

from paddock_manager.disk import is_at, is_open, is_same_process, lock, write_json
from paddock_manager.paths import Places, file_word


@dataclass(slots=True)
class Server:
    """One runner that was started. born: start time of pid in clock ticks. asked: what was asked for, by option name.

    model: what its API calls the model. tls_cert: the certificate that it serves https with, "" for http. planned_bytes: what
    its plan says that it takes, 0 where it does not say. ends_with: the command that it ends with, 0 where it goes on alone.
    """

    name: str
    ref: str
    path: str
    pid: int
    born: float
    host: str
    port: int
    device: str
    max_ctx_tokens: int
    max_batch: int
    log: str
    started_at: float
    asked: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    tls_cert: str = ""
    planned_bytes: int = 0
    ends_with: int = 0

    @property
    def url(self) -> str:
        """Where its API is."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "https" if self.tls_cert else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def is_alive(self) -> bool:
        """Does its process run?"""
        return is_same_process(self.pid, self.born)


@contextmanager
def _locked(places: Places, name: str = "state.lock", how: int = fcntl.LOCK_EX) -> Iterator[Path]:
    """Holds a lock of the fleet's folder, where its file system has locks. Raises: BlockingIOError where `how` does not wait."""
    places.fleet.mkdir(parents=True, exist_ok=True)
    path = places.fleet / name
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if lock(fd, how) is False:
                raise BlockingIOError
            if is_at(fd, path):  # else its holder took it away while we waited
                yield path
                return
        finally:
            os.close(fd)


@contextmanager
def starting(places: Places, name: str, model: Path, models: Iterable[str] = (), is_own: bool = False) -> Iterator[None]:
    """While a server of that name is started, nobody else starts one, as its log is its own, and `loading` tells of its model and a gateway's models.

    is_own: it ends with this process, and others may be called so. Raises: Locked.
    """
    with ExitStack() as held:
        try:
            path = held.enter_context(_locked(places, f"{file_word(name)}{f'.{os.getpid()}' if is_own else ''}.start", fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            raise Locked(f"{name} is being started by another command", "`paddock ps` shows it when it is ready", name=name) from None
        held.callback(path.unlink, missing_ok=True)
        path.write_text(json.dumps({"name": name, "path": str(model), "models": list(models)}), encoding="utf-8")
        yield


def loading(places: Places, model: str, path: Path) -> str:
    """The name of a server that is being started with that model; "": none is."""
    for start in places.fleet.glob("*.start"):
        try:
            told = json.loads(start.read_bytes())
        except (OSError, ValueError):  # it is over, or has just begun
            continue
        if (told["path"] == str(path) or model in told["models"]) and is_open(start):
            return str(told["name"])
    return ""


def _load(places: Places) -> list[Server]:
    """All records; a damaged file counts as empty, since processes are found by their own state. What a newer Paddock wrote beside is passed over."""
    known = {f.name for f in fields(Server)}
    try:
        body = json.loads((places.fleet / "state.json").read_bytes())
        return [Server(**{k: v for k, v in s.items() if k in known}) for s in body["servers"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def servers(places: Places) -> list[Server]:
    """The runners that live, oldest first."""
    return sorted((s for s in _load(places) if s.is_alive), key=lambda s: s.started_at)


def remember(places: Places, server: Server) -> None:
    """Add a runner; dead ones go. Raises: UsageError when another one of its name lives."""
    with _locked(places):
        kept = [s for s in _load(places) if s.is_alive and s.pid != server.pid]
        refuse_taken(kept, server.name, str(server.asked.get("by", "")))
        _store(places, [*kept, server])


def refuse_taken(alive: list[Server], name: str, by: str = "") -> None:
    """Raises: UsageError when a server, or a model of a gateway, has that name already: names are what servers are stopped by.

    by: the gateway whose runner it is to be: what this one left behind is its own.
    """
    for other in alive:
        if by and by in (other.name, other.asked.get("by")):
            continue
        if name == other.name or name in other.asked.get("models", ()):
            what = f"{name} is already served at {other.url}" + ("" if name == other.name else f", by {other.name}")
            raise UsageError(what, f"`paddock stop {other.name}` first, or give another --name", url=other.url)


def forget(places: Places, name: str) -> None:
    """Take a runner out."""
    with _locked(places):
        _store(places, [s for s in _load(places) if s.is_alive and s.name != name])


def _store(places: Places, found: list[Server]) -> None:
    write_json(places.fleet / "state.json", {"layout": 1, "servers": [asdict(s) for s in found]})


def matches(alive: list[Server], word: str) -> list[Server]:
    """The servers that a name, full name or port means: those of exactly that name, else those whose model is called so without its quant or organisation."""
    told = word.lower()
    exact = [s for s in alive if told in (s.name.lower(), str(s.port))]
    full = [s for s in alive if told in (s.ref.lower(), s.ref.split(":")[0].lower())]
    return exact or full or [s for s in alive if "/" in s.ref and told == s.ref.split(":")[0].split("/")[-1].lower()]


def find(places: Places, word: str, lasting: bool = False) -> Server:
    """The running server of a name, full name or port; lasting: not one that ends with another command.

    Raises: UnknownModel, AmbiguousModel.
    """
    alive = [s for s in servers(places) if not (lasting and s.ends_with)]
    hits = matches(alive, word)
    if len(hits) > 1:
        raise AmbiguousModel(
            f"{word!r} is the name of {len(hits)} servers",
            "say which: " + ", ".join(s.name for s in hits),
            choices=[s.name for s in hits],
        )
    if not hits:
        known = [s.name for s in alive]
        raise UnknownModel(
            f"no server {word!r} is running",
            "running: " + ", ".join(known) if known else "nothing is running",
            name=word,
            known=known,
        )
    return hits[0]
