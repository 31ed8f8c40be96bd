"""One type for every checkpoint: a GGUF file or set, a safetensors file, a Hugging Face folder, or a header from afar."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AmbiguousModel, FileError, UnknownModel, UnsupportedError
from ..formats.table import UNSUPPORTED, unsupported
from .fields import Fields
from .folder import LOST_SHARDS, chat_template, parse_json, read_folder
from .gguf import Array, GgufHeader, Metadata, scan_gguf
from .safetensors import scan_safetensors
from .source import LocalFile, RemoteFile, Source
from .view import TensorView

MAX_RUNNABLE_NAME_BYTES = 63
_SPLIT_NAME = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(slots=True)
class Checkpoint:
    """An opened checkpoint.

    kind: "gguf" or "safetensors". metadata: GGUF keys, or the __metadata__ of safetensors. tensors: the file's own names.
    config: config.json of a folder, else {}. files: a folder's side files by name ("tokenizer.json", ...).
    role: "model", "projector", "adapter", "imatrix", "vocabulary", "empty". warnings: for people.
    """

    kind: str
    path: Path
    metadata: Mapping[str, Any]
    tensors: dict[str, TensorView]
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    version: int = 0
    alignment: int = 1
    _sources: dict[Path, Source] = field(default_factory=dict)
    _template: str | None = None

    @property
    def fields(self) -> Fields:
        """Typed access to what describes the model: GGUF metadata, or config.json."""
        if self.kind == "gguf":
            return Fields(self.metadata, str(self.path))
        return Fields(self.config, str(self.path / "config.json"), "field")

    @property
    def paths(self) -> list[Path]:
        """The files that hold tensors."""
        return list(self._sources)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors in their files."""
        return sum(v.n_bytes for v in self.tensors.values())

    @property
    def role(self) -> str:
        """What the file is for."""
        return _gguf_role(self.metadata, self.tensors) if self.kind == "gguf" else "model" if self.tensors else "empty"

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's chat template, or None. Raises: FileError when a side file is damaged."""
        if self._template is not None:
            return self._template
        if self.kind == "gguf":
            template = self.metadata.get("tokenizer.chat_template")
            return template if isinstance(template, str) and template.strip() else None
        return chat_template(self.files)

    def read(self, view: TensorView) -> memoryview:
        """The tensor's bytes, mapped. Raises: FileError when the file changed since it was opened; UnsupportedError when it is remote."""
        source = self._sources.get(view.path)
        if not isinstance(source, LocalFile):
            raise UnsupportedError(
                f"{view.path}: only the header is here, tensor {view.name} cannot be read", what="remote tensor"
            )
        return source.read(view.offset, view.n_bytes)

    def unsupported_tensors(self) -> list[TensorView]:
        """Tensors of a type without kernels."""
        return [v for v in self.tensors.values() if v.format.startswith(UNSUPPORTED)]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a GGUF file (with its other shards), a .safetensors file, or a model folder.

    Raises: UnknownModel (nothing there), AmbiguousModel (a folder with several GGUF models), FileError, UnsupportedError.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    source = LocalFile(path)
    return _assemble_gguf(path, _siblings(path, source)) if _looks_gguf(path, source) else _safetensors([source])


def open_remote(
    name: str, readers: Sequence[tuple[str, Callable[[int, int], bytes], int | None]], config: bytes | None = None
) -> Checkpoint:
    """A checkpoint of which only headers can be had, by at most three range requests a file.

    name: for messages. readers: (file name, read(offset, n_bytes), file size or None) of every shard.
    config: config.json of a folder. Raises: FileError, UnsupportedError, and what the readers raise.
    """
    sources: list[Source] = [RemoteFile(file, read, size) for file, read, size in readers]
    if not sources:
        raise FileError(f"{name}: no files to read", path=name)
    if _looks_gguf(Path(sources[0].path), sources[0]):
        return _assemble_gguf(Path(name), [(s, scan_gguf(s)) for s in sources])
    checkpoint = _safetensors(sources)
    checkpoint.path = Path(name)
    checkpoint.config = parse_json(config, f"{name}/config.json") if config is not None else {}
    return checkpoint


