"""Start to finish of `paddock ls`, `show` and `fit` with 200 models in the store, and which files they map.

Usage: python -m bench.cold GGUF [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import board

N_MODELS = 200


def fill(home: Path, model: Path) -> str:
    """200 models in a fresh store: the real file once, and its header (a sparse tail behind it) under 199 other names."""
    head = model.open("rb").read(8 << 20)
    size = model.stat().st_size
    environment = {**os.environ, "PADDOCK_HOME": str(home)}
    for i in range(N_MODELS - 1):
        folder = home / "models" / f"org{i % 20}" / f"repo{i}"
        folder.mkdir(parents=True)
        with (folder / f"model-{i}.Q4_1.gguf").open("wb") as file:
            file.write(head)
            file.truncate(size)
    local = home / "elsewhere" / model.name
    local.parent.mkdir()
    shutil.copy(model, local)
    paddock = Path(sys.executable).parent / "paddock"
    subprocess.run([paddock, "add", str(local)], env=environment, check=True, capture_output=True)
    return str(local)


def main() -> None:
    """Times the three commands as whole processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    paddock = Path(sys.executable).parent / "paddock"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        name = fill(home, arguments.model)
        environment = {**os.environ, "PADDOCK_HOME": str(home)}
        for command in (["ls"], ["show", name], ["fit", name, "--ctx", "8192"]):
            samples = []
            for _ in range(arguments.rounds + 1):
                t = time.perf_counter()
                out = subprocess.run([paddock, *command], env=environment, capture_output=True, text=True)
                samples.append(1e3 * (time.perf_counter() - t))
                assert out.returncode in (0, 9), out.stderr
            rows.append(board.row(f"cpu.cold.{command[0]}_ms", samples[1:], "ms", "lower", limit=None))
    board.write("cpu2", "cold", rows, models_in_store=N_MODELS, median_of=arguments.rounds, python=sys.version.split()[0])


if __name__ == "__main__":
    main()
