"""Builds the CUDA pack: one shared library per architecture, cudart static, nothing else to install but a driver.

Usage: python packs/cuda/build.py [sm_90a sm_86 ... | all] [--jobs N] [--ptx [sm_90]] [--out FOLDER]. Translation units compile in
parallel and only when their sources changed; registers and spills of every kernel are reported, spills on hot kernels fail.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent
HOST = ROOT.parent / "host"
REPOSITORY = ROOT.parent.parent
PACKS = REPOSITORY / "runner/paddock_runner/_packs"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100f", "sm_120f")
VALIDATED = ("sm_90a",)
INSTRUCTIONS = {"sm_90a": ["-DPK_WGMMA"], "sm_89": ["-DPK_FP8_MMA"], "sm_100f": ["-DPK_TCGEN05"], "sm_120f": ["-DPK_FP8_MMA", "-DPK_FP4_MMA"]}
"""What an architecture has beside mma.sync in bf16: wgmma, tcgen05, or mma.sync of e4m3 (sm_90 and sm_100 only emulate that) and of e2m1 with block scales."""
EMULATED = {"sm_89": ["-DPK_FP4_EMULATED"]}
"""Of libraries for tests (--ptx): sm_120's nearest relative that other cards can run shows its products of e2m1, with products in bf16 in place of the instruction."""
FORMATS = (
    "BF16", "F16", "FP8_E4M3", "FP8_E5M2", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4",
)  # fmt: skip
PER_WIDTH = {"decode.cu": (64, 96, 128, 192, 256), "prefill_wgmma.cu": (64, 128, 192, 256)}
PERSIST_ROWS = (1,)
"""Bounds of rows that the persistent decode kernel is built for: those it was seen to win at."""
PER_FORMAT = {"stream.cu": "PK_STREAM_FORMAT", "skinny.cu": "PK_STREAM_FORMAT", "product.cu": "PK_EXPERT_FORMAT", "lone.cu": "PK_EXPERT_FORMAT"}
HOT = re.compile(
    r"stream_matmul|skinny|flat_kernel|split_kernel|gemm|attention_decode_kernelILi(64|128)E|attention_prefill|attention_wgmma_kernelILi\d+ELb[01]ELb0E"
)
"""Kernels that may not spill. Attention with a cap on its scores, and decode of heads wider than 128, do (LOG.md, entries 9 and 10)."""
ENTRY = re.compile(r"Compiling entry function '(\w+)' for")
USED = re.compile(r"Used (\d+) registers")
SPILL = re.compile(r"(\d+) bytes spill stores")


def nvcc() -> str:
    """The compiler: on PATH, or the one of the nvidia-cuda-nvcc package. Raises: SystemExit with what to install."""
    found = shutil.which("nvcc")
    if found:
        return found
    for base in sys.path:
        candidate = pathlib.Path(base) / "nvidia/cu13/bin/nvcc"
        if candidate.exists():
            return str(candidate)
    raise SystemExit(
        'nvcc is not here: install a CUDA 13 toolkit, or pip install "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"'
    )


def units() -> list[tuple[str, pathlib.Path, list[str]]]:
    """(object name, source, defines) of every translation unit; those of PER_FORMAT are one unit per weight format, attention one per head width, the persistent kernel one per bound of rows."""
    found = []
    for source in sorted(ROOT.glob("src/**/*.c[up]*")) + sorted(HOST.glob("*.cpp")):
        name = f"{source.parent.name}_{source.stem}"
        if source.name in PER_FORMAT:
            found += [(f"{name}_{f.lower()}", source, [f"-D{PER_FORMAT[source.name]}=PK_{f}"]) for f in FORMATS]
        elif source.name in PER_WIDTH:
            found += [(f"{name}_{w}", source, [f"-DPK_WIDTH={w}"]) for w in PER_WIDTH[source.name]]
        elif source.parent.name == "persist" and source.stem == "kernel":
            found += [(f"{name}_{n}", source, [f"-DPK_PERSIST_ROWS={n}"]) for n in PERSIST_ROWS]
        else:
            found.append((name, source, []))
    return found


def flags(arch: str, runs_on: str, build: str) -> list[str]:
    """Compiler flags of an architecture; runs_on: "" for itself, "any" for its PTX, or the newer device that its PTX is assembled for."""
    number = arch.removeprefix("sm_")
    code = {"": arch, "any": f"compute_{number}"}.get(runs_on, runs_on)
    name = arch + ("_ptx" if runs_on else "")
    return [
        "-std=c++20", "-O3", "-Xfatbin", "-compress-all", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden,-O2", "-diag-suppress", "177",
        "-gencode", f"arch=compute_{number},code={code}", "-Xptxas", "-v", f'-DPK_ARCH="{name}"', f'-DPK_BUILD="{build}"',
        f"-DPK_VALIDATED={int(arch in VALIDATED)}", *INSTRUCTIONS.get(arch, []), *(EMULATED.get(arch, []) if runs_on else []),
    ]  # fmt: skip


