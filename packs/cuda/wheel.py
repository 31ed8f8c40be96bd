"""Builds CUDA packs and puts each into a wheel of its own: the library and its manifest, nothing else.

Usage: python packs/cuda/wheel.py [sm_90a ... | all] [--out dist] [--jobs N] [--built]. sm_90a becomes paddock_cuda_sm90-VERSION-py3-none-
manylinux_2_28_x86_64.whl, installed beside the runner (paddock_runner/_packs). --built takes the libraries that are there.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import pathlib
import re
import zipfile

import build

TAG = "py3-none-manylinux_2_28_x86_64"
EPOCH = (1980, 1, 1, 0, 0, 0)


def version() -> str:
    """The product's version, from pyproject.toml."""
    found = re.search(r'^version = "([^"]+)"', (build.ROOT.parent.parent / "pyproject.toml").read_text(), re.MULTILINE)
    if not found:
        raise SystemExit("pyproject.toml names no version")
    return found[1]


def make_wheel(library: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """The wheel of one library with the manifest beside it; byte for byte the same for the same library."""
    facts = json.loads(library.with_suffix(".json").read_text())
    if hashlib.sha256(library.read_bytes()).hexdigest() != facts["sha256"]:
        raise SystemExit(f"{library}: its manifest is of another file; build it again")
    name = f"paddock_cuda_{facts['arch'].replace('_', '').rstrip('af')}"
    info = f"{name}-{version()}.dist-info"
    doubt = "" if facts["is_validated"] else " UNVALIDATED: the tests have never run on this architecture."
    metadata = (
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version()}\nSummary: Paddock's CUDA kernels for {facts['arch']}.{doubt}\n"
        f"License: MIT OR Apache-2.0\nRequires-Python: >=3.11\nRequires-Dist: paddock=={version()}\n"
    )
    root = build.ROOT.parent.parent
    files = {f"paddock_runner/_packs/{p.name}": p.read_bytes() for p in (library, library.with_suffix(".json"))}
    files |= {f"{info}/licenses/{n}": (root / n).read_bytes() for n in ("LICENSE-MIT", "LICENSE-APACHE")}
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: paddock\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode()
    record = "".join(
        f"{n},sha256={base64.urlsafe_b64encode(hashlib.sha256(d).digest()).rstrip(b'=').decode()},{len(d)}\n"
        for n, d in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{name}-{version()}-{TAG}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return target


def main() -> None:
    """Builds the wheels that the command line names; of all architectures when it names none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archs", nargs="*", default=["all"])
    parser.add_argument("--out", type=pathlib.Path, default=build.ROOT.parent.parent / "dist")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))))
    parser.add_argument("--built", action="store_true", help="take libraries that are built already")
    parser.add_argument("--packs", type=pathlib.Path, default=build.PACKS, help="where libraries are built")
    options = parser.parse_args()
    for arch in build.ARCHS if "all" in options.archs else options.archs:
        library = options.packs / f"libpaddock_cuda_{arch.replace('_', '')}.so"
        if not options.built:
            library = build.build(arch, options.packs, options.jobs, False, arch in build.VALIDATED)
        if not library.exists():
            raise SystemExit(f"{library} is not built")
        print(make_wheel(library, options.out))


if __name__ == "__main__":
    main()
