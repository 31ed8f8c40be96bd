"""Looks whether each architecture's machine code holds the instructions that its kernels are written for.

Usage: python packs/cuda/sass.py [LIBRARY ...] (default: all of runner/paddock_runner/_packs). Needs cuobjdump and nvdisasm (a CUDA toolkit, or
pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm). Prints matrix instructions by kernel; exits 1 when a kernel lacks its own.
MISSING names what an architecture could do and no kernel uses yet: reported, never an error.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import build

MATRIX = re.compile(r"\b(HMMA|HGMMA|QGMMA|IMMA|IGMMA|QMMA|OMMA|UTC\w*MMA)(?:\.[\w.]+)?")
ANYWHERE = {
    "stream_matmul": "HMMA", "gemm_mma": "HMMA|QMMA|OMMA", "attention_prefill_kernel": "HMMA", "expert_stream_kernel": "HMMA", "expert_tiles_kernel": "HMMA|HGMMA|OMMA",
}  # fmt: skip
ELSEWHERE = {"delta_chunk_kernel": "HMMA", "delta_scan_kernel": "HMMA"}
"""Kernels of every architecture but sm_90a, which has its own in their place."""
OWN = {"sm_90a": {"delta_chunk_hopper_kernel": "HGMMA", "delta_scan_hopper_kernel": "HGMMA", "gemm_wgmma": "HGMMA", "gemm_fp8": "QGMMA", "attention_wgmma": "HGMMA", "expert_grouped_kernel": "HGMMA|QGMMA"}, "sm_100f": {"gemm_tcgen05": "UTCHMMA|UTCQMMA"}}
WHOLE = {"sm_90a": ("HGMMA", "QGMMA"), "sm_89": ("QMMA",), "sm_120f": ("QMMA", "OMMA")}
"""Instructions that must be somewhere in a library of the architecture: products of fp8, and of fp4 with block scales."""
MISSING = {
    "sm_100f": "UTCOMMA (FP4 by tcgen05): such weights are widened to bf16; attention and experts use mma.sync",
}


def tool(name: str) -> str:
    """A binary of the toolkit: on PATH or in a wheel. Raises: SystemExit with what to install."""
    for folder in sys.path:
        candidate = pathlib.Path(folder) / "nvidia/cu13/bin" / name
        if candidate.exists():
            return str(candidate)
    found = shutil.which(name)
    if not found:
        raise SystemExit(f"{name} is not here: install a CUDA 13 toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return found


def instructions(library: pathlib.Path) -> dict[str, collections.Counter[str]]:
    """Matrix instructions of every kernel in a library, by kernel."""
    dumper, disassembler = tool("cuobjdump"), tool("nvdisasm")
    path = os.pathsep.join((str(pathlib.Path(disassembler).parent), os.get_exec_path()[0]))
    dump = subprocess.run([dumper, "-sass", str(library)], capture_output=True, text=True, env={"PATH": path})
    if dump.returncode:
        raise SystemExit(f"{library}: {dump.stderr}")
    found: dict[str, collections.Counter[str]] = {}
    kernel = ""
    for line in dump.stdout.splitlines():
        if "Function : " in line:
            kernel = line.split("Function : ")[1].strip()
            found[kernel] = collections.Counter()
        elif kernel and (m := MATRIX.search(line)):
            found[kernel][m[1]] += 1
    return found


def check(library: pathlib.Path, arch: str) -> bool:
    """Tells what a library holds; False when a kernel lacks the instructions it is written for."""
    found = instructions(library)
    wanted = ANYWHERE | ({} if arch == "sm_90a" else ELSEWHERE) | OWN.get(arch, {})
    total: collections.Counter[str] = sum(found.values(), collections.Counter())
    good = True
    print(f"{library.name} ({arch}): {len(found)} kernels, {', '.join(f'{n} {name}' for name, n in sorted(total.items())) or 'no matrix instructions'}")
    for kernel, pattern in wanted.items():
        mine = [counter for name, counter in found.items() if kernel in name]
        bare = sum(not any(re.fullmatch(pattern, i) for i in counter) for counter in mine)
        if not mine or bare:
            good = False
            print(f"  WRONG {kernel}: {bare} of {len(mine)} have no {pattern}" if mine else f"  WRONG {kernel}: no such kernel")
    for name in WHOLE.get(arch, ()):
        if not total[name]:
            good = False
            print(f"  WRONG no {name} anywhere")
    if arch in MISSING:
        print(f"  not there yet: {MISSING[arch]}")
    return good


def main() -> None:
    """Checks the libraries that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", type=pathlib.Path)
    options = parser.parse_args()
    libraries = options.libraries or sorted(p for p in build.PACKS.glob("libpaddock_cuda_*.so") if "_ptx" not in p.name)
    if not libraries:
        raise SystemExit(f"no CUDA pack lies in {build.PACKS}")
    good = [check(p, json.loads(p.with_suffix(".json").read_text())["arch"]) for p in libraries]
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
