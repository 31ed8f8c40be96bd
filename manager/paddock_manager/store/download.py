"""Downloads one file in ranged parts, in parallel, with a journal; the final name appears only after the hash was right.

A part counts when it is written and journalled, so a killed download loses the parts in flight and nothing else. Syncing and hashing
go on beside the transfer, and beside each other at its end; after a power cut, parts that were not synced are checked before they count.
Few connections begin, and more come while the hash waits for parts: where it does not, they would only take its processor.
Each answer to a range is checked (206, Content-Range, validator); a server without ranges is read as one stream.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from paddock_runner.errors import FileError, HubError

from paddock_manager.store import journal
from paddock_manager.store.journal import Found, Identity, Journal
from paddock_manager.store.part import PartFile, PartHash
from paddock_manager.store.web import Transient, Web

SYNC_S, SYNC_BYTES = 1.0, 64 << 20
"""Finished parts are synced when so much time has passed, or so many bytes have gathered."""
SYNC_CHECK_S = 0.1
FIRST_CONNECTIONS = 2
LOOK_S, IDLE_SHARE = 0.5, 0.5
"""How often it is asked whether one more connection would help, and the share of that time for which the hash must have waited."""
CALM_S = 30.0
"""So long after a server asked us to slow down, no connection is added."""
MIN_PART_BYTES, MAX_PART_BYTES = 4 << 20, 64 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """How hard to pull. rate 0: as fast as it goes; part_bytes 0: by the file's size; tries: failures of one part in a row."""

    connections: int = 8
    rate_bytes_per_s: float = 0.0
    part_bytes: int = 0
    tries: int = 6
    backoff_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Remote:
    """A file to fetch: where from, and what its bytes must be."""

    url: str
    what: str
    size_bytes: int
    sha256: str = ""
    git_sha1: str = ""
    commit: str = ""


@dataclass(slots=True)
class Fetched:
    """A file that is here and right."""

    sha256: str
    part_bytes: int
    part_hashes: list[str] = field(default_factory=list)


