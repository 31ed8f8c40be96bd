"""What we remember of a model beside its files: one small JSON per repository folder, written whole or not at all.

models/ORG/REPO/.paddock/record.json   {"layout": 1, "repo": …, "variants": {QUANT: {…}}}
models/ORG/REPO/.paddock/hashes/FILE   {"part_bytes": …, "sum64": [one per part]}
added/NAME.json                        one variant, with the folder it lies in
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paddock_manager.disk import LAYOUT, read_json, write_json

HIDDEN = ".paddock"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a model. name is relative to the model's folder; sha256 is "" where only a git hash is known.

    is_awaited: what lies there under its name is not yet this file.
    """

    name: str
    size_bytes: int
    sha256: str = ""
    git_sha1: str = ""
    is_awaited: bool = False


@dataclass(slots=True)
class Model:
    """One model that is here, or partly here.

    repo: ORG/REPO, or the given name of an added model. quant: which variant of the repository ("" for the only one).
    files: all files; the first is the one to open (first GGUF shard), or a Hugging Face folder when is_folder.
    headline: family, format, n_params, max_ctx_tokens, template_sha256, as far as the header says.
    is_damaged: when its bytes were last compared with the published hashes, they were others.
    """

    repo: str
    quant: str
    folder: Path
    files: list[StoredFile]
    alias: str = ""
    commit: str = ""
    source: str = ""
    licence: str = ""
    pulled_at: float = 0.0
    is_folder: bool = False
    is_added: bool = False
    is_damaged: bool = False
    state: str = "ok"
    done_bytes: int = 0
    headline: dict[str, Any] = field(default_factory=dict)

    @property
    def ref(self) -> str:
        """The full name: ORG/REPO:QUANT."""
        return f"{self.repo}:{self.quant}" if self.quant and not self.is_added else self.repo

    @property
    def name(self) -> str:
        """The name to show: the short one where it has one."""
        return self.alias or self.ref

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(f.size_bytes for f in self.files)

    @property
    def path(self) -> Path:
        """What to open: the first file, or the folder."""
        return self.folder if self.is_folder else self.folder / self.files[0].name

    def facts(self) -> dict[str, Any]:
        """For --json."""
        return {
            "name": self.name,
            "ref": self.ref,
            "repo": self.repo,
            "quant": self.quant,
            "state": self.state,
            "size_bytes": self.size_bytes,
            "done_bytes": self.done_bytes,
            "path": str(self.path),
            "is_added": self.is_added,
            "source": self.source,
            "commit": self.commit,
            "licence": self.licence,
            "pulled_at": self.pulled_at,
            **self.headline,
        }

    def to_record(self) -> dict[str, Any]:
        """The part that is written down."""
        kept = ("alias", "commit", "source", "licence", "pulled_at", "is_folder", "is_damaged", "headline")
        return {k: getattr(self, k) for k in kept} | {"files": [_as_written(f) for f in self.files]}


def _as_written(file: StoredFile) -> dict[str, Any]:
    return {k: v for k, v in asdict(file).items() if k != "is_awaited" or v}


def from_record(repo: str, quant: str, folder: Path, body: dict[str, Any], is_added: bool = False) -> Model:
    """The inverse of Model.to_record.

    Raises: KeyError, TypeError, ValueError for a record we did not write.
    """
    files = [
        StoredFile(f["name"], int(f["size_bytes"]), f.get("sha256", ""), f.get("git_sha1", ""), bool(f.get("is_awaited", False)))
        for f in body["files"]
    ]
    if not files:
        raise ValueError("no files")
    return Model(
        repo=repo,
        quant=quant,
        folder=folder,
        files=files,
        alias=str(body.get("alias", "")),
        commit=str(body.get("commit", "")),
        source=str(body.get("source", "")),
        licence=str(body.get("licence", "")),
        pulled_at=float(body.get("pulled_at", 0.0)),
        is_folder=bool(body.get("is_folder", False)),
        is_added=is_added,
        is_damaged=bool(body.get("is_damaged", False)),
        headline=dict(body.get("headline", {})),
    )


def record_path(folder: Path) -> Path:
    """The record of a repository folder."""
    return folder / HIDDEN / "record.json"


def variant(model: Model) -> dict[str, Any] | None:
    """What its folder's record says of this variant."""
    found = (read_json(record_path(model.folder)) or {"variants": {}})["variants"].get(model.quant)
    return found if isinstance(found, dict) else None


def save(model: Model, was: dict[str, Any] | None = None) -> None:
    """Add or replace this variant in its folder's record; with what it was. The caller holds the folder's lease."""
    path = record_path(model.folder)
    body = read_json(path) or {"layout": LAYOUT, "repo": model.repo, "variants": {}}
    body["variants"][model.quant] = was or model.to_record()
    write_json(path, body)


def forget(model: Model) -> None:
    """Take this variant out of its folder's record; the record goes with the last one. The caller holds the lease."""
    path = record_path(model.folder)
    body = read_json(path) or {"variants": {}}
    body["variants"].pop(model.quant, None)
    if body["variants"]:
        write_json(path, body)
    else:
        path.unlink(missing_ok=True)
