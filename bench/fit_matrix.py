"""Planned bytes against what NVML sees in use: models x contexts x batches, a process each, without HTTP.

Usage: python -m bench.fit_matrix [--pack PACK] [--only 8b.fp8 ...] [--ctx 4096 32768 max] [--batch 1 8 32] [--seconds 90] [--out FOLDER]
A model is SHAPE.KIND (bench/fit_shapes.py; kinds bf16, fp8, q8_0, q4_k_m, mxfp4) or the path of a checkpoint. Each row: the runner's
plan (full contexts, else the largest pool of pages that fits), a device built by that plan as an engine's process builds it, every page
given memory, steps of a whole prompt chunk and of decode for all slots; then NVML's bytes in use less those before. Large weights are read
from disk in a model's first row only, and made up in the others. A row holds when it was not planned under
and at most 1 % or 64 MiB over. Rows that a time limit leaves out are named. On a machine without a GPU, --device cpu rehearses.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
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
from paddock_runner.engine.assemble import Assembly, build_device  # noqa: E402
from paddock_runner.errors import PaddockError  # noqa: E402
from paddock_runner.files.checkpoint import open_checkpoint  # noqa: E402
from paddock_runner.files.view import TensorView  # noqa: E402
from paddock_runner.memory.plan import MemoryPlan, PlanRequest, cpu_facts, cuda_facts, with_pages  # noqa: E402
from paddock_runner.memory.solve import solver  # noqa: E402
from paddock_runner.model.weights import Staging  # noqa: E402
from paddock_runner.pack import abi  # noqa: E402
from paddock_runner.pack.device import Device  # noqa: E402
from paddock_runner.pack.library import find_pack  # noqa: E402

from bench import board, fit_shapes  # noqa: E402

MODELS = ["8b.fp8", "8b.bf16", "8b.q4_k_m", "27b-hybrid.fp8", "30b-a3b.fp8", "gpt-oss-20b.mxfp4", "gemma-12b.bf16", "llama-8b.q8_0", "granite-h-tiny.bf16", "lfm2-1.2b.bf16", "0.6b.bf16"]  # fmt: skip
CTX = {"max": 1 << 40}
SLACK_BYTES, SLACK_SHARE = 64 << 20, 0.01
LARGE_BYTES, STILL_BYTES = 1 << 20, 1 << 20


@dataclass(frozen=True)
class Row:
    """One cell of the matrix: a model, the context and batch, and whether the weights' bytes are read."""

    model: str
    ctx: int
    batch: int
    reads: bool


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


def ground(kind: str, pack: Path | None, index: int) -> Ground:
    """The device as it is now. index: NVML's number of the GPU that is CUDA's first here."""
    if kind == "cpu":
        memory = hardware.memory()
        return Ground(pack or find_pack("cpu"), kind, memory.total_bytes, memory.free_bytes, hardware.n_threads(), "cpu")
    with Nvml() as nvml:
        gpu = nvml.gpus()[index]
    found = pack or next(find_pack(n) for n in hardware.pack_names(tuple(int(x) for x in (gpu.arch[3:-1], gpu.arch[-1]))))  # type: ignore[arg-type]
    return Ground(found, kind, gpu.memory_bytes, gpu.free_bytes, gpu.n_processors, gpu.name, index)


def opened(model: str, folder: Path) -> tuple[Blueprint, dict[str, TensorView]]:
    """A shape, or a checkpoint on disk."""
    if Path(model).exists():
        checkpoint = open_checkpoint(model)
        blueprint = read_blueprint(checkpoint)
        return blueprint, tensors_by_name(checkpoint, blueprint)
    shape, _, kind = model.rpartition(".")
    blueprint = fit_shapes.blueprint(shape)
    return blueprint, fit_shapes.views(blueprint, kind, folder)


def planned(blueprint: Blueprint, views: dict[str, TensorView], row: Row, at: Ground) -> MemoryPlan | None:
    """The runner's plan: full contexts for all slots, else the largest pool; None when it does not fit."""
    facts = (cpu_facts if at.kind == "cpu" else cuda_facts)(at.n_processors, at.memory_bytes, at.free_bytes)
    request = PlanRequest(min(row.ctx, blueprint.max_ctx_tokens), row.batch, facts)
    answer = solver(blueprint, views, at.free_bytes, at.kind)
    if answer.fits(request):
        return answer.plan(request)
    pages = answer.most_pages(request)
    return answer.plan(with_pages(request, pages)) if pages else None