def part_bytes_for(size_bytes: int) -> int:
    """About 64 parts a file, within bounds, in whole MiB."""
    even = -(-size_bytes // 64)
    return min(MAX_PART_BYTES, max(MIN_PART_BYTES, -(-even // (1 << 20)) << 20))


class Download:
    """One file on its way. `moved(n)` is called with bytes gained (negative when a part is thrown away)."""

    def __init__(self, web: Web, remote: Remote, part: Path, limits: Limits, moved: Callable[[int], None]):
        self.web, self.remote, self.part, self.limits, self.moved = web, remote, part, limits, moved
        size = limits.part_bytes or part_bytes_for(remote.size_bytes)
        found = journal.load(part)
        if found is not None and not limits.part_bytes:
            size = found.identity.part_bytes
        self.identity = Identity(remote.size_bytes, remote.sha256, remote.git_sha1, remote.commit, size)
        self.journal = Journal(journal.journal_path(part), self.identity)
        self.file = PartFile(part, remote.size_bytes)
        self._direct = remote.url
        self._etag = ""
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._todo: list[int] = []
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._allowed = min(FIRST_CONNECTIONS, limits.connections)
        self._busy, self._calm_until = 0, 0.0
        self._no_ranges = False
        self._pace = Pace(limits.rate_bytes_per_s)
        self._counted = 0
        self._sha256, self._n_hashed = hashlib.sha256(), 0
        self._workers: list[threading.Thread] = []
        self._syncer: threading.Thread | None = None
        self._fetched = threading.Event()

    def _move(self, n_bytes: int) -> None:
        """Report progress, and remember it so that it can be taken back."""
        with self._lock:
            self._counted += n_bytes
        self.moved(n_bytes)

    def run(self, target: Path) -> Fetched:
        """Fetch what is missing, verify, and give the file its final name.

        Raises: HubError, HubAuthError, DiskFull; FileError when the bytes are wrong twice.
        """
        try:
            self._open()
            for attempt in (1, 2):
                self._fetch_parts()
                sha256, sha1 = self._hash()
                if self._is_right(sha256, sha1):
                    return self._finish(target, sha256)
                if attempt == 1:
                    self._suspect()
            raise self._wrong(sha256, sha1)
        finally:
            self._end_syncer()
            if not any(w.is_alive() for w in self._workers):  # an interrupted worker may still write: it keeps its file
                self.journal.close()
                self.file.close()

    def _open(self) -> None:
        """Open the part file, take over a journal of the same file, reserve the disk space."""
        found = journal.load(self.part)
        keeps = found is not None and found.identity == self.identity and self.part.exists()
        self.file.open()
        if keeps and found is not None:
            self.journal.resume(found)
            self._check(found)
        else:
            self.journal.start()
        self._move(self.journal.done_bytes)

    def _check(self, found: Found) -> None:
        """Drop the parts that were not synced and are not what was received."""
        bad = [i for i in found.unsynced if self.file.part_hash(*self.identity.part(i)) != found.parts[i]]
        if bad:
            self.journal.drop(bad)

    def _fetch_parts(self) -> None:
        """Fetch every part that the journal lacks."""
        self._todo = [i for i in range(self.identity.n_parts) if i not in self.journal.parts]
        self._error = None
        self._stop.clear()
        if not self._todo:
            return
        n_workers = min(self.limits.connections, len(self._todo))
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(n_workers)]
        for worker in self._workers:
            worker.start()
        self._begin_syncer()
        appetite = Appetite(time.monotonic())
        try:
            while any(worker.is_alive() for worker in self._workers):
                if self._hash_ready():
                    continue
                begun = time.monotonic()
                with self._done:
                    self._done.wait(0.1)
                if appetite.waited(time.monotonic() - begun, time.monotonic()):
                    self._let_more_work()
        except BaseException:
            self._stop.set()
            raise
        self._fetched.set()
        if self._no_ranges and self._error is None:
            self._end_syncer()
            self._stream()
        if self._error is not None:
            raise self._error

    def _begin_syncer(self) -> None:
        self._fetched.clear()
        self._syncer = threading.Thread(target=self._keep_synced, daemon=True)
        self._syncer.start()

    def _end_syncer(self) -> None:
        """Returns when everything finished is synced."""
        if self._syncer is not None:
            self._fetched.set()
            self._syncer.join()

    def _keep_synced(self) -> None:
        """Sync what was finished while the transfer goes on, and the rest when it is over."""
        synced_at = time.monotonic()
        is_over = False
        while not is_over:
            is_over = self._fetched.wait(SYNC_CHECK_S)
            with self._lock:
                n_listed = len(self.journal.parts)
            n_new = n_listed - self.journal.n_synced
            is_due = n_new * self.identity.part_bytes >= SYNC_BYTES or time.monotonic() - synced_at >= SYNC_S
            if not n_new or not (is_due or is_over):
                continue
            try:
                self.file.sync()
                with self._lock:
                    self.journal.synced(n_listed)
            except BaseException as error:  # handed to the thread that waits for us
                self._fail(error)
                return
            synced_at = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        """The first failure ends the others."""
        with self._done:
            if not self._no_ranges and self._error is None:
                self._error = error
        self._stop.set()

    def _work(self) -> None:
        """One worker: takes parts until there are none, or somebody failed."""
        while not self._stop.is_set():
            with self._done:
                while self._busy >= self._allowed and not self._stop.is_set() and self._todo:
                    self._done.wait(0.5)
                if self._stop.is_set() or not self._todo:
                    return
                index = self._todo.pop(0)
                self._busy += 1
            try:
                self._one_part(index)
            except BaseException as error:  # handed to the thread that waits for us
                self._fail(error)
            finally:
                with self._done:
                    self._busy -= 1
                    self._done.notify_all()

    def _one_part(self, index: int) -> None:
        """One part, continued where a broken connection left it; passing trouble is tried again with growing pauses."""
        start, length = self.identity.part(index)
        got, failures, digest = 0, 0, PartHash()
        while got < length:
            before = got
            try:
                got += self._range(start + got, length - got, digest)
            except Transient as error:
                got = before + int(error.facts.get("got_bytes", 0))
                failures = 1 if got > before else failures + 1
                if failures >= self.limits.tries or self._stop.is_set():
                    raise
                if error.facts.get("status") in (429, 503):
                    with self._done:
                        self._allowed = max(1, self._allowed // 2)
                        self._calm_until = time.monotonic() + CALM_S
                pause = max(float(error.facts.get("retry_after_s", 0)), self.limits.backoff_s * 2 ** min(failures, 6))
                if self._stop.wait(min(60.0, pause) * random.uniform(0.75, 1.25)):
                    raise
        with self._lock:
            if not self._stop.is_set():
                self.journal.finish(index, digest.hexdigest())

    def _let_more_work(self) -> None:
        """One more connection at a time, unless the server wants fewer."""
        with self._done:
            if time.monotonic() >= self._calm_until:
                self._allowed = min(self._allowed + 1, self.limits.connections)
                self._done.notify_all()

    def _range(self, start: int, length: int, digest: PartHash) -> int:
        """One ranged request; returns the bytes written.

        Raises: Transient (got_bytes: how many were good) to try again; HubError.
        """
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        if self._etag:
            headers["If-Range"] = self._etag
        got = 0
        url = self._direct
        with self.web.get(url, headers, reuse=True) as response:
            self._check_range(response, url, start, length)
            try:
                for chunk in response.iter_raw():
                    piece = chunk[: length - got]
                    self.file.write(piece, start + got)
                    digest.update(piece)
                    got += len(piece)
                    self._move(len(piece))
                    self._pace.spend(len(piece), self._stop)
                    if self._stop.is_set():
                        raise Transient("stopped", got_bytes=got)
            except httpx.HTTPError as error:
                trouble = self.web.transport_error(url, error)
                raise Transient(trouble.message, trouble.hint, got_bytes=got, **trouble.facts) from None
        if got < length:
            raise Transient(f"{self.remote.what}: the server closed after {got} of {length} bytes", got_bytes=got)
        return got

    def _check_range(self, response: httpx.Response, url: str, start: int, length: int) -> None:
        """Check the head of an answer to a range, and learn from it.

        Raises: Transient to ask again; HubError when the file is another one, or there are no ranges.
        """
        status = response.status_code
        if status in (401, 403, 404, 410) and url != self.remote.url:
            self._direct = self.remote.url  # a signed URL that expired: ask the hub for a new one
            raise Transient(f"{self.remote.what}: the data host answered HTTP {status}", status=status)
        if status == 416:
            raise self._changed(f"byte {start} is beyond its end")
        if status == 200:
            if self._etag and response.headers.get("etag", self._etag) != self._etag:
                raise self._changed("its validator is another one")
            self._no_ranges = True
            raise HubError(f"{response.url.host} does not serve ranges")
        if status != 206:
            raise self.web.status_error(response, self.remote.what)
        wanted = f"bytes {start}-{start + length - 1}/{self.remote.size_bytes}"
        given = response.headers.get("content-range", "").strip()
        if given != wanted:
            if given.rpartition("/")[2] not in ("", "*", str(self.remote.size_bytes)):
                raise self._changed(f"its size is {given.rpartition('/')[2]} bytes now, not {self.remote.size_bytes}")
            raise Transient(
                f"{self.remote.what}: asked for {wanted!r}, the server sent {given!r}", host=str(response.url.host)
            )
        if response.headers.get("content-encoding", "identity") not in ("identity", ""):
            raise HubError(f"{response.url.host} compresses ranges ({response.headers['content-encoding']})")
        etag = response.headers.get("etag", "")
        if etag and not etag.startswith("W/"):
            if self._etag and etag != self._etag:
                raise self._changed("its validator is another one")
            self._etag = etag
        self._direct = str(response.url)

    def _changed(self, how: str) -> HubError:
        """The file is not the one that was listed."""
        return HubError(
            f"{self.remote.what} changed on the server while it was being downloaded: {how}",
            "pull again",
            what=self.remote.what,
        )

    def _stream(self) -> None:
        """The whole file as one stream, for servers without ranges. Retried from the start."""
        for attempt in range(self.limits.tries):
            self._move(-self._counted)
            self.journal.start()
            self._restart_hash()
            self._stop.clear()
            try:
                self._one_stream()
                return
            except Transient as error:
                if attempt + 1 >= self.limits.tries:
                    raise
                time.sleep(
                    min(30.0, max(float(error.facts.get("retry_after_s", 0)), self.limits.backoff_s * 2**attempt))
                )

    def _one_stream(self) -> None:
        got = 0
        with self.web.get(self.remote.url) as response:
            if response.status_code != 200:
                raise self.web.status_error(response, self.remote.what)
            try:
                for chunk in response.iter_bytes():
                    if got + len(chunk) > self.remote.size_bytes:
                        raise self._changed(f"it is longer than {self.remote.size_bytes} bytes")
                    self.file.write(chunk, got)
                    got += len(chunk)
                    self._move(len(chunk))
                    self._pace.spend(len(chunk), self._stop)
            except httpx.HTTPError as error:
                raise self.web.transport_error(self.remote.url, error) from None
        if got < self.remote.size_bytes:
            raise Transient(f"{self.remote.what}: the server closed after {got} of {self.remote.size_bytes} bytes")
        for index in range(self.identity.n_parts):
            self.journal.finish(index, self.file.part_hash(*self.identity.part(index)))

    def _hash_ready(self) -> bool:
        """Hash the next part in order, if it is here: the file's hash is nearly done when its last part arrives."""
        if self._n_hashed not in self.journal.parts:
            return False
        self.file.feed(*self.identity.part(self._n_hashed), self._sha256)
        self._n_hashed += 1
        return True

    def _hash(self) -> tuple[str, str]:
        """sha256 of the whole part file, and its git blob sha1 when that is what we compare."""
        while self._hash_ready():
            pass
        sha1 = hashlib.sha1(f"blob {self.remote.size_bytes}\0".encode(), usedforsecurity=False)
        if self.remote.git_sha1 and not self.remote.sha256:
            self.file.feed(0, self.remote.size_bytes, sha1)
        return self._sha256.hexdigest(), sha1.hexdigest()

    def _restart_hash(self) -> None:
        self._sha256, self._n_hashed = hashlib.sha256(), 0

    def _is_right(self, sha256: str, sha1: str) -> bool:
        if self.remote.sha256:
            return sha256 == self.remote.sha256
        return sha1 == self.remote.git_sha1 if self.remote.git_sha1 else True

    def _suspect(self) -> None:
        """After a wrong hash: drop the parts whose bytes on disk differ from what was received, or all of them."""
        self._end_syncer()
        known = self.journal.parts
        bad = [i for i in known if self.file.part_hash(*self.identity.part(i)) != known[i]]
        bad = bad or list(self.journal.parts)
        self._move(-sum(self.identity.part(i)[1] for i in bad))
        self.journal.drop(bad)
        self._restart_hash()
        self._direct, self._etag = self.remote.url, ""

    def _wrong(self, sha256: str, sha1: str) -> FileError:
        """Wrong bytes twice: nothing is kept."""
        self.part.unlink(missing_ok=True)
        self.journal.path.unlink(missing_ok=True)
        wanted, got = (self.remote.sha256, sha256) if self.remote.sha256 else (self.remote.git_sha1, sha1)
        return FileError(
            f"{self.remote.what}: the downloaded bytes are wrong: expected hash {wanted}, got {got}",
            "the server or something on the way corrupts it; after a second time, test memory and disk",
            expected=wanted,
            actual=got,
        )

    def _finish(self, target: Path, sha256: str) -> Fetched:
        """Its final name, durably. Raises: DiskFull."""
        self._end_syncer()
        if self._error is not None:
            raise self._error
        hashes = [self.journal.parts[i] for i in range(self.identity.n_parts)]
        self.file.move_to(target)
        self.journal.close()
        self.journal.path.unlink(missing_ok=True)
        return Fetched(sha256, self.identity.part_bytes, hashes)


class Appetite:
    """Says when one more connection would help: while the hash, which no pull can outrun, waits for parts most of the time."""

    def __init__(self, now: float):
        self._since, self._idle_s = now, 0.0

    def waited(self, seconds: float, now: float) -> bool:
        """The hash waited so long until now. Asked for at most once in LOOK_S."""
        self._idle_s += seconds
        passed = now - self._since
        if passed < LOOK_S:
            return False
        is_hungry = self._idle_s > IDLE_SHARE * passed
        self._since, self._idle_s = now, 0.0
        return is_hungry


class Pace:
    """Spreads bytes over time, for all workers together."""

    def __init__(self, rate_bytes_per_s: float):
        self.rate = rate_bytes_per_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def spend(self, n_bytes: int, stop: threading.Event) -> None:
        """Wait until these bytes are due."""
        if self.rate <= 0:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.25) + n_bytes / self.rate
            wait = self._free_at - now
        if wait > 0:
            stop.wait(wait)
