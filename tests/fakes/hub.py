"""A hub as small as it can be and as bad as it must be: a listing, redirects to a data host on another port, ranges, and faults.

Two real HTTP servers on port 0 of loopback. Every request is kept, so that tests can say what was asked, with which headers, and
how many bytes were served. A fault is put in a queue and applies to the next data request(s).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
import zlib
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 16 << 10


@dataclass
class Asked:
    """One request as it came in."""

    server: str
    path: str
    headers: dict[str, str]
    status: int = 0
    n_bytes: int = 0


@dataclass
class Repo:
    """A repository. lfs: names that have a sha256 and live on the data host."""

    files: dict[str, bytes | Hollow]
    lfs: set[str]
    commit: str = COMMIT
    licence: str = "mit"


class Hollow:
    """A large file of which only the head exists: what lies behind it reads as zeros. It can be listed and asked for, not verified."""

    def __init__(self, head: bytes, size: int) -> None:
        self.head, self.size = head, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self.size)
        return self.head[start:stop] + bytes(max(0, stop - max(start, len(self.head))))


@dataclass
class Fault:
    """What goes wrong. kind: see _Handler.data. value: a status, a byte count, a header, by kind."""

    kind: str
    value: object = None
    headers: dict[str, str] = field(default_factory=dict)


class _Server(ThreadingHTTPServer):
    """A client that hangs up is nothing to report."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Silence."""


class FakeHub:
    """`with FakeHub() as hub:`; then hub.url is the endpoint."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: deque[Fault] = deque()
        self.api_faults: deque[Fault] = deque()
        self.asked: list[Asked] = []
        self.token = ""
        self.has_ranges = True
        self.redirects = True
        self.corrupt: set[str] = set()
        self.hold_after: int | None = None
        self.released = threading.Event()
        self.held = threading.Event()
        self.served_bytes = 0
        self.lock = threading.Lock()
        self.etag_suffix = ""
        self._servers: list[ThreadingHTTPServer] = []

    def __enter__(self) -> FakeHub:
        for name in ("hub", "data"):
            server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self, "name": name}))
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
            self._servers.append(server)
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        """The endpoint, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def data_url(self) -> str:
        """The data host: another origin."""
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def add(self, repo: str, files: dict[str, bytes | Hollow], lfs: set[str] | None = None) -> Repo:
        """Put a repository there; by default every .gguf and .safetensors is a large file."""
        large = {n for n in files if n.endswith((".gguf", ".safetensors"))} if lfs is None else lfs
        self.repos[repo] = Repo(files, large)
        return self.repos[repo]

    def fault(self, kind: str, value: object = None, times: int = 1, **headers: str) -> None:
        """The next `times` data requests go wrong."""
        self.faults.extend(Fault(kind, value, {k.replace("_", "-"): v for k, v in headers.items()}) for _ in range(times))

    def data_requests(self) -> list[Asked]:
        """Requests that reached file contents (not listings, not redirects)."""
        return [a for a in self.asked if a.server == "data" or (a.server == "hub" and "/resolve/" in a.path and a.status in (200, 206))]


def some_bytes(n_bytes: int, seed: int = 1) -> bytes:
    """Bytes that do not repeat."""
    return random.Random(seed).randbytes(n_bytes)


