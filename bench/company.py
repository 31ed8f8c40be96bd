"""Whole models in a deterministic context: the same prompts one by one, all together, and cut at random among others. Which layer is the first whose keys, values or states differ.

Usage: python -m bench.company PACK [--models 0.6b.bf16 0.6b.fp8 8b.q4_k_m 30b-a3b.fp8 27b.bf16] [--layers 4] [--prompts 12] [--longest 700] [--out 12] [--cuts 4] [--seed 1] [--machine NAME]
Weights are random (bench.gpu_models, bench.gpu_hybrids). Keys and values of every layer are compared bit for bit, a page at a time, and so are recurrent states, drawn tokens and
their log-probabilities. Ends with 1 when anything differs. --others opens a context that is not deterministic: differences are to be expected then, and show that this finds some.
"""

from __future__ import annotations

import argparse
import ctypes
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from paddock_runner.blueprint.blueprint import Blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.files.view import TensorView
from paddock_runner.memory.state import PageLayout, StateSizes, page_layout, state_layout
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device

from . import board, gpu_hybrids, gpu_models

PAGE_TOKENS, STEP_TOKENS = 16, 2048


@dataclass
class Found:
    """What one way of running the prompts left. drawn: per prompt (token, log-probability) in order; pages and states: per prompt raw bytes."""

    drawn: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    pages: dict[int, np.ndarray] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """What a model is asked. longest: of prompts; n_cuts: ways of cutting them at random; kv_format: of keys and values."""

    n_prompts: int = 12
    longest: int = 700
    n_out: int = 12
    n_cuts: int = 4
    seed: int = 1
    kv_format: str = "bf16"
    is_invariant: bool = True