def require_model(checkpoint: Checkpoint) -> None:
    """Raises: UnsupportedError when this belongs to a model and is none."""
    role = checkpoint.role
    if role != "model":
        hint = "name the file of the model itself" if role != "empty" else "fetch the file again"
        raise UnsupportedError(f"{checkpoint.path}: this is {ROLES[role]}, not a model", hint, what=role, supported=["model"])


def require_runnable(checkpoint: Checkpoint) -> None:
    """Raises: UnsupportedError unless this is a model whose every tensor has kernels and whose names fit ggml's limit."""
    require_model(checkpoint)
    for view in checkpoint.tensors.values():
        if view.format.startswith(UNSUPPORTED):
            raise unsupported(view.format, f"{view.path}: tensor {view.name}")
        if checkpoint.kind == "gguf" and len(view.name.encode()) > MAX_RUNNABLE_NAME_BYTES:
            raise UnsupportedError(
                f"{view.path}: the name of tensor {view.name[:40]}... has {len(view.name.encode())} bytes, the limit is {MAX_RUNNABLE_NAME_BYTES}",
                what="tensor name",
            )


ROLES = {
    "projector": "a projector (the vision or audio part of a model)",
    "adapter": "an adapter (LoRA)",
    "imatrix": "an importance matrix",
    "vocabulary": "a vocabulary without weights",
    "empty": "a file without tensors",
}


def _gguf_role(metadata: Mapping[str, Any], tensors: Mapping[str, TensorView]) -> str:
    kind, arch = metadata.get("general.type"), metadata.get("general.architecture")
    if (
        arch in ("clip", "mmproj")
        or kind == "mmproj"
        or "clip.has_vision_encoder" in metadata
        or "clip.has_audio_encoder" in metadata
    ):
        return "projector"
    if kind == "adapter" or "adapter.type" in metadata:
        return "adapter"
    if kind == "imatrix" or "imatrix.datasets" in metadata or arch == "imatrix":
        return "imatrix"
    if not tensors:
        return "vocabulary" if kind == "vocab" or "tokenizer.ggml.tokens" in metadata else "empty"
    return "model"


def _looks_gguf(path: Path, source: Source) -> bool:
    """By the first bytes; by the name when these say nothing."""
    head = bytes(source.buffer[:9])
    if head[:4] == b"GGUF":
        return True
    if head[8:9] in (b"{", b" ") and head[4:8] == b"\0\0\0\0":
        return False
    return path.suffix.lower() != ".safetensors"


def _safetensors(sources: Sequence[Source]) -> Checkpoint:
    """A checkpoint of bare safetensors files: no config, no tokenizer."""
    out = Checkpoint("safetensors", sources[0].path, {}, {})
    metadata: dict[str, Any] = {}
    for source in sources:
        header = scan_safetensors(source)
        for name, view in header.tensors.items():
            if name in out.tensors:
                raise FileError(
                    f"{source.path}: tensor {name} is also in {out.tensors[name].path.name}",
                    path=str(source.path),
                    field=name,
                )
            out.tensors[name] = view
        metadata.update(header.metadata)
        out.warnings.extend(header.warnings)
        out._sources[source.path] = source
    out.metadata = metadata
    return out


def _open_folder(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        shards = sorted(p for p in path.iterdir() if p.suffix == ".gguf")
        models = [p for p in shards if not (m := _SPLIT_NAME.match(p.name)) or int(m[2]) == 1]
        if len(models) > 1:
            raise AmbiguousModel(
                f"{path}: {len(models)} GGUF models here: {', '.join(p.name for p in models[:8])}",
                "name one of the files",
                name=str(path),
                choices=[p.name for p in models],
            )
        if shards:
            return open_checkpoint((models or shards)[0])
        if not any(path.iterdir()):
            raise UnknownModel(f"{path}: the folder is empty", name=str(path))
    folder = read_folder(path)
    sources: dict[Path, Source] = dict(folder.sources)
    return Checkpoint(
        "safetensors",
        path,
        folder.metadata,
        folder.tensors,
        folder.config,
        folder.files,
        folder.warnings,
        _sources=sources,
    )


def _siblings(path: Path, source: LocalFile) -> list[tuple[Source, GgufHeader]]:
    """The file's header, and those of the other shards of its set."""
    first = scan_gguf(source)
    found: list[tuple[Source, GgufHeader]] = [(source, first)]
    n = first.metadata.get("split.count", 0)
    if not isinstance(n, int) or n <= 1:
        return found
    match = _SPLIT_NAME.match(path.name)
    named = (
        [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, int(match[3]) + 1)]
        if match and int(match[3]) == n <= 1024
        else []
    )
    if not named or not all(p.is_file() for p in named):
        named = sorted(p for p in path.parent.iterdir() if p.suffix == ".gguf" and p.is_file())
    numbers = {first.metadata.get("split.no")}
    for other in named:
        if other == path or len(found) == n:
            continue
        try:
            sibling = LocalFile(other)
            header = scan_gguf(sibling)
        except (FileError, UnsupportedError):
            if match:
                raise
            continue
        same = bool(match) or all(
            header.metadata.get(k) == first.metadata.get(k) for k in ("split.count", "split.tensors.count")
        )
        if same and (match or header.metadata.get("split.no") not in numbers):
            numbers.add(header.metadata.get("split.no"))
            found.append((sibling, header))
    return found


