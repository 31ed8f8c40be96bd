"""Checkpoints that other programs keep on this machine: found by name and size alone, never opened or changed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paddock_manager.store import choose

MAX_FILES = 20000
LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint: a GGUF file (the first of its shards) or a folder with config.json and safetensors."""

    program: str
    path: Path
    size_bytes: int


def find(folders: dict[str, Path], ours: set[str]) -> list[Found]:
    """Everything that could be added; `ours`: paths that are known already."""
    out: list[Found] = []
    for program, root in folders.items():
        if root.is_dir():
            out += [f for f in _below(program, root) if str(f.path) not in ours]
    return out


def _below(program: str, root: Path) -> Iterator[Found]:
    """Walk one program's folder; links to files are followed (the hub's cache is made of them), links to folders are not."""
    seen = 0
    for at, folders, files in os.walk(root):
        folders.sort()
        seen += len(files)
        if seen > MAX_FILES:
            return
        folder = Path(at)
        weights = [f for f in files if f.endswith(".safetensors")]
        if "config.json" in files and weights:
            yield Found(program, folder, _sizes(folder, weights))
        for group in choose.gguf_variants([(f, 0) for f in files]).values():
            for name, _ in group:
                if not LATER_SHARD.search(name):
                    yield Found(program, folder / name, _sizes(folder, _shards(name, files)))


def _shards(name: str, files: list[str]) -> list[str]:
    """A file, or all shards of its set."""
    stem = name.rpartition("-00001-of-")[0]
    return [f for f in files if f.startswith(f"{stem}-") and "-of-" in f] if stem else [name]


def _sizes(folder: Path, names: list[str]) -> int:
    total = 0
    for name in names:
        try:
            total += (folder / name).stat().st_size
        except OSError:
            continue
    return total