class Steps:
    """Steps of made-up prompts, as an engine would send them: every slot has its share of the pool."""

    def __init__(self, device: Device, n_pages: int) -> None:
        self.device, self.seq = device, 0
        self.share = min(device.state.slot_pages, max(1, (n_pages - 1) // device.state.n_slots))

    def send(self, rows: list[tuple[int, int]], is_new: bool) -> None:
        """One step of (slot, tokens) rows; is_new: the slots begin with that many tokens."""
        self.seq += 1
        state, new, pages, runs, payload = self.device.state, b"", b"", b"", b""
        for slot, n in rows if is_new else []:
            sampling = abi.pk_sampling(0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)
            sampling.prompt_length, sampling.max_length, sampling.n_logprobs = n, state.max_ctx_tokens, -1
            new += bytes(abi.pk_new_slot(slot, 0, 0, 0, sampling))
            pages += b"".join(struct.pack("4i", slot, i, 1 + slot * self.share + i, 0) for i in range(self.share))
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
        """A prompt as long as a step may be, a short one in every other slot, decode of all and of one."""
        state = self.device.state
        room = self.share * state.page_tokens - 4
        self.send([(0, min(room, state.max_step_tokens))], True)
        rest = range(1, state.n_slots)
        if rest:
            self.send([(s, min(room, 8)) for s in rest], True)
        for _ in range(2):
            self.send([(s, 1) for s in range(state.n_slots)], False)
        self.send([(0, 1)], False)


def _skip_reading() -> None:
    """In this process, large weights are whatever lies in the staging buffer: they are copied and repacked as any, but not read."""
    read = Staging.read

    def small(self: Staging, view: TensorView) -> memoryview:
        if view.n_bytes < LARGE_BYTES:
            return read(self, view)
        if len(self._buffer) < view.n_bytes:
            self._buffer = mmap.mmap(-1, view.n_bytes)
        return memoryview(self._buffer)[: view.n_bytes]

    Staging.read = small  # type: ignore[method-assign]


def used_bytes(at: Ground) -> int:
    """In use on the GPU, or by this process."""
    if at.kind == "cpu":
        return measure(os.getpid(), "cpu")
    with Nvml() as nvml:
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


def child(row: Row, plan: MemoryPlan, blueprint: Blueprint, views: dict[str, TensorView], at: Ground) -> dict[str, Any]:
    """What a process of that plan takes. Runs in a process of its own."""
    if not row.reads:
        _skip_reading()
    before, begun = used_bytes(at), time.monotonic()
    device = build_device(Assembly(at.pack, plan.sizes, plan.kv_format), blueprint, views)
    built, ready = time.monotonic(), used_bytes(at) - before
    device.grow_pages(plan.sizes.n_pages)
    grown = time.monotonic()
    Steps(device, plan.sizes.n_pages).work()
    used = used_bytes(at) - before
    return {"used": used, "ready": ready, "build_s": built - begun, "grow_s": grown - built, "steps_s": time.monotonic() - grown}


def apart(row: Row, plan: MemoryPlan, blueprint: Blueprint, views: dict[str, TensorView], at: Ground) -> dict[str, Any]:
    """`child` in a fork, which has the imports and no context yet; {"error"} when it fails."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            found = child(row, plan, blueprint, views, at)
        except (PaddockError, RuntimeError, OSError) as error:
            found = {"error": str(error)}
        with os.fdopen(write_end, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        words = pipe.read()
    _, status = os.waitpid(pid, 0)
    return dict(json.loads(words)) if words else {"error": f"the process ended with {status}"}


def cells(arguments: argparse.Namespace) -> Iterator[Row]:
    """Every row, model by model."""
    for model in arguments.only or MODELS:
        first = True
        for batch in arguments.batch:
            for ctx in arguments.ctx:
                yield Row(model, CTX[ctx] if ctx in CTX else int(ctx), batch, first)
                first = False


def judge(plan: MemoryPlan, used: int) -> str:
    """"ok", or what is wrong."""
    over = plan.total_bytes - used
    return "UNDER" if over < 0 else "ok" if over <= max(SLACK_BYTES, SLACK_SHARE * used) else "OVER"


def run_row(row: Row, at: Ground, model: tuple[Blueprint, dict[str, TensorView]]) -> dict[str, Any] | None:
    """Measures and prints one row; the board's row, or None."""
    blueprint, views = model
    name = f"{Path(row.model).name}.{'max' if row.ctx > 1 << 30 else row.ctx}.b{row.batch}"
    plan = planned(blueprint, views, row, at)
    if plan is None:
        sys.stdout.write(f"{name:34} does not fit\n")
        return None
    begun, before = time.monotonic(), settled_bytes(at)
    found = apart(row, plan, blueprint, views, at)
    passed = time.monotonic() - begun
    if abs(settled_bytes(at) - before) > STILL_BYTES:
        sys.stdout.write(f"{name:34} another program's memory came or went: measured again\n")
        found = apart(row, plan, blueprint, views, at)
    if "error" in found:
        sys.stdout.write(f"{name:34} {plan.total_bytes / 2**20:9.0f} FAILED {found['error'][:160]}\n")
        return None
    used, full = found["used"], plan.pool_tokens >= plan.sizes.max_ctx_tokens * row.batch
    word = judge(plan, used)
    sys.stdout.write(
        f"{name:34} {plan.total_bytes / 2**20:9.0f} {used / 2**20:9.0f} {(plan.total_bytes - used) / 2**20:8.1f} {100 * (plan.total_bytes / used - 1):7.3f} {word:5} "
        f"{'full' if full else 'shared':6} ready {found['ready'] / 2**20:.0f} {passed:.1f} s = {found['build_s']:.1f} + {found['grow_s']:.1f} + {found['steps_s']:.1f}\n"
    )
    sys.stdout.flush()
    line = board.row(f"fit.{name}.error", [plan.total_bytes / used - 1], "ratio", "lower")
    return line | {"planned_bytes": plan.total_bytes, "measured_bytes": used, "pool": "full" if full else "shared", "holds": word == "ok", "reads": row.reads, "graphs_bytes": plan.group_bytes("graphs"), "process_bytes": plan.group_bytes("process")}


def main() -> int:
    """Runs rows until they are done or the time is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--gpu", type=int, default=0, help="NVML's number of the GPU that CUDA_VISIBLE_DEVICES shows")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--ctx", nargs="*", default=["4096", "32768", "max"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--file", default="fit.json")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    at = ground(arguments.device, arguments.pack.resolve() if arguments.pack else None, arguments.gpu)
    sys.stdout.write(f"{at.name}: {at.n_processors} processors, {at.free_bytes / 2**20:.0f} of {at.memory_bytes / 2**20:.0f} MiB free\n")
    sys.stdout.write(f"{'row':34} {'planned':>9} {'used MiB':>9} {'over MiB':>8} {'%':>7}\n")
    begun, rows, left, open_name, model = time.monotonic(), [], [], "", None
    with tempfile.TemporaryDirectory() as scratch:
        for row in cells(arguments):
            if time.monotonic() - begun > arguments.seconds:
                left.append(f"{row.model}/{row.ctx if row.ctx < 1 << 30 else 'max'}/{row.batch}")
                continue
            if row.model != open_name or model is None:
                model, open_name = opened(row.model, Path(scratch)), row.model
            found = run_row(row, at, model)
            rows += [found] if found else []
    holds = sum(r["holds"] for r in rows)
    sys.stdout.write(f"{holds} of {len(rows)} rows hold in {time.monotonic() - begun:.0f} s" + (f"; left out: {' '.join(left)}\n" if left else "\n"))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        made = board.document("h200", rows, arguments.commit, gpu=at.name, n_processors=at.n_processors)
        (arguments.out / arguments.file).write_text(json.dumps(made, indent=1) + "\n")
    return 0 if holds == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