def _assemble_gguf(path: Path, shards: list[tuple[Source, GgufHeader]]) -> Checkpoint:
    """One checkpoint of a file, or of a complete split set. Raises: FileError naming what is missing or twice."""
    count = Fields(shards[0][1].metadata, str(path)).integer("split.count", 1, high=65535)
    if count > 1 or len(shards) > 1:
        numbers = [Fields(h.metadata, str(h.path)).integer("split.no", high=65535) for _, h in shards]
        for i, no in enumerate(numbers):
            if no in numbers[:i]:
                raise FileError(
                    f"{shards[i][1].path}: shard {no + 1} of {count} is there twice (also {shards[numbers.index(no)][1].path.name})",
                    path=str(path),
                    field="split.no",
                )
        missing = [str(no + 1) for no in range(count) if no not in numbers]
        if missing:
            raise FileError(
                f"{path}: of {count} shards, these are missing: {', '.join(missing[:8])}",
                LOST_SHARDS,
                path=str(path),
                field="split.no",
                need=count,
                have=len(shards),
            )
        shards = [shards[numbers.index(no)] for no in range(count)]
    out = Checkpoint(
        "gguf", path, shards[0][1].metadata, {}, version=shards[0][1].version, alignment=shards[0][1].alignment
    )
    for source, header in shards:
        out._sources[source.path] = source
        out.warnings.extend(
            header.warnings if len(shards) == 1 else [f"{header.path.name}: {w}" for w in header.warnings]
        )
        for view in header.tensors:
            if view.name in out.tensors:
                raise FileError(
                    f"{header.path}: tensor {view.name} is also in {out.tensors[view.name].path.name}",
                    path=str(header.path),
                    field=view.name,
                )
            out.tensors[view.name] = view
    total = Fields(out.metadata, str(path)).integer("split.tensors.count", len(out.tensors))
    if count > 1 and total != len(out.tensors):
        raise FileError(
            f"{path}: split.tensors.count is {total}, the shards hold {len(out.tensors)} tensors",
            path=str(path),
            field="split.tensors.count",
            need=total,
            have=len(out.tensors),
        )
    out.warnings.extend(_vocabulary_warnings(out.metadata))
    return out


def _vocabulary_warnings(metadata: Mapping[str, Any]) -> list[str]:
    """What is odd about the tokenizer, without decoding it."""
    out: list[str] = []
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Array):
        return (
            ["there is no tokenizer in this file"]
            if "general.architecture" in metadata and "tokenizer.ggml.model" in metadata
            else out
        )
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        other = metadata.get(key)
        if isinstance(other, Array) and len(other) != len(tokens):
            out.append(f"{key} has {len(other)} entries, the vocabulary {len(tokens)}")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and not isinstance(metadata.get("tokenizer.ggml.merges"), Array):
        out.append("tokenizer.ggml.merges is missing")
    for key in metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            value = metadata[key]
            if not isinstance(value, int) or not 0 <= value < len(tokens):
                out.append(f"{key} is {value}, the vocabulary has {len(tokens)} tokens")
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str) or not template.strip():
        out.append("there is no chat template")
    return out


__all__ = ["Checkpoint", "Metadata", "open_checkpoint", "open_remote", "require_runnable"]
