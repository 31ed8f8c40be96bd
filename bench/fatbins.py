"""Fat binaries in a CUDA library: what is in them, and machine code of one architecture in their place, without linking again.

Usage: python -m bench.fatbins LIBRARY (lists kinds, architectures and sizes)
       python -m bench.fatbins LIBRARY OUT --from 90 --to sm_90 --keep FILE [--version 9.0] [--work FOLDER] [--jobs N]
A library that has only PTX for a device compiles for minutes when a kernel is first launched there, or refuses where the driver is older than that PTX.
The second form takes the PTX of --from out, leaves out kernels whose names no pattern of --keep matches (a regular expression a line; one that begins
with ! leaves out again, the last that matches counts), compiles it and writes it where the module was; a module without a kernel gets a tiny entry of
another architecture, so that its kernels say "no kernel image". Needs cuobjdump (CUOBJDUMP), ptxas, fatbinary, c++filt. --version: the newest PTX that ptxas reads.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

MAGIC = 0xBA55ED50
KINDS = {1: "ptx", 2: "elf"}
NOTHING = ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n"
ENTRY = re.compile(r"^(?:\.visible |\.weak )?\.entry ([\w$]+)\(", re.M)


class Image(NamedTuple):
    """One entry of a fat binary."""

    kind: str
    architecture: int
    n_bytes: int


def section(data: bytes) -> tuple[int, int]:
    """Where .nv_fatbin lies, and its size. Raises: SystemExit where there is none."""
    (headers,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    found = [struct.unpack_from("<IIQQQQIIQQ", data, headers + i * size) for i in range(count)]
    for s in found:
        at = found[names][4] + s[0]
        if data[at : data.index(b"\0", at)] == b".nv_fatbin":
            return s[4], s[5]
    raise SystemExit("the library has no .nv_fatbin")


def modules(data: bytes) -> Iterator[tuple[int, int]]:
    """(offset, room) of every fat binary: one a source file, in the linker's order. The room reaches to the next one."""
    at, size = section(data)
    end, starts = at + size, []
    while at < end - 16:
        magic, _, head, body = struct.unpack_from("<IHHQ", data, at)
        if magic == MAGIC:
            starts.append(at)
        at += head + body if magic == MAGIC else 8
    return zip(starts, [b - a for a, b in zip(starts, [*starts[1:], end], strict=True)], strict=True)


def images(data: bytes, at: int) -> Iterator[Image]:
    """The entries of the fat binary at that offset."""
    _, _, head, body = struct.unpack_from("<IHHQ", data, at)
    entry, end = at + head, at + head + body
    while entry < end:
        kind, _, own, n_bytes = struct.unpack_from("<HHIQ", data, entry)
        yield Image(KINDS.get(kind, str(kind)), struct.unpack_from("<I", data, entry + 28)[0], n_bytes)
        entry += own + n_bytes


def chosen(patterns: list[str]) -> Callable[[str], bool]:
    """Whether a kernel stays, by its demangled name."""
    tests = [(not p.startswith("!"), re.compile(p.removeprefix("!"))) for p in patterns]

    def stays(name: str) -> bool:
        return next((good for good, test in reversed(tests) if test.search(name)), False)

    return stays


def thinned(ptx: str, stays: Callable[[str], bool]) -> tuple[str, int]:
    """The PTX with just the kernels that stay, and how many those are. Variables and functions stay as they are: the library names the variables."""
    heads = list(ENTRY.finditer(ptx))
    names = subprocess.run(["c++filt"], input="\n".join(m[1] for m in heads), capture_output=True, text=True, check=True).stdout.splitlines()
    parts, at, n_kept = [], 0, 0
    for head, name in zip(heads, names, strict=True):
        if stays(name):
            n_kept += 1
            continue
        depth = 0
        for brace in re.compile("[{}]").finditer(ptx, head.end()):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                parts.append(ptx[at : head.start()])
                at = brace.end()
                break
    return "".join([*parts, ptx[at:]]), n_kept