class _Handler(BaseHTTPRequestHandler):
    """Both servers."""

    protocol_version = "HTTP/1.1"
    fake: FakeHub
    name: str

    def log_message(self, *_: object) -> None:
        """Silence."""

    def do_GET(self) -> None:
        """Route."""
        self.record = Asked(self.name, self.path, {k.lower(): v for k, v in self.headers.items()})
        with self.fake.lock:
            self.fake.asked.append(self.record)
        try:
            path = urlsplit(self.path).path
            if self.name == "data":
                _, repo, file = path.split("/", 2)
                self.data(unquote(repo), unquote(file))
            elif path.startswith("/api/models/"):
                self.listing(path)
            else:
                self.resolve(path)
        except (ConnectionError, BrokenPipeError):
            self.close_connection = True

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A whole answer."""
        self.record.status = status
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def is_allowed(self) -> bool:
        """Has the request the token that is wanted?"""
        return not self.fake.token or self.headers.get("Authorization") == f"Bearer {self.fake.token}"

    def listing(self, path: str) -> None:
        """/api/models/ORG/REPO/revision/REV."""
        if self.fake.api_faults:
            fault = self.fake.api_faults.popleft()
            self.answer(int(str(fault.value)), b"no", **fault.headers)
            return
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path)
        repo = self.fake.repos.get(found.group(1)) if found else None
        if repo is None or not self.is_allowed():
            self.answer(401, b"{}", X_Error_Code="RepoNotFound" if repo is None else "GatedRepo")
            return
        siblings = []
        for name, body in repo.files.items():
            seen = body.head if isinstance(body, Hollow) else body
            git = hashlib.sha1(f"blob {len(body)}\0".encode() + seen).hexdigest()
            entry = {"rfilename": name, "size": len(body), "blobId": git}
            if name in repo.lfs:
                entry["lfs"] = {"sha256": hashlib.sha256(seen).hexdigest(), "size": len(body), "pointerSize": 134}
            siblings.append(entry)
        body = {"id": found.group(1) if found else "", "sha": repo.commit, "siblings": siblings, "gated": False, "cardData": {"license": repo.licence}}
        self.answer(200, json.dumps(body).encode(), Content_Type="application/json")

    def resolve(self, path: str) -> None:
        """/ORG/REPO/resolve/COMMIT/FILE: small files here, large ones by a redirect."""
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = self.fake.repos.get(found.group(1)) if found else None
        if found is None or repo is None or not self.is_allowed() or unquote(found.group(3)) not in repo.files:
            self.answer(401 if repo is None or not self.is_allowed() else 404, b"", X_Error_Code="EntryNotFound")
            return
        name = unquote(found.group(3))
        if name in repo.lfs and self.fake.redirects:
            where = f"{self.fake.data_url}/{found.group(1).replace('/', '%2F')}/{found.group(3)}?signature={len(self.fake.asked)}"
            self.answer(302, b"", Location=where)
            return
        self.data(found.group(1), name)

    def data(self, repo: str, name: str) -> None:
        """A file's bytes, with the next fault."""
        body = self.fake.repos[repo].files[name]
        if name in self.fake.corrupt:
            body = bytes([body[0] ^ 1]) + body[1:]
        with self.fake.lock:
            fault = self.fake.faults.popleft() if self.fake.faults else Fault("")
        if fault.kind == "status":
            self.answer(int(str(fault.value)), b"", **fault.headers)
            return
        if fault.kind == "drop":
            self.record.status = -1
            self.close_connection = True
            return
        if fault.kind == "loop":
            self.answer(302, b"", Location=self.path)
            return
        etag = f'"{zlib.crc32(body[:65536]):08x}{len(body):x}{self.fake.etag_suffix}"'
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        honours = wanted and self.fake.has_ranges and fault.kind != "ignore_range" and self.headers.get("If-Range", etag) == etag
        start, end = (int(wanted.group(1)), min(int(wanted.group(2)), len(body) - 1)) if honours and wanted else (0, len(body) - 1)
        if honours and start >= max(1, len(body)):
            self.answer(416, b"", Content_Range=f"bytes */{len(body)}")
            return
        piece = body[start : end + 1]
        if fault.kind == "flip":
            piece = bytes([piece[0] ^ 1]) + piece[1:]
        self.record.status = 206 if honours else 200
        self.send_response(self.record.status)
        self.send_header("ETag", str(fault.value) if fault.kind == "etag" else etag)
        self.send_header("Accept-Ranges", "bytes")
        if honours:
            shown = {"wrong_start": f"bytes {start + 1}-{end + 1}/{len(body)}", "other_size": f"bytes {start}-{end}/{len(body) + 9}"}
            self.send_header("Content-Range", shown.get(fault.kind, f"bytes {start}-{end}/{len(body)}"))
        if fault.kind == "gzip":
            self.send_header("Content-Encoding", "gzip")
        if fault.kind == "no_length":
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.pour(piece, fault)

    def pour(self, piece: bytes, fault: Fault) -> None:
        """Send in pieces: cut off, stalled or held where that is asked for."""
        limit = int(str(fault.value)) if fault.kind in ("cut", "stall") else len(piece)
        for at in range(0, min(limit, len(piece)), PIECE):
            part = piece[at : min(at + PIECE, limit)]
            if self.fake.hold_after is not None and self.fake.served_bytes + len(part) > self.fake.hold_after:
                self.fake.held.set()
                self.fake.released.wait(60)
            self.wfile.write(part)
            with self.fake.lock:
                self.fake.served_bytes += len(part)
                self.record.n_bytes += len(part)
        if fault.kind == "stall":
            self.wfile.flush()
            self.fake.released.wait(60)
        if limit < len(piece):
            self.close_connection = True
            self.connection.close()
