"""Planned bytes against what NVML sees in use: models x contexts x batches, without HTTP.

Usage: python -m bench.fit_matrix [--pack PACK] [--only 8b.fp8 ...] [--ctx 4096 32768 max] [--batch 1 8 32] [--seconds 90] [--out FOLDER] [--done BOARD ...]
       python -m bench.fit_matrix --merge BOARD ... --out FOLDER
A model is SHAPE.KIND (bench/fit_shapes.py and fit_families.py; kinds bf16, fp8, q8_0, q4_k_m, mxfp4) or the path of a checkpoint; with +GIB behind it that much of the
device is for experts, which lie in host memory; with @FORMAT behind it keys and values are kept in that. Each row: the runner's plan
(full contexts, else the largest pool of pages that fits), a device built by that plan as an engine's process builds it, every page given memory,
steps of a whole prompt chunk and of decode for all slots; then NVML's bytes in use less those before. A row holds when it was not planned under and at
most 1 % or 64 MiB over. A model's rows run in one process that loads its weights once (zeros, converted as any are) and takes everything else away
between them; "left" is what that process still had then beyond what it had after its first row (0: every row is as in a process of its own). Rows that a time limit leaves out are named. --merge makes one board of several,
later rows instead of earlier ones, each with its commit. On a machine without a GPU, --device cpu rehearses.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = ["runner", "manager"]

from paddock_manager.fit.history import measure  # noqa: E402
from paddock_manager.fit.nvml import Nvml  # noqa: E402
from paddock_runner import hardware  # noqa: E402
from paddock_runner.blueprint.blueprint import Blueprint  # noqa: E402
from paddock_runner.blueprint.names import tensors_by_name  # noqa: E402
from paddock_runner.blueprint.read import read_blueprint  # noqa: E402
from paddock_runner.engine.assemble import Kept, load_program  # noqa: E402
from paddock_runner.engine.experts import put_away  # noqa: E402
from paddock_runner.errors import PaddockError  # noqa: E402
from paddock_runner.files.checkpoint import open_checkpoint  # noqa: E402
from paddock_runner.files.view import TensorView  # noqa: E402
from paddock_runner.memory.plan import MemoryPlan, PlanRequest, cpu_facts, cuda_facts  # noqa: E402
from paddock_runner.memory.solve import solver  # noqa: E402
from paddock_runner.model import weights as loader  # noqa: E402
from paddock_runner.pack import abi  # noqa: E402
from paddock_runner.pack.device import Device  # noqa: E402
from paddock_runner.pack.library import find_pack, load_pack  # noqa: E402

from bench import board, fit_shapes  # noqa: E402

CTX = {"max": 1 << 40}
SLACK_BYTES, SLACK_SHARE = 64 << 20, 0.01
STILL_BYTES = 1 << 20
Model = tuple[Blueprint, dict[str, TensorView]]


@dataclass(frozen=True)
class Row:
    """One cell of the matrix: a model, the context and batch."""

    model: str
    ctx: int
    batch: int

    @property
    def name(self) -> str:
        """As the board calls it."""
        return f"{Path(self.model).name}.{'max' if self.ctx > 1 << 30 else self.ctx}.b{self.batch}"


@dataclass(frozen=True)
class Ground:
    """Where rows run: the pack, the kind and what was in use before."""

    pack: Path
    kind: str
    memory_bytes: int
    free_bytes: int
    n_processors: int
    name: str
    index: int = 0
    arch: str = ""


def ground(kind: str, pack: Path | None, index: int) -> Ground:
    """The device as it is now. index: NVML's number of the GPU that is CUDA's first here."""
    if kind == "cpu":
        memory = hardware.memory()
        return Ground(pack or find_pack("cpu"), kind, memory.total_bytes, memory.free_bytes, hardware.n_threads(), "cpu")
    with Nvml() as nvml:
        gpu = nvml.gpus()[index]
    found = pack or next(find_pack(n) for n in hardware.pack_names(tuple(int(x) for x in (gpu.arch[3:-1], gpu.arch[-1]))))  # type: ignore[arg-type]
    return Ground(found, kind, gpu.memory_bytes, gpu.free_bytes, gpu.n_processors, gpu.name, index, gpu.arch)


def opened(model: str, folder: Path) -> tuple[Blueprint, dict[str, TensorView]]:
    """A shape, or a checkpoint on disk."""
    model = re.split("[+@]", model)[0]
    if Path(model).exists():
        checkpoint = open_checkpoint(model)
        blueprint = read_blueprint(checkpoint)
        return blueprint, tensors_by_name(checkpoint, blueprint)
    shape, _, kind = model.rpartition(".")
    blueprint = fit_shapes.blueprint(shape)
    return blueprint, fit_shapes.views(blueprint, kind, folder)


def planned(blueprint: Blueprint, views: dict[str, TensorView], row: Row, at: Ground) -> MemoryPlan | None:
    """The runner's plan: full contexts for all slots, else the largest pool; None when it does not fit."""
    facts = cpu_facts(at.n_processors, at.memory_bytes, at.free_bytes) if at.kind == "cpu" else cuda_facts(at.n_processors, at.memory_bytes, at.free_bytes, arch=at.arch)
    model, _, kv = row.model.partition("@")
    gib = model.partition("+")[2]
    request = PlanRequest(min(row.ctx, blueprint.max_ctx_tokens), row.batch, facts, kv, expert_bytes=int(float(gib) * 2**30) if gib else None)
    answer = solver(blueprint, views, at.free_bytes, at.kind)
    fitting = request if answer.fits(request) else answer.shrunk(request)
    return answer.plan(fitting) if fitting else None


