"""Throughput of a pull on loopback, beside curl of the same file from the same server in the same run.

The server sends files with sendfile, so that it costs as little as a server can. Ours is the whole of `Shop.execute`: listing, ranges,
writing, hashing, syncing, renaming; curl only writes. Rounds alternate.

Usage: python -m bench.download [--size 1GiB] [--rounds 7] [--folder DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path[:0] = ["runner", "manager"]

from paddock_manager.catalog import names  # noqa: E402
from paddock_manager.options import parse_size  # noqa: E402
from paddock_manager.paths import HubSettings, Places  # noqa: E402
from paddock_manager.store.download import Limits  # noqa: E402
from paddock_manager.store.pull import Shop, Wish  # noqa: E402

from bench import board  # noqa: E402

REPO, FILE, COMMIT = "org/repo", "model.Q4_0.gguf", "0" * 40


def serve(path: str, sha256: str, port: multiprocessing.Queue[int]) -> None:
    """A hub of one file. Runs in a process of its own."""
    size = os.path.getsize(path)
    sibling = {"rfilename": FILE, "size": size, "blobId": "1" * 40, "lfs": {"sha256": sha256, "size": size}}
    listing = json.dumps({"sha": COMMIT, "siblings": [sibling]}).encode()
    listener = socket.create_server(("127.0.0.1", 0))
    port.put(listener.getsockname()[1])
    while True:
        client, _ = listener.accept()
        threading.Thread(target=converse, args=(client, path, size, listing), daemon=True).start()


def converse(client: socket.socket, path: str, size: int, listing: bytes) -> None:
    """Answers on one connection until it is closed."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with client, open(path, "rb") as file:
        seen = b""
        while True:
            while b"\r\n\r\n" not in seen:
                got = client.recv(65536)
                if not got:
                    return
                seen += got
            head, _, seen = seen.partition(b"\r\n\r\n")
            if b" /api/" in head.split(b"\r\n")[0]:
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(listing), listing))
                continue
            asked = re.search(rb"range: bytes=(\d+)-(\d+)", head, re.IGNORECASE)
            start, end = (int(asked.group(1)), int(asked.group(2))) if asked else (0, size - 1)
            status = (
                b"206 Partial Content\r\nContent-Range: bytes %d-%d/%d" % (start, end, size) if asked else b"200 OK"
            )
            client.sendall(b'HTTP/1.1 %s\r\nETag: "e"\r\nContent-Length: %d\r\n\r\n' % (status, end + 1 - start))
            try:
                while start <= end:
                    start += os.sendfile(client.fileno(), file.fileno(), start, end + 1 - start)
            except OSError:
                return


def ours(url: str, folder: Path) -> float:
    """Seconds of a pull."""
    here = Shop(Places(folder), HubSettings(url), Limits())
    here.reserve_bytes = 0
    begun = time.perf_counter()
    here.execute(here.resolve(names.parse(REPO), Wish())[0], lambda n: None)
    passed = time.perf_counter() - begun
    shutil.rmtree(folder)
    return passed


def curls(url: str, folder: Path) -> float:
    """Seconds of curl, as a process."""
    folder.mkdir()
    begun = time.perf_counter()
    subprocess.run(["curl", "-sf", "-o", str(folder / "file"), f"{url}/{REPO}/resolve/{COMMIT}/{FILE}"], check=True)
    passed = time.perf_counter() - begun
    shutil.rmtree(folder)
    return passed


def main() -> None:
    """Alternates, and writes the board."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--no-board", action="store_true")
    arguments = parser.parse_args()
    size = parse_size(arguments.size)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        path = Path(scratch) / "served"
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for _ in range(size >> 20):
                block = os.urandom(1 << 20)
                digest.update(block)
                file.write(block)
        port: multiprocessing.Queue[int] = multiprocessing.Queue()
        server = multiprocessing.Process(target=serve, args=(str(path), digest.hexdigest(), port), daemon=True)
        server.start()
        url = f"http://127.0.0.1:{port.get()}"
        samples: dict[str, list[float]] = {"ours": [], "curl": []}
        for number in range(arguments.rounds + 1):
            for name, one in (("ours", ours), ("curl", curls)):
                passed = one(url, Path(scratch) / name)
                if number:
                    samples[name].append(size / 2**20 / passed)
        server.kill()
    if arguments.no_board:
        sys.stdout.write("".join(f"{k}: {', '.join(f'{s:.0f}' for s in v)} MiB/s\n" for k, v in samples.items()))
        return
    rows = [board.row("cpu.pull.loopback", samples["ours"], "MiB/s", peer=("curl", samples["curl"]))]
    version = subprocess.run(["curl", "--version"], capture_output=True, text=True).stdout.split()[1]
    board.write("cpu2", "download", rows, size_bytes=size, curl=version, python=sys.version.split()[0])


if __name__ == "__main__":
    main()
