"""A GPU runner over HTTP: start, planned against measured memory, gaps between steps. One model a call; load cells are bench.gpu_cells'.

Usage: python -m bench.gpu_serve CHECKPOINT NAME --out FOLDER [--pack PACK] [--gaps] [--options ...]
CHECKPOINT: a folder or GGUF of shared/tools/gen (random weights, real tokenizer). Start is from the process's birth to the first
token of the first answer. Measured memory is what NVML says is used, less what it said before the runner started.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench import board, served
from bench.start import stage_table, start_stages

ROOT = Path(__file__).resolve().parent.parent
CELL = re.compile(r"(\d+)/(\d+)c(\d+)")


def used_mib() -> int:
    """Memory in use on the first GPU."""
    out = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"], capture_output=True, text=True, check=True)
    return int(out.stdout.split()[0])


def runner(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
    """paddock-runner of this tree."""
    return subprocess.Popen([sys.executable, "-m", "paddock_runner", *words], cwd=ROOT, **more)


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One request without streaming."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


def load(port: int, cell: str, api: str, n_requests: int, *words: str) -> dict[str, Any]:
    """One cell by bench.load."""
    found = CELL.fullmatch(cell)
    assert found, cell
    n_in, n_out, streams = (int(x) for x in found.groups())
    command = [sys.executable, "-m", "bench.load", "--url", f"http://127.0.0.1:{port}", "--api", api, "--in", str(n_in), "--out", str(n_out)]
    command += ["--concurrency", str(streams), "--requests", str(n_requests), "--seed", str(time.time_ns() % 100000), "--vocab", "150000", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.stdout else {"failed": -1, "errors": [done.stderr[-300:]]}


def gaps(port: int, name: str) -> list[dict[str, Any]]:
    """Gaps between decode steps as the device sees them, answers streaming to clients: the last 1,024 steps are decode alone."""
    rows = []
    for streams in (1, 32, 128):
        figures = load(port, f"16/1100c{streams}", "ids", streams, "--warmup", "0")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/paddock/state", timeout=10) as answer:
            seen = json.load(answer)["engine"]["device_us"]
        sys.stdout.write(f"{name} gaps at {streams}: {json.dumps(seen)} {figures.get('out_tok_s')} tok/s {figures.get('errors')}\n")
        rows += [board.row(f"h200.gap_us.{name}.{streams}.{p}", [seen[f"gap_{p}"]], "us", "lower") for p in ("p50", "p99")]
    return rows


def main() -> int:
    """Starts, measures, stops."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--gaps", action="store_true")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=["--max-ctx", "8448", "--max-batch", "128"])
    a = parser.parse_args()
    served.use_this_tree()
    words = ["--device", "cuda", "--guesses", "off", *(["--kernel-pack", str(a.pack)] if a.pack else []), *a.options]
    planned = json.loads(subprocess.run([sys.executable, "-m", "paddock_runner", "plan", str(a.checkpoint), *words, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)
    planned = planned.get("plan", planned)
    before, rows = used_mib(), []
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state.json"
        born = time.monotonic()
        process = runner(["--model", str(a.checkpoint), "--name", a.name, "--port", "0", "--no-auth", "--state-file", str(state), *words])
        try:
            while not state.exists():
                if process.poll() is not None:
                    return process.returncode or 1
                time.sleep(0.02)
            ready = time.monotonic() - born
            port = json.loads(state.read_text())["port"]
            first = post(port, "/v1/completions", {"model": a.name, "prompt": [100, 200, 300], "max_tokens": 1, "temperature": 0})
            started = time.monotonic() - born
            sys.stdout.write(f"{a.name}: ready after {ready:.2f} s, first token after {started:.2f} s {first.get('usage')}\n")
            rows.append(board.row(f"h200.start_s.{a.name}", [started], "s", "lower"))
            sys.stdout.write(stage_table(start_stages(f"http://127.0.0.1:{port}")))
            board.save(a.out / "start.json", rows, checkpoint=a.checkpoint.name)
            after_ready = used_mib()
            if a.gaps:
                rows += gaps(port, a.name)
            used = (used_mib() - before) * (1 << 20)
            sys.stdout.write(f"{a.name}: planned {planned['total_bytes'] / 2**20:.0f} MiB (device), used {used / 2**20:.0f} MiB, {after_ready - before} MiB when ready\n")
            sys.stdout.write(json.dumps(planned["lines"]) + "\n")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/paddock/state", timeout=10) as answer:
                sys.stdout.write(answer.read().decode()[:1500] + "\n")
        finally:
            process.terminate()
            process.wait(60)
    board.save(a.out / "start.json", rows, checkpoint=a.checkpoint.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