def compiled(ptx: Path, target: str, out: Path, room: int) -> bytes:
    """A fat binary of that PTX's machine code: packed only where it would not fit as it is, since xz packs bytes better than the fat binary does."""
    cubin = out / f"{ptx.stem}.cubin"
    subprocess.run(["ptxas", "-O3", f"-arch={target}", ptx, "-o", cubin], check=True)
    for way in ("--compress=false", "--compress-all"):
        made = out / f"{ptx.stem}.fatbin"
        subprocess.run(["fatbinary", "-64", "--create", made, f"--image3=kind=elf,sm={target.removeprefix('sm_')},file={cubin}", way], check=True)
        if (data := made.read_bytes()) and len(data) <= room:
            return data
    raise SystemExit(f"{ptx.name}: {len(data)} bytes do not fit in {room}")


def replace(library: Path, out: Path, a: argparse.Namespace) -> None:
    """Writes the library with other machine code. Raises: SystemExit."""
    data, work = bytearray(library.read_bytes()), Path(a.work)
    work.mkdir(parents=True, exist_ok=True)
    subprocess.run([os.environ.get("CUOBJDUMP", "cuobjdump"), "-xptx", f"sm_{a.source}", library.resolve()], cwd=work, check=True, stdout=subprocess.DEVNULL)
    # cuobjdump numbers every PTX of the library, module after module.
    found = sorted(work.glob(f"*.sm_{a.source}.ptx"), key=lambda p: int(p.name.split(".")[-3]))
    places = list(modules(bytes(data)))
    if len(found) != len(places):
        raise SystemExit(f"{len(found)} modules of {len(places)} have PTX of {a.source}")
    stays = chosen([line for line in Path(a.keep).read_text().splitlines() if line])
    (work / "nothing.ptx").write_text(NOTHING)
    nothing = compiled(work / "nothing.ptx", "sm_75", work, 1 << 20)

    def made(i: int) -> tuple[bytes, int]:
        text, n_kept = thinned(found[i].read_text(), stays)
        mine = work / f"{i}.ptx"
        mine.write_text(re.sub(r"^\.version .*$", f".version {a.version}", text, count=1, flags=re.M))
        return (compiled(mine, a.target, work, places[i][1]), n_kept) if n_kept else (nothing, 0)

    with ThreadPoolExecutor(a.jobs) as pool:
        made_all = list(pool.map(made, range(len(found))))
    for (at, room), (new, _) in zip(places, made_all, strict=True):
        data[at : at + room] = new + bytes(room - len(new))
    out.write_bytes(data)
    sys.stdout.write(f"{sum(n for _, n in made_all)} kernels in {sum(n > 0 for _, n in made_all)} of {len(places)} modules, {sum(len(d) for d, _ in made_all) / 1e6:.1f} MB\n")


def main() -> None:
    """Lists, or replaces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--from", dest="source", default="90")
    parser.add_argument("--to", dest="target", default="sm_90")
    parser.add_argument("--keep", default="bench/llama_kernels.txt")
    parser.add_argument("--version", default="9.0")
    parser.add_argument("--work", default="build/fatbins")
    parser.add_argument("--jobs", type=int, default=2)
    a = parser.parse_args()
    if a.out:
        replace(a.library, a.out, a)
        return
    data, sizes, counts = a.library.read_bytes(), collections.Counter[tuple[str, int]](), collections.Counter[tuple[str, int]]()
    for at, _ in modules(data):
        for image in images(data, at):
            sizes[image[:2]] += image.n_bytes
            counts[image[:2]] += 1
    for key in sorted(sizes):
        sys.stdout.write(f"{key[0]} {key[1]:4} {counts[key]:5} {sizes[key] / 1e6:8.1f} MB\n")


if __name__ == "__main__":
    main()
