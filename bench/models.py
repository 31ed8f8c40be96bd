"""Whole-model prefill and decode on the CPU pack against llama.cpp: same file, same threads, same run, alternating.

Usage: python -m bench.models MODELS_DIR [--llama-bin DIR] [--threads 2] [--rounds 3] [--only NAME]
pp512: prompt processing of 512 tokens; tg128: 128 decoded tokens after an empty prompt; c8: 8 streams x (64 prompt + 64 decoded).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import struct
import subprocess
import time
from pathlib import Path

import numpy as np
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device
from paddock_runner.pack.library import find_pack

from bench import board

MODELS = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen2.5-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "gemma3-270m": "gemma3-270m-q4_k_m.gguf",
}
N_PROMPT, N_DECODE, N_STREAMS, STREAM_PROMPT, STREAM_DECODE = 512, 128, 8, 64, 64


class Driver:
    """Drives steps of a device by hand: the kernels' speed without the engine."""

    def __init__(self, device: Device) -> None:
        self.device, self.seq = device, 0
        self.random = np.random.default_rng(5)
        device.grow_pages(N_STREAMS * device.state.slot_pages + 1)

    def step(self, slots: range, n_tokens: int, texts: np.ndarray | None = None) -> None:
        """One step: the same number of tokens for every slot, all sampled; texts given: the slots begin anew with them."""
        self.seq += 1
        state, n = self.device.state, len(slots)
        new, pages, runs, payload = b"", [], [], b""
        if texts is not None:
            sampling = abi.pk_sampling(0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)
            sampling.prompt_length, sampling.max_length, sampling.n_logprobs = n_tokens, state.max_ctx_tokens, -1
            for s in slots:
                new += bytes(abi.pk_new_slot(s, 0, 0, 0, sampling))
                pages += [(s, i, 1 + s * state.slot_pages + i, 0) for i in range(state.slot_pages)]
                runs.append((s, 0, n_tokens, s * n_tokens))
            payload = texts.astype(np.int32).tobytes()
        head = abi.pk_step_head(self.seq, n * n_tokens, n, n, len(new) // ctypes.sizeof(abi.pk_new_slot), len(pages), len(runs), 0, len(payload) // 4)
        rows = [(s, n_tokens, abi.PK_ROW_SAMPLE, 0) for s in slots]
        blob = bytes(head) + new + b"".join(struct.pack("4i", *e) for e in [*rows, *pages, *runs]) + payload
        buffer = (ctypes.c_uint64 * (len(blob) // 8 + 1))()
        ctypes.memmove(buffer, blob, len(blob))
        self.device.step(ctypes.addressof(buffer))
        if not self.device.wait(self.seq, 600_000_000):
            raise RuntimeError("a step took ten minutes")

    def rate(self, n_streams: int, n_prompt: int, n_decode: int) -> tuple[float, float]:
        """(prompt tokens per second, decoded tokens per second over all streams)."""
        slots = range(n_streams)
        texts = self.random.integers(0, self.device.state.n_vocab - 512, (n_streams, n_prompt))
        t0 = time.perf_counter()
        self.step(slots, n_prompt, texts)
        t1 = time.perf_counter()
        for _ in range(n_decode):
            self.step(slots, 1)
        t2 = time.perf_counter()
        return n_streams * n_prompt / (t1 - t0), n_streams * n_decode / (t2 - t1) if n_decode else 0.0


def open_driver(path: Path, threads: int, kv_format: str = "f16") -> Driver:
    """A driver on the CPU pack."""
    checkpoint = open_checkpoint(path)
    blueprint = read_blueprint(checkpoint)
    ctx = 1024
    sizes = StateSizes(N_STREAMS, ctx, 16, N_STREAMS * ctx // 16 + 1, blueprint.n_vocab, max(N_PROMPT, N_STREAMS * STREAM_PROMPT), N_STREAMS)
    device = build_device(Assembly(find_pack("cpu"), sizes, kv_format, n_threads=threads), blueprint, tensors_by_name(checkpoint, blueprint))
    return Driver(device)


def llama_bench(folder: Path, path: Path, threads: int) -> tuple[float, float]:
    """llama.cpp's pp512 and tg128, tokens per second."""
    command = [folder / "llama-bench", "-m", path, "-t", threads, "-p", N_PROMPT, "-n", N_DECODE, "-r", 1, "-o", "json"]
    out = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout
    found = {(r["n_prompt"], r["n_gen"]): r["avg_ts"] for r in json.loads(out)}
    return found[(N_PROMPT, 0)], found[(0, N_DECODE)]


def llama_streams(folder: Path, path: Path, threads: int) -> float:
    """llama.cpp's decode throughput at 8 streams, tokens per second."""
    command = [folder / "llama-batched-bench", "-m", path, "-t", threads, "-c", 2048, "-b", 512, "-npp", STREAM_PROMPT, "-ntg", STREAM_DECODE, "-npl", N_STREAMS]
    out = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout
    cells = [line.strip("| ").split("|") for line in out.splitlines() if line.startswith("|")]
    at = [c.strip() for c in cells[0]].index("S_TG t/s")
    return float(cells[-1][at])


def measure(name: str, path: Path, arguments: argparse.Namespace) -> list[dict]:
    """The rows of one model."""
    driver = open_driver(path, arguments.threads)
    ours: dict[str, list[float]] = {"pp512": [], "tg128": [], "c8": []}
    theirs: dict[str, list[float]] = {"pp512": [], "tg128": [], "c8": []}
    driver.rate(1, N_PROMPT, 4)  # llama-bench warms up too
    for _ in range(arguments.rounds):
        ours["pp512"].append(driver.rate(1, N_PROMPT, 0)[0])
        ours["tg128"].append(driver.rate(1, 1, N_DECODE)[1])
        ours["c8"].append(driver.rate(N_STREAMS, STREAM_PROMPT, STREAM_DECODE)[1])
        if arguments.llama_bin:
            pp, tg = llama_bench(arguments.llama_bin, path, arguments.threads)
            theirs["pp512"].append(pp)
            theirs["tg128"].append(tg)
            theirs["c8"].append(llama_streams(arguments.llama_bin, path, arguments.threads))
    driver.device.close()
    peer = "llama.cpp (llama-cpp-python 0.3.36, AVX-512 VNNI)"
    return [board.row(f"cpu.{name}.{k}", v, "tok/s", peer=(peer, theirs[k]) if theirs[k] else None) for k, v in ours.items()]


def main() -> None:
    """Measures every model at hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only")
    arguments = parser.parse_args()
    rows = []
    for name, file in MODELS.items():
        if arguments.only in (None, name) and (arguments.models / file).exists():
            rows += measure(name, arguments.models / file, arguments)
    board.write("cpu2", "models", rows, threads=arguments.threads)


if __name__ == "__main__":
    main()
