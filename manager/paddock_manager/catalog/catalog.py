"""The curated short names of catalog.toml: name to sources, default quant, licence."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's bytes come from: a hub repository, or (package set) a member of a Python wheel.

    repo is where it is stored and under which name it is known, for a package too. sha256 and size_bytes: pinned, where known.
    """

    repo: str
    rev: str = ""
    file: str = ""
    size_bytes: int = 0
    sha256: str = ""
    package: str = ""
    version: str = ""
    member: str = ""

    @property
    def shown(self) -> str:
        """One phrase for people."""
        if self.package:
            return f"Python package {self.package} {self.version}"
        return f"hub repository {self.repo}" + (f"@{self.rev[:12]}" if self.rev else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """One short name."""

    name: str
    title: str
    params: str
    family: str
    licence: str
    quant: str
    sources: tuple[Source, ...]


@functools.cache
def entries() -> dict[str, Entry]:
    """All entries, by lower-case name."""
    import tomllib

    with (Path(__file__).parent / "catalog.toml").open("rb") as f:
        table: dict[str, dict[str, Any]] = tomllib.load(f)
    return {name.lower(): _entry(name, body) for name, body in table.items()}


@functools.cache
def _sampling() -> dict[str, dict[str, float]]:
    import tomllib

    with (Path(__file__).parent / "sampling.toml").open("rb") as f:
        return tomllib.load(f)


def sampling(short: str) -> dict[str, float]:
    """What the makers of a model of the catalog recommend (temperature, top_p, top_k); {} where that is not known."""
    from fnmatch import fnmatch

    if find(short) is None:
        return {}
    return next((dict(body) for pattern, body in _sampling().items() if fnmatch(short.lower(), pattern)), {})


def find(short: str) -> Entry | None:
    """The entry of a short name, or None."""
    return entries().get(short.lower())


def told(entry: Entry) -> dict[str, Any]:
    """One entry for --json. size_bytes, rev and files: where the catalog knows them; else the hub tells them (`paddock ls --remote NAME`)."""
    source = entry.sources[0]
    return {
        "name": entry.name,
        "title": entry.title,
        "params": entry.params,
        "family": entry.family,
        "licence": entry.licence,
        "repo": source.repo,
        "rev": source.rev,
        "quant": entry.quant,
        "files": [source.file] if source.file else [],
        **({"size_bytes": source.size_bytes} if source.size_bytes else {}),
        "sampling": sampling(entry.name),
    }


def near(short: str) -> list[str]:
    """Names that begin so, else that look alike."""
    names = list(entries())
    begun = [n for n in names if n.startswith(short.lower())]
    if begun:
        return begun[:6]
    import difflib

    close = difflib.get_close_matches(short.lower(), names, 3, 0.8)
    return close or [n for n in names if n.startswith(short.lower()[:4])][:5]


def _entry(name: str, body: dict[str, Any]) -> Entry:
    sources = tuple(
        Source(
            repo=s["repo"],
            rev=s.get("rev", ""),
            file=s.get("file", ""),
            size_bytes=s.get("size", 0),
            sha256=s.get("sha256", ""),
            package=s.get("package", ""),
            version=s.get("version", ""),
            member=s.get("member", ""),
        )
        for s in body["sources"]
    )
    return Entry(name, body["title"], body["params"], body["family"], body["licence"], body.get("quant", ""), sources)