@dataclass
class Company:
    """A device, and the prompts that it is asked."""

    device: Device
    layout: PageLayout
    prompts: list[np.ndarray]
    n_out: int
    seq: int = 0

    def step(self, rows: list[tuple[int, int]], at: dict[int, int], found: Found) -> None:
        """Runs rows (prompt, tokens), whose slots are at those positions; what they draw is added."""
        self.seq += 1
        new, pages, runs, payload, state = b"", b"", b"", b"", self.device.state
        flags = {k: abi.PK_ROW_SAMPLE if at[k] + n >= len(self.prompts[k]) else 0 for k, n in rows}
        for k, _ in rows:
            if at[k]:
                continue
            text = self.prompts[k].astype(np.int32)
            # Greedy, and every other one drawn.
            sampling = abi.pk_sampling(0.8 * (k % 2), 0.95, 0.0, 1.0, 1.0 + 0.1 * (k % 2), 0.0, 0.0)
            sampling.prompt_length, sampling.max_length, sampling.n_logprobs, sampling.seed = len(text), state.max_ctx_tokens, 0, k
            new += bytes(abi.pk_new_slot(k, 0, 0, 0, sampling))
            pages += b"".join(struct.pack("4i", k, i, 1 + k * state.slot_pages + i, 0) for i in range(state.slot_pages))
            runs += struct.pack("4i", k, 0, len(text), len(payload) // 4)
            payload += text.tobytes()
        n_samples = sum(1 for f in flags.values() if f)
        head = abi.pk_step_head(self.seq, sum(n for _, n in rows), len(rows), n_samples, len(new) // ctypes.sizeof(abi.pk_new_slot), len(pages) // 16, len(runs) // 16, 0, len(payload) // 4)
        blob = bytes(head) + new + b"".join(struct.pack("4i", k, n, flags[k], 0) for k, n in rows) + pages + runs + payload
        buffer = (ctypes.c_uint64 * (len(blob) // 8 + 1))()
        ctypes.memmove(buffer, blob, len(blob))
        self.device.step(ctypes.addressof(buffer))
        if not self.device.wait(self.seq, 60_000_000):
            raise RuntimeError("a step took a minute")
        first = self.seq % state.n_results * state.max_step_rows
        for r, (k, n) in enumerate(rows):
            at[k] += n
            _, token, told, _, logprob, _ = struct.unpack_from("4i4si", bytes(self.device.results[(first + r) * 24 : (first + r + 1) * 24]))
            if told & ~abi.PK_ROW_SAMPLE:
                raise RuntimeError(f"prompt {k}: a row ended with flags {told}")
            if flags[k]:
                found.drawn.setdefault(k, []).append((token, logprob))

    def run(self, steps: Iterator[list[tuple[int, int]]], at: dict[int, int]) -> Found:
        """Every step; then what lies in pages and states."""
        self.device.fill(self.device.kv_address, 0, self.device.page_bytes * (1 + len(self.prompts) * self.device.state.slot_pages))
        if self.device.state.recurrent:
            self.device.fill(self.device.state.recurrent, 0, self.device.state.recurrent_stride * len(self.prompts))
        found = Found()
        for rows in steps:
            self.step(rows, at, found)
        size, each = self.device.page_bytes, self.device.state.slot_pages
        for k, text in enumerate(self.prompts):
            n = -(-(len(text) + self.n_out - 1) // PAGE_TOKENS)
            found.pages[k] = np.frombuffer(self.device.read(self.device.kv_address + (1 + k * each) * size, n * size), np.uint8).reshape(n, size)
            if self.device.state.recurrent:
                stride = self.device.state.recurrent_stride
                found.states[k] = self.device.read(self.device.state.recurrent + k * stride, stride)
        return found

    def left(self, k: int, at: dict[int, int]) -> int:
        """Tokens that are still to be run of a prompt and its answer; the last one drawn is not."""
        return len(self.prompts[k]) + self.n_out - 1 - at[k]

    def alone(self, at: dict[int, int]) -> Iterator[list[tuple[int, int]]]:
        """Each by itself: the prompt in one step, then token by token."""
        for k, text in enumerate(self.prompts):
            yield [(k, len(text))]
            while self.left(k, at):
                yield [(k, 1)]

    def together(self, at: dict[int, int]) -> Iterator[list[tuple[int, int]]]:
        """As many prompts a step as it has room for, then all answers together."""
        rows: list[tuple[int, int]] = []
        for k, text in enumerate(self.prompts):
            if sum(n for _, n in rows) + len(text) > STEP_TOKENS:
                yield rows
                rows = []
            rows.append((k, len(text)))
        yield rows
        while self.left(0, at):
            yield [(k, 1) for k in range(len(self.prompts))]

    def cut(self, at: dict[int, int], rng: np.random.Generator) -> Iterator[list[tuple[int, int]]]:
        """Some of them a step, in pieces of any size, answers beside prompts."""
        while some := [k for k in range(len(self.prompts)) if self.left(k, at)]:
            rows: list[tuple[int, int]] = []
            for k in rng.permutation(some)[: int(rng.integers(1, len(some) + 1))]:
                room, rest = STEP_TOKENS - sum(n for _, n in rows), len(self.prompts[k]) - at[int(k)]
                n = 1 if rest < 1 else min(rest, room, int(rng.choice([1, 7, 40, 129, 300, 2000])))
                rows += [(int(k), n)] if n > 0 and room > 0 else []
            yield rows


def differences(c: Company, name: str, found: Found, other: Found) -> list[str]:
    """A sentence for each prompt of which something is not the same: the first layer, and the pages."""
    told = []
    ends = sorted({at for pair in c.layout.offsets for at in pair} | {c.layout.page_bytes})
    for k in range(len(c.prompts)):
        where: list[str] = []
        for layer, (k_at, v_at) in enumerate(c.layout.offsets):
            for what, begin in (("keys", k_at), ("values", v_at)):
                end = next(e for e in ends if e > begin)
                pages = np.nonzero((found.pages[k][:, begin:end] != other.pages[k][:, begin:end]).any(1))[0]
                if len(pages) and not where:
                    where.append(f"{what} of layer {layer} in {len(pages)} of {len(found.pages[k])} pages from {pages[0]} on")
        if found.states and found.states[k] != other.states[k]:
            apart = np.nonzero(np.frombuffer(found.states[k], np.uint8) != np.frombuffer(other.states[k], np.uint8))[0]
            where.append(f"{len(apart)} bytes of states from {apart[0]} on")
        draws = [i for i, (a, b) in enumerate(zip(found.drawn[k], other.drawn[k], strict=True)) if a != b]
        if draws:
            where.append(f"draw {draws[0]}")
        if where:
            told.append(f"{name}: prompt {k} of {len(c.prompts[k])} tokens: {', '.join(where)}")
    return told


def model_of(name: str, n_layers: int, folder: Path) -> tuple[Blueprint, dict[str, TensorView]]:
    """Blueprint and tensors of SIZE.FORMAT."""
    size, kind = name.rsplit(".", 1)
    if size in gpu_models.SHAPES:
        plan = gpu_models.blueprint(size)
        plan = replace(plan, layers=plan.layers[:n_layers])
        return plan, gpu_models.views(plan, kind, folder)
    plan = gpu_hybrids.blueprint(size, n_layers)
    return plan, gpu_hybrids.views(plan, folder, {"fp8": "fp8_e4m3"}.get(kind, kind))


def check(pack: Path, plan: Blueprint, tensors: dict[str, TensorView], asked: Asked) -> list[str]:
    """One model: what differs."""
    rng = np.random.default_rng(asked.seed)
    prompts = [rng.integers(0, plan.n_vocab, int(n)) for n in rng.integers(asked.longest // 16, asked.longest, asked.n_prompts)]
    ctx = -(-(asked.longest + asked.n_out) // 512) * 512
    n_pages = 1 + len(prompts) * (ctx // PAGE_TOKENS)
    sizes = StateSizes(len(prompts), ctx, PAGE_TOKENS, n_pages, plan.n_vocab, STEP_TOKENS, len(prompts), 8, 5, 8, recurrent_bytes=state_layout(plan).slot_bytes)
    device = build_device(Assembly(pack, sizes, asked.kv_format, is_invariant=asked.is_invariant), plan, tensors)
    try:
        device.grow_pages(n_pages)
        c = Company(device, page_layout(plan, asked.kv_format, PAGE_TOKENS), prompts, asked.n_out)
        at = dict.fromkeys(range(len(prompts)), 0)
        whole = c.run(c.alone(at), at)
        ways = [("together", c.together)] + [(f"cut {i}", lambda at, i=i: c.cut(at, np.random.default_rng((asked.seed, i)))) for i in range(asked.n_cuts)]
        told: list[str] = []
        for way, steps in ways:
            at = dict.fromkeys(range(len(prompts)), 0)
            told += differences(c, way, c.run(steps(at), at), whole)
        return told
    finally:
        device.close()


def main() -> int:
    """Runs, prints what differs; 1 when something does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--models", nargs="*", default=["0.6b.bf16"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--longest", type=int, default=700)
    parser.add_argument("--out", type=int, default=12)
    parser.add_argument("--cuts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv", default="bf16", help="format of keys and values")
    parser.add_argument("--others", action="store_true", help="in a context that is not deterministic")
    parser.add_argument("--machine", default="", help="writes the board")
    parser.add_argument("--commit", default="", help="of this tree, where it is no git checkout")
    options = parser.parse_args()
    n, asked = 0, Asked(options.prompts, options.longest, options.out, options.cuts, options.seed, options.kv, not options.others)
    for name in options.models:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            told = check(options.pack, *model_of(name, options.layers, Path(folder)), asked)
        sys.stdout.write(f"{name}, {options.kv}: {len(told)} of {options.prompts * (1 + options.cuts)} answers differ\n" + "".join(f"  {line}\n" for line in told[:12]))
        sys.stdout.flush()
        n += len(told)
        if options.machine:
            kept = name if options.kv == "bf16" else f"{name}.kv-{options.kv}"
            board.write(options.machine, "company", [board.row(f"{options.machine}.company.{kept}.differ", [len(told)], "answers", "lower")], options.commit, layers=options.layers, answers=options.prompts * (1 + options.cuts))
    return 1 if n else 0


if __name__ == "__main__":
    sys.exit(main())
