"""A session leaves the device and comes back: from host memory and from disk, beside what the link and the disk can do, and with the same answer.

Usage: python -m bench.tiers MODEL [--pack PACK] [--tokens 32768] [--disk-tokens 2048] [--host-tokens 0] [--folder DIR] [--rounds 3] [--machine NAME]
The engine runs in this process. A prompt is answered; its pages are evicted (to host memory, and written to disk); it is asked again. What coming back took is
the time to its first token less that of the same prompt whose pages are on the device. The link's rate is that of one large copy; the disk's that of reading the store's files
from the start to the end, the kernel having been told to forget them. With --host-tokens host memory has room for so many tokens only (64 pages at least): only coming back from disk is measured then, piece by piece.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from array import array
from pathlib import Path
from time import perf_counter, sleep

from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine import fetches
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.engine.loop import Engine
from paddock_runner.engine.process import Runner, freeze
from paddock_runner.engine.tiering import TierConfig
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.plan import PlanRequest, cpu_facts, cuda_facts, state_sizes
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack.device import Device
from paddock_runner.pack.library import find_pack
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.messages import Ask, Done, StepResult
from paddock_runner.wire.port import EnginePort, FrontPort

from bench import board

ANSWER = 16
READ_BYTES = 8 << 20
NAP_S = 0.0003


class Session:
    """An engine with tiers on an open device, and one prompt that is asked again and again."""

    def __init__(self, device: Device, sizes: StateSizes, folder: Path, disk_bytes: int, prompt: list[int], host_tokens: int = 0) -> None:
        channel = Channel.create()
        self.front = FrontPort(channel, True)
        self.engine = Engine(sizes, device, [EnginePort(channel, True)])
        self.engine.launched_seq = self.engine.read_seq = self.engine.slots.seq = int(device.done[0])
        self.runner = Runner(self.engine)
        host_bytes = ((host_tokens or len(prompt)) // self.engine.sizes.page_tokens + 8) * device.kv_page_bytes
        if not device.n_host_pages:
            self.runner.use_tiers(device, TierConfig(host_bytes, disk_bytes, folder, ("bench",)))
        else:
            n, device.alloc_host_pages = device.n_host_pages, lambda n: None  # type: ignore[method-assign]
            self.runner.use_tiers(device, TierConfig(n * device.kv_page_bytes, disk_bytes, folder, ("bench",)))
        assert self.runner.keeper is not None
        self.device, self.tiers, self.prompt, self.n_asked = device, self.runner.keeper.tiers, prompt, 0

    def ask(self) -> tuple[float, list[int], int]:
        """Seconds to the first token, the answer, and cached tokens."""
        self.n_asked += 1
        begun, first, tokens = perf_counter(), 0.0, list[int]()
        self.front.ask(Ask(self.n_asked, array("i", self.prompt), max_tokens=ANSWER, temperature=0.0))
        while True:
            if not self.runner.turn():
                if self.engine.in_flight:
                    self.engine.wait()
                else:
                    sleep(NAP_S)  # as the runner does, which parks: spinning would keep Python from the threads that read files
            for event in self.front.poll():
                if isinstance(event, StepResult):
                    first = first or perf_counter() - begun
                    tokens += [row[1] for row in event.rows]
                elif isinstance(event, Done):
                    while self.engine.in_flight:
                        self.engine.wait()
                        self.engine.read_results()
                    return first, tokens, event.cached_tokens

    def evict(self) -> float:
        """Everything leaves the device; seconds of the copies."""
        self.device.settle()
        begun = perf_counter()
        self.engine.ledger.tree.evict(self.engine.ledger.tree.n_pages)
        self.device.settle()
        return perf_counter() - begun

    def write(self) -> None:
        """Waits until the disk has everything."""
        while self.runner.keeper is not None and (self.runner.keeper.idle() or self.tiers.has_unwritten):
            if not self.tiers.poll():
                sleep(0.001)


def link_gbs(device: Device, n_pages: int) -> tuple[float, float]:
    """Rates of one large copy out and in, GB/s."""
    size = min(n_pages, device.n_host_pages) * device.kv_page_bytes
    found = []
    for to, source in ((device._host_pages, device.kv_address + device.kv_page_bytes), (device.kv_address + device.kv_page_bytes, device._host_pages)):
        times = []
        for _ in range(3):
            device.settle()
            begun = perf_counter()
            device.copy(to, source, size)
            device.settle()
            times.append(perf_counter() - begun)
        found.append(size / min(times) / 1e9)
    return found[0], found[1]


def drop_cache(folder: Path) -> int:
    """The kernel forgets the files; their bytes."""
    n = 0
    for path in folder.rglob("*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        n += os.fstat(fd).st_size
        os.close(fd)
    return n


def disk_gbs(folder: Path) -> float:
    """Reading all files, GB/s."""
    n, begun, buffer = drop_cache(folder), perf_counter(), bytearray(READ_BYTES)
    for path in sorted(folder.rglob("*.kv")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return n / (perf_counter() - begun) / 1e9


def main() -> None:
    """Measures and prints; with --machine writes the board."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--disk-tokens", type=int, default=2048)
    parser.add_argument("--host-tokens", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv", default="")
    parser.add_argument("--machine", default="")
    parser.add_argument("--commit", default="", help="of this tree, where it is no git checkout")
    a = parser.parse_args()
    checkpoint = open_checkpoint(a.model)
    blueprint = read_blueprint(checkpoint)
    pack = a.pack or find_pack("cpu")
    facts = cuda_facts(132) if "cuda" in pack.name else cpu_facts(os.cpu_count() or 1)
    ctx = a.tokens + 64
    request = PlanRequest(ctx, 2, facts, kv_format=a.kv, n_pages=ctx // 32 + 64)
    sizes = state_sizes(blueprint, request)
    device = build_device(Assembly(pack, sizes, request.kv_format), blueprint, tensors_by_name(checkpoint, blueprint))
    device.grow_pages(sizes.n_pages)
    prompt = [300 + (7919 * i) % (blueprint.n_vocab - 300) for i in range(a.tokens)]
    freeze()
    rows = from_host(device, sizes, prompt, a.rounds) if not a.host_tokens else []
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        rows += from_disk(device, sizes, Path(folder), prompt[: a.disk_tokens], a.host_tokens)
    if a.machine:
        rows = [row | {"id": f"{a.machine}.{row['id']}"} for row in rows]
        board.write(a.machine, "tiers", rows, a.commit, model=a.model.name, tokens=a.tokens, page_bytes=device.kv_page_bytes)
    device.close()


def from_host(device: Device, sizes: StateSizes, prompt: list[int], rounds: int) -> list[dict[str, object]]:
    """To host memory and back."""
    session = Session(device, sizes, Path(), 0, prompt)
    _, answer, _ = session.ask()
    n_pages = (len(prompt) - 1) // sizes.page_tokens
    size, out, back = n_pages * device.kv_page_bytes, [], []
    warm = statistics.median(session.ask()[0] for _ in range(3))
    for _ in range(rounds):
        n_before = session.tiers.n_out
        seconds = session.evict()
        if n := session.tiers.n_out - n_before:
            out.append(n * device.kv_page_bytes / seconds / 1e9)
        back.append(size / max(1e-9, came_back(session, answer, n_pages) - warm) / 1e9)
    session.evict()
    link = link_gbs(device, n_pages)
    session.runner.close()
    sys.stdout.write(
        f"{len(prompt)} tokens, {size / 1e9:.2f} GB in {n_pages} pages of {device.kv_page_bytes / 1e6:.2f} MB; first token with pages on the device {1e3 * warm:.1f} ms\n"
        f"out {statistics.median(out):.2f} GB/s of {link[0]:.2f}; back from host {statistics.median(back):.2f} GB/s of {link[1]:.2f} ({statistics.median(back) / link[1]:.2f}); answers equal\n"
    )
    turn = board.row(f"turn{round(len(prompt) / 1000)}k.ttft_ms", [1e3 * warm], "ms", "lower")
    return [turn, board.row("tier.host.resume_gbs", back, "GB/s", limit=link[1]), board.row("tier.host.evict_gbs", out, "GB/s", limit=link[0])]


def from_disk(device: Device, sizes: StateSizes, folder: Path, prompt: list[int], host_tokens: int) -> list[dict[str, object]]:
    """To disk, and back in another engine, which has forgotten everything."""
    session = Session(device, sizes, folder, 1 << 40, prompt, host_tokens)
    _, answer, _ = session.ask()
    n_pages = (len(prompt) - 1) // sizes.page_tokens
    size = n_pages * device.kv_page_bytes
    warm = statistics.median(session.ask()[0] for _ in range(3))
    session.write()
    session.runner.close()
    disk, restart = disk_gbs(folder), Session(device, sizes, folder, 1 << 40, prompt, host_tokens)
    restart.tiers.us = lambda tier, n_pages: 0.0  # type: ignore[method-assign]  # whether reading pays, and how long it is waited for, is not what is measured
    fetches.MAX_FETCH_NS = 60_000_000_000
    drop_cache(folder)
    read = size / max(1e-9, came_back(restart, answer, n_pages) - warm) / 1e9
    restart.runner.close()
    sys.stdout.write(f"{len(prompt)} tokens, {size / 1e9:.2f} GB: from disk by {device.n_host_pages} pages in host memory {read:.2f} GB/s of {disk:.2f} ({read / disk:.2f}); answers equal\n")
    return [board.row("tier.disk.resume_gbs", [read], "GB/s", limit=disk)]


def came_back(session: Session, answer: list[int], n_pages: int) -> float:
    """Asks again; seconds to the first token."""
    first, tokens, cached = session.ask()
    if tokens != answer:
        raise RuntimeError(f"the answer changed: {tokens} for {answer}")
    if cached < n_pages * session.engine.sizes.page_tokens:
        store = session.tiers._store
        more = f", {store.n_bad} bad, {len(store)} in {[n // session.device.kv_page_bytes for n in store._sizes.values()]}" if store is not None else ""
        raise RuntimeError(f"{cached} tokens came back, {n_pages} pages were there: {session.tiers.report()}{more}")
    return first


if __name__ == "__main__":
    main()