class Steps:
    """Steps of made-up prompts, as an engine would send them: every slot has its share of the pool."""

    def __init__(self, device: Device, n_pages: int, is_whole: bool) -> None:
        self.device, self.seq, self.is_whole = device, 0, is_whole
        self.most = min(device.state.slot_pages, n_pages - 1)
        self.share = min(device.state.slot_pages, max(1, (n_pages - 1) // device.state.n_slots))

    def send(self, rows: list[tuple[int, int]], is_new: bool) -> None:
        """One step of (slot, tokens) rows; is_new: the slots begin with that many tokens."""
        self.seq += 1
        state, new, pages, runs, payload = self.device.state, b"", b"", b"", b""
        for slot, n in rows if is_new else []:
            sampling = abi.pk_sampling(0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)
            sampling.prompt_length, sampling.max_length, sampling.n_logprobs = n, state.max_ctx_tokens, -1
            new += bytes(abi.pk_new_slot(slot, 0, 0, 0, sampling))
            pages += b"".join(struct.pack("4i", slot, i, 1 + slot * self.share + i, 0) for i in range(max(self.share, -(-n // state.page_tokens))))
            runs += struct.pack("4i", slot, 0, n, len(payload) // 4)
            payload += struct.pack(f"{n}i", *(1 + i * 31 % 1000 for i in range(n)))
        n = sum(k for _, k in rows)
        head = abi.pk_step_head(self.seq, n, len(rows), len(rows), len(new) // ctypes.sizeof(abi.pk_new_slot), len(pages) // 16, len(runs) // 16, 0, len(payload) // 4)
        blob = bytes(head) + new + b"".join(struct.pack("4i", s, k, abi.PK_ROW_SAMPLE, 0) for s, k in rows) + pages + runs + payload
        buffer = (ctypes.c_uint64 * (len(blob) // 8 + 1))()
        ctypes.memmove(buffer, blob, len(blob))
        self.device.step(ctypes.addressof(buffer))
        if not self.device.wait(self.seq, 60_000_000):
            raise RuntimeError("a step took a minute")

    def work(self) -> None:
        """A prompt as long as a step may be, a short one in every other slot, decode of all and of one. is_whole: prompts only, each in one step."""
        state = self.device.state
        if self.is_whole:
            self.send([(0, min(self.most * state.page_tokens - 1, state.max_step_tokens))], True)
            self.send([(s, min(8, self.share * state.page_tokens)) for s in range(state.n_slots)], True)
            return
        room = self.share * state.page_tokens - 4
        self.send([(0, min(room, state.max_step_tokens))], True)
        rest = range(1, state.n_slots)
        if rest:
            self.send([(s, min(room, 8)) for s in rest], True)
        for _ in range(2):
            self.send([(s, 1) for s in range(state.n_slots)], False)
        self.send([(0, 1)], False)


def skip_reading(views: Mapping[str, TensorView]) -> None:
    """In this process nothing is read from disk: weights are zeros, which are copied and converted as any are; scales of as many numbers are alike."""

    alike = {view.scales.view.n_elements: view for view in views.values() if view.scales is not None}
    scales = {n: read_scales_once(view) for n, view in alike.items()}
    setattr(loader.Staging, "_start", lambda staging, view, start, target: [])  # noqa: B010
    setattr(loader.Staging, "_read_piece", lambda staging, view, start, target, piece: None)  # noqa: B010
    setattr(loader, "read_scales", lambda staging, view: scales[view.scales.view.n_elements] if view.scales is not None else None)  # noqa: B010


def read_scales_once(view: TensorView) -> loader.ScaleValues | None:
    """The scales of a made-up matrix: those of as many numbers are alike."""
    staging = loader.Staging()
    try:
        return loader.read_scales(staging, view)
    finally:
        staging.close()


def used_bytes(at: Ground, nvml: Nvml | None = None) -> int:
    """In use on the GPU, or by this process."""
    if at.kind == "cpu":
        return measure(os.getpid(), "cpu")
    if nvml is None:
        with Nvml() as once:
            return used_bytes(at, once)
    gpu = nvml.gpus()[at.index]
    return gpu.memory_bytes - gpu.free_bytes


def settled_bytes(at: Ground) -> int:
    """In use once a driver has put away what the last process had: two looks that agree."""
    last = -1
    for _ in range(20):
        now = used_bytes(at)
        if at.kind == "cpu" or now == last:
            break
        last = now
        time.sleep(0.1)
    return now


class Room:
    """A device with a model's weights, in which one plan after the other is built and taken away."""

    def __init__(self, model: Model, at: Ground, before: int, n_expert_slots: int) -> None:
        self.model, self.at, self.before = model, at, before
        self.nvml = None if at.kind == "cpu" else Nvml()
        self.device = Device(load_pack(at.pack))
        self.away = put_away(self.device, model[1], n_expert_slots) if n_expert_slots else None
        self.weights = loader.load_weights(self.device, *model, None, self.away.away if self.away else loader.NOWHERE)
        self.n_kept, self.kept = len(self.device._owned), dict(self.device.allocated)

    def measured(self, plan: MemoryPlan) -> dict[str, Any]:
        """What this process takes beyond `before` with that plan, and without it."""
        begun, device = time.monotonic(), self.device
        load_program(device, plan.sizes, Kept(plan.kv_format), self.model[0], self.weights, self.away.caches if self.away else {})
        built, ready = time.monotonic(), self.used()
        device.grow_pages(plan.sizes.n_pages)
        grown = time.monotonic()
        Steps(device, plan.sizes.n_pages, self.model[0].needs_whole_prompts).work()
        used = self.used()
        worked = time.monotonic()
        self.clear()
        seconds = [built - begun, grown - built, worked - grown, time.monotonic() - worked]
        return {"used": used, "ready": ready, "left": self.used(), "seconds": seconds}

    def used(self) -> int:
        """Bytes beyond those before."""
        return used_bytes(self.at, self.nvml) - self.before

    def clear(self) -> None:
        """Takes everything away but the weights."""
        device = self.device
        device.unload()
        for memory, address in device._owned[self.n_kept :]:
            device.pack.function("pk_free")(device._ctx, memory, address)
        for address in device._reserved:
            device.pack.function("pk_release")(device._ctx, address)
        del device._owned[self.n_kept :]
        device._reserved.clear()
        device.allocated, device._attached_bytes = dict(self.kept), 0


def apart(plans: list[tuple[Row, MemoryPlan]], model: Model, at: Ground, before: int) -> Iterator[dict[str, Any]]:
    """One row after the other in a fork, which has the imports and no context yet; {"error"} of the last when it fails."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(write_end, "w") as pipe:
            room = None
            for _, plan in plans:
                try:
                    begun = time.monotonic()
                    if room is None:
                        skip_reading(model[1])
                        room = Room(model, at, before, plan.sizes.n_expert_slots)
                    loaded = time.monotonic() - begun
                    found = {**room.measured(plan), "load_s": loaded}
                except (PaddockError, RuntimeError, OSError) as error:
                    found = {"error": str(error)}
                pipe.write(json.dumps(found) + "\n")
                pipe.flush()
                if "error" in found:
                    break
        os._exit(0)
    os.close(write_end)
    n_told, status = 0, 0
    try:
        with os.fdopen(read_end) as pipe:
            for line in pipe:
                n_told += 1
                yield dict(json.loads(line))
    except GeneratorExit:  # the time is over: it may be in its next row
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    if n_told < len(plans) and status:
        yield {"error": f"the process ended with {status}"}


def cells(arguments: argparse.Namespace, model: str, longest: int) -> Iterator[Row]:
    """The rows of a model. Contexts beyond its own are that one, once; rows of boards that are done are left out."""
    contexts = [CTX[ctx] if ctx in CTX else int(ctx) for ctx in arguments.ctx]
    done = {r["id"] for path in arguments.done for r in json.loads(path.read_text())["rows"]}
    for batch in arguments.batch:
        for ctx in contexts:
            row = Row(model, ctx, batch)
            if (ctx < longest or ctx == max(contexts)) and f"fit.{row.name}.error" not in done:
                yield row


def judge(plan: MemoryPlan, used: int) -> str:
    """"ok", or what is wrong."""
    over = plan.total_bytes - used
    return "UNDER" if over < 0 else "ok" if over <= max(SLACK_BYTES, SLACK_SHARE * used) else "OVER"


def run_model(name: str, arguments: argparse.Namespace, at: Ground, until: float, folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Measures and prints a model's rows, adds each to the board's and writes them: a run that is cut off keeps what it found. Returns those that the
    time left out."""
    model = opened(name, folder)
    waiting: list[tuple[Row, MemoryPlan]] = []
    for row in cells(arguments, name, model[0].max_ctx_tokens):
        plan = planned(*model, row, at)
        if plan is None:
            sys.stdout.write(f"{row.name:36} does not fit\n")
        else:
            waiting.append((row, plan))
    waiting.sort(key=lambda w: w[1].sizes.part_processors)
    while waiting and time.monotonic() < until:
        before, first_left, n_ended = settled_bytes(at), None, 0
        # A device is parted for good: plans without a part come in a process of their own.
        n_part = waiting[0][1].sizes.part_processors
        started = [(row, plan) for row, plan in waiting if plan.sizes.part_processors == n_part]
        results = apart(started, model, at, before)
        for (row, plan), found in zip(started, results, strict=False):
            n_ended += 1
            if "error" in found:
                sys.stdout.write(f"{row.name:36} {plan.total_bytes / 2**20:9.0f} FAILED {found['error'][:200]}\n")
                break
            first_left = found["left"] if first_left is None else first_left
            rows.append(told(row, plan, found, found["left"] - first_left))
            write(arguments, at, rows)
            if time.monotonic() > until:
                break
        results.close()  # type: ignore[attr-defined]
        if abs(settled_bytes(at) - before) > STILL_BYTES:
            sys.stdout.write(f"{name:36} another program's memory came or went meanwhile\n")
            for measured_row in rows[-n_ended:]:
                measured_row["still"] = False
            write(arguments, at, rows)
        waiting = waiting[n_ended:]
    return [row.name for row, _ in waiting]


def write(arguments: argparse.Namespace, at: Ground, rows: list[dict[str, Any]]) -> None:
    """The board so far."""
    if arguments.out:
        made = board.document("h200", rows, arguments.commit, gpu=at.name, n_processors=at.n_processors)
        (arguments.out / arguments.file).write_text(json.dumps(made, indent=1) + "\n")


def told(row: Row, plan: MemoryPlan, found: dict[str, Any], left: int) -> dict[str, Any]:
    """Prints one row; the board's."""
    used, full = found["used"], plan.pool_tokens >= plan.sizes.max_ctx_tokens * row.batch
    word = judge(plan, used)
    times = " + ".join(f"{s:.2f}" for s in (found["load_s"], *found["seconds"]))
    sys.stdout.write(
        f"{row.name:36} {plan.total_bytes / 2**20:9.0f} {used / 2**20:9.0f} {(plan.total_bytes - used) / 2**20:8.1f} {100 * (plan.total_bytes / used - 1):7.3f} {word:5} "
        f"{'full' if full else 'shared':6} ready {found['ready'] / 2**20:.0f} left {left / 2**20:.1f} s {times}\n"
    )
    sys.stdout.flush()
    line = board.row(f"fit.{row.name}.error", [plan.total_bytes / used - 1], "ratio", "lower")
    return line | {
        "planned_bytes": plan.total_bytes, "measured_bytes": used, "left_bytes": left, "ctx": plan.sizes.max_ctx_tokens, "pool": "full" if full else "shared", "holds": word == "ok",
        "graphs_bytes": plan.group_bytes("graphs"), "process_bytes": plan.group_bytes("process"),
    }  # fmt: skip


def merged(arguments: argparse.Namespace) -> int:
    """Writes one board of several."""
    boards = [json.loads(path.read_text()) for path in arguments.merge]
    rows = {row["id"]: {"commit": found["commit"], **row} for found in boards for row in found["rows"]}
    whole = boards[-1] | {"command": "python -m bench.fit_matrix, in several runs", "rows": [rows[key] for key in sorted(rows)]}
    (arguments.out / arguments.file).write_text(json.dumps(whole, indent=1) + "\n")
    sys.stdout.write(f"{sum(r['holds'] for r in rows.values())} of {len(rows)} rows hold\n")
    return 0


def main() -> int:
    """Runs rows until they are done or the time is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--gpu", type=int, default=0, help="NVML's number of the GPU that CUDA_VISIBLE_DEVICES shows")
    parser.add_argument("--only", nargs="*", default=fit_shapes.MODELS)
    parser.add_argument("--ctx", nargs="*", default=["4096", "32768", "max"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--file", default="fit.json")
    parser.add_argument("--commit", default="")
    parser.add_argument("--done", nargs="*", type=Path, default=[], help="boards whose rows are not measured again")
    parser.add_argument("--merge", nargs="*", type=Path, help="boards to make one of")
    arguments = parser.parse_args()
    if arguments.merge and not arguments.out:
        parser.error("--merge needs --out, the folder of the board that it writes")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.merge:
        return merged(arguments)
    at = ground(arguments.device, arguments.pack.resolve() if arguments.pack else None, arguments.gpu)
    sys.stdout.write(f"{at.name}: {at.n_processors} processors, {at.free_bytes / 2**20:.0f} of {at.memory_bytes / 2**20:.0f} MiB free\n")
    sys.stdout.write(f"{'row':36} {'planned':>9} {'used MiB':>9} {'over MiB':>8} {'%':>7}\n")
    begun, rows, left = time.monotonic(), list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.only:
            if time.monotonic() - begun > arguments.seconds:
                left.append(model)
                continue
            left += run_model(model, arguments, at, begun + arguments.seconds, Path(scratch), rows)
    holds = sum(r["holds"] for r in rows)
    sys.stdout.write(f"{holds} of {len(rows)} rows hold in {time.monotonic() - begun:.0f} s" + (f"; left out: {' '.join(left)}\n" if left else "\n"))
    return 0 if holds == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