def stamp() -> str:
    """A digest of every source and of this file: the build id, and what decides whether an object is stale."""
    digest = hashlib.sha256()
    for path in sorted(
        [*ROOT.rglob("*.c[up]*"), *ROOT.rglob("*.h"), *HOST.iterdir(), *ROOT.parent.glob("*.h"), pathlib.Path(__file__)]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def digest_of(paths: list[str]) -> str:
    """A digest of files, named relative to the repository so that objects may be moved between checkouts; "" when one is gone."""
    digest = hashlib.sha256()
    for name in paths:
        path = REPOSITORY / name
        if not path.exists():
            return ""
        digest.update(path.read_bytes())
    return digest.hexdigest()


def included(depfile: pathlib.Path) -> list[str]:
    """The repository's own files that a unit was made of, from the compiler's list of them (make's syntax)."""
    words = depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    paths = {pathlib.Path(os.path.normpath(w)) for w in words}
    return sorted(str(p.relative_to(REPOSITORY)) for p in paths if p.is_relative_to(REPOSITORY))


def compile_unit(
    compiler: str, arch_flags: list[str], unit: tuple[str, pathlib.Path, list[str]], folder: pathlib.Path
) -> tuple[pathlib.Path, str]:
    """Compiles one unit unless its object was made of the same flags and files. Returns the object and ptxas' report."""
    name, source, defines = unit
    if source.stem != "api":
        arch_flags = [f for f in arch_flags if not f.startswith("-DPK_BUILD")]
    target, log, mark, depfile = (folder / f"{name}.{end}" for end in ("o", "log", "key", "d"))
    facts = {"flags": [*arch_flags, *defines]}
    if target.exists() and mark.exists():
        seen = json.loads(mark.read_text())
        if seen["flags"] == facts["flags"] and digest_of(seen["files"]) == seen["digest"]:
            return target, log.read_text()
    mark.unlink(missing_ok=True)
    result = subprocess.run(
        [compiler, *arch_flags, *defines, "-MD", "-MF", str(depfile), "-c", str(source), "-o", str(target)],
        capture_output=True, text=True,
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(f"{source}: {result.stderr}")
    log.write_text(result.stderr)
    files = included(depfile)
    mark.write_text(json.dumps({**facts, "files": files, "digest": digest_of(files)}))
    return target, result.stderr


def resources(report: str) -> list[tuple[str, int, int]]:
    """(kernel, registers, spilled bytes) of every kernel in a ptxas report."""
    found: list[tuple[str, int, int]] = []
    name, spilled = "", 0
    for line in report.splitlines():
        if m := ENTRY.search(line):
            name = m[1]
        elif m := SPILL.search(line):
            spilled = int(m[1])
        elif (m := USED.search(line)) and name:
            found.append((name, int(m[1]), spilled))
            name = ""
    return found


def write_manifest(library: pathlib.Path, arch: str, identity: str) -> None:
    """What the runner compares the file with before it opens it (runner/paddock_runner/manifest.py)."""
    digest = re.search(r'"(\w+)"', (ROOT.parent / "pack_digest.h").read_text())
    facts = {
        "file": library.name, "sha256": hashlib.sha256(library.read_bytes()).hexdigest(), "arch": arch, "build": identity,
        "abi": digest[1] if digest else "", "is_validated": arch in VALIDATED, "formats": [f.lower() for f in ("F32", *FORMATS, "Q4_Z")],
    }  # fmt: skip
    library.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


def build(arch: str, out: pathlib.Path, jobs: int, runs_on: str, is_strict: bool) -> pathlib.Path:
    """Builds one architecture's library. Raises: SystemExit when a unit does not compile or a hot kernel spills."""
    compiler, identity = nvcc(), stamp()
    name = arch.replace("_", "") + ("_ptx" if runs_on else "")
    folder = REPOSITORY / "build" / "cuda" / name
    folder.mkdir(parents=True, exist_ok=True)
    arch_flags = flags(arch, runs_on, identity)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(lambda unit: compile_unit(compiler, arch_flags, unit, folder), units()))
    kernels = [k for _, report in done for k in resources(report)]
    spills = [k for k in kernels if k[2]]
    out.mkdir(parents=True, exist_ok=True)
    library = out / f"libpaddock_cuda_{name}.so"
    subprocess.run(
        [
            compiler,
            "-shared",
            "-cudart",
            "static",
            "-Xlinker",
            "--exclude-libs,ALL",
            *[str(o) for o, _ in done],
            "-o",
            str(library),
        ],
        check=True,
    )
    write_manifest(library, arch + ("_ptx" if runs_on else ""), identity)
    (folder / "resources.txt").write_text(
        "".join(f"{r:4} registers {s:5} spilled  {k}\n" for k, r, s in sorted(kernels))
    )
    sys.stdout.write(
        f"{library.name}: {len(kernels)} kernels, {len(spills)} spill, {library.stat().st_size} bytes, build {identity}\n"
    )
    for kernel, registers, spilled in spills:
        sys.stdout.write(f"  spills {spilled} bytes ({registers} registers): {kernel}\n")
    if is_strict and any(s > 64 and HOT.search(k) for k, _, s in spills):
        raise SystemExit("a hot kernel spills")
    return library


def main() -> None:
    """Builds what the command line names; all architectures when it names none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archs", nargs="*", default=["all"])
    parser.add_argument("--jobs", type=int, default=max(1, (len(os.sched_getaffinity(0)) or 2)))
    parser.add_argument(
        "--ptx",
        nargs="?",
        const="any",
        default="",
        help="PTX instead of machine code: lets a newer device run an older architecture's paths; with a device (sm_90) it is assembled here, not by the driver",
    )
    parser.add_argument(
        "--lenient",
        action="store_true",
        help="spills are reported but do not fail (they fail on validated architectures only)",
    )
    parser.add_argument("--out", type=pathlib.Path, default=PACKS)
    options = parser.parse_args()
    wanted = ARCHS if "all" in options.archs else options.archs
    for arch in wanted:
        if arch not in ARCHS:
            raise SystemExit(f"no such architecture: {arch} (there are {', '.join(ARCHS)})")
        build(arch, options.out, options.jobs, options.ptx, not options.lenient and arch in VALIDATED)


if __name__ == "__main__":
    main()
