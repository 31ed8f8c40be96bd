"""A Hugging Face folder: config, side files, and which safetensors files belong to the model.

Headers are the truth; the index is checked against them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import FileError, UnsupportedError
from .safetensors import SafetensorsHeader, scan_safetensors
from .source import LocalFile
from .view import TensorView

INDEX = "model.safetensors.index.json"
SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "modules.json", "adapter_config.json", INDEX,
)  # fmt: skip
MAX_JSON_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20
LOST_SHARDS = "fetch them into this folder; `paddock pull` of the repository continues"
_SHARD = re.compile(r"^(.+)-(\d{5})-of-(\d{5})\.safetensors$")


@dataclass(slots=True)
class Folder:
    """What lies in the folder. sources keep the safetensors files mapped."""

    path: Path
    config: dict[str, Any]
    files: dict[str, Path]
    tensors: dict[str, TensorView]
    metadata: dict[str, Any]
    sources: dict[Path, LocalFile] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_folder(path: Path) -> Folder:
    """Reads config.json and every safetensors header that belongs to the model.

    Raises: FileError (missing or damaged parts), UnsupportedError (an adapter, no safetensors at all).
    """
    files = {name: path / name for name in SIDE_FILES if (path / name).is_file()}
    if "config.json" not in files:
        if "adapter_config.json" in files:
            base = read_json(files["adapter_config.json"]).get("base_model_name_or_path")
            made_for = f" for {base}" if isinstance(base, str) and base else ""
            hint = "name a folder with the whole model, or one into which the adapter was merged"
            raise UnsupportedError(f"{path}: this is an adapter (LoRA){made_for}, not a model", hint, what="adapter", supported=["model"])
        hint = "a model's folder holds config.json, tokenizer.json and *.safetensors; fetch what is missing"
        raise FileError(f"{path}: config.json is missing, so this is no model folder", hint, path=str(path), field="config.json")
    folder = Folder(path, read_json(files["config.json"]), files, {}, {})
    for shard in _shards(folder):
        source = LocalFile(shard)
        folder.sources[shard] = source
        _take(folder, scan_safetensors(source))
    if INDEX in files and len(folder.sources) > 1:
        _check_index(folder, index_map(files[INDEX]))
    return folder


def require_tokenizer(path: Path) -> None:
    """Raises: UnsupportedError when a folder has no tokenizer.json, naming what it has instead."""
    if (path / "tokenizer.json").is_file():
        return
    found = sorted(p.name for p in path.glob("*") if "token" in p.name or p.name.startswith("vocab") or p.suffix == ".tiktoken")
    raise UnsupportedError(
        f"{path} has no tokenizer.json" + (f" (it has {', '.join(found)})" if found else ""),
        "take a conversion that carries one, or a GGUF file of the model",
        what="tokenizer",
        supported=["tokenizer.json"],
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small file. Raises: FileError naming file and place."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise FileError(
                f"{path}: {path.stat().st_size} bytes, the limit for JSON is {MAX_JSON_BYTES}", path=str(path)
            )
        raw = path.read_bytes()
    except OSError as e:
        raise FileError(f"{path}: {e.strerror or 'cannot be read'}", path=str(path)) from None
    return parse_json(raw, str(path))


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object from bytes. Raises: FileError naming `where` and the place."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise FileError(f"{where}: not UTF-8 at offset {e.start}", path=where, offset=e.start) from None
    except json.JSONDecodeError as e:
        raise FileError(f"{where}: not valid JSON: {e.msg} at line {e.lineno}", path=where, offset=e.pos) from None
    except RecursionError:
        raise FileError(f"{where}: JSON nested too deeply", path=where) from None
    except ValueError as e:
        raise FileError(f"{where}: not valid JSON: {str(e)[:80]}", path=where) from None
    if not isinstance(value, dict):
        raise FileError(f"{where}: expected a JSON object", path=where)
    return value


def shard_name(name: Any, where: Path) -> str:
    """A shard's file name as the index gives it, refused when it leads out of the folder. Raises: FileError."""
    if (
        not isinstance(name, str)
        or not name
        or name in (".", "..")
        or any(c in name for c in "/\\\0:")
        or not name.endswith(".safetensors")
    ):
        raise FileError(
            f"{where}: the index names the shard {name!r:.80}, expected the name of a .safetensors file in the same folder",
            path=str(where),
            field="weight_map",
        )
    return name


def index_map(path: Path, raw: bytes | None = None) -> dict[str, str]:
    """Tensor name -> shard file name. Raises: FileError."""
    index = read_json(path) if raw is None else parse_json(raw, str(path))
    weights = index.get("weight_map")
    if not isinstance(weights, Mapping):
        raise FileError(f"{path}: weight_map is missing", path=str(path), field="weight_map")
    return {tensor: shard_name(shard, path) for tensor, shard in weights.items()}


def _shards(folder: Folder) -> list[Path]:
    """The files of the model: those of the index when they are there, else model.safetensors, else one complete numbered set."""
    path = folder.path
    present = sorted(p.name for p in path.iterdir() if p.name.endswith(".safetensors") and p.is_file())
    chosen: list[str] = []
    if INDEX in folder.files:
        named = sorted(set(index_map(folder.files[INDEX]).values()))
        missing = [n for n in named if n not in present]
        if not missing:
            chosen = named
        elif "model.safetensors" in present and "model.safetensors" not in named:
            folder.warnings.append(
                f"{INDEX} names {len(missing)} files that are not here; model.safetensors is used instead"
            )
        else:
            raise FileError(
                f"{path}: {len(missing)} of {len(named)} shards are missing: {', '.join(missing[:5])}",
                LOST_SHARDS,
                path=str(path),
                field=missing[0],
                need=len(named),
                have=len(named) - len(missing),
            )
    if not chosen and "model.safetensors" in present:
        chosen = ["model.safetensors"]
    if not chosen:
        chosen = _numbered(path, [n for n in present if not n.startswith("consolidated")])
    if not chosen:
        raise FileError(
            f"{path}: no safetensors files here", "GGUF files are opened by naming the file", path=str(path)
        )
    stray = [n for n in present if n not in chosen]
    if stray:
        folder.warnings.append(
            f"not part of the model, not loaded: {', '.join(stray[:5])}{' and more' if len(stray) > 5 else ''}"
        )
    return [path / n for n in chosen]


def _numbered(path: Path, names: list[str]) -> list[str]:
    """The files of the only set NAME-xxxxx-of-yyyyy (numbered from 0 or 1), or the only file."""
    sets: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = _SHARD.match(name)
        if match:
            sets.setdefault((match[1], match[3]), []).append(name)
    if not sets and len(names) == 1:
        return names
    if len(sets) > 1 or (not sets and len(names) > 1):
        raise FileError(
            f"{path}: {len(names)} safetensors files and no {INDEX}: cannot tell which are the model",
            path=str(path),
            field=INDEX,
        )
    for (stem, total), found in sets.items():
        if len(found) != int(total):
            lost = [n for n in (f"{stem}-{i:05d}-of-{total}.safetensors" for i in range(1, int(total) + 1)) if n not in found]
            raise FileError(
                f"{path}: {stem} has {len(found)} of {int(total)} shards" + (f", {lost[0]} is missing" if lost else ""),
                LOST_SHARDS,
                path=str(path),
                need=int(total),
                have=len(found),
            )
        return found
    return []


def _take(folder: Folder, header: SafetensorsHeader) -> None:
    """Adds one shard's tensors."""
    for name, view in header.tensors.items():
        if name in folder.tensors:
            raise FileError(
                f"{header.path}: tensor {name} is also in {folder.tensors[name].path.name}",
                path=str(header.path),
                field=name,
            )
        folder.tensors[name] = view
    folder.metadata.update(header.metadata)
    folder.warnings.extend(f"{header.path.name}: {w}" for w in header.warnings)


def _check_index(folder: Folder, weights: dict[str, str]) -> None:
    """Every tensor of the index must be in the shard it names; tensors that the index does not name are used and reported."""
    wrong = [t for t, shard in weights.items() if t not in folder.tensors or folder.tensors[t].path.name != shard]
    if wrong:
        raise FileError(
            f"{folder.files[INDEX]}: {len(wrong)} tensors are not in the shard that the index names, among them {wrong[0]} in {weights[wrong[0]]}",
            path=str(folder.path),
            field=wrong[0],
        )
    extra = [t for t in folder.tensors if t not in weights]
    if extra:
        folder.warnings.append(f"{len(extra)} tensors are in the shards but not in the index, among them {extra[0]}")


def chat_template(files: Mapping[str, Path]) -> str | None:
    """The folder's chat template: chat_template.jinja, else chat_template.json, else the field of tokenizer_config.json; None when there is none.

    Of several named templates the one called "default". Raises: FileError.
    """
    if "chat_template.jinja" in files:
        path = files["chat_template.jinja"]
        raw = path.read_bytes()
        if len(raw) > MAX_TEMPLATE_BYTES:
            raise FileError(
                f"{path}: {len(raw)} bytes, the limit for a template is {MAX_TEMPLATE_BYTES}", path=str(path)
            )
        return raw.decode("utf-8", "replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if name in files:
            template = read_json(files[name]).get("chat_template")
            if isinstance(template, list):
                named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
                template = named.get("default", next(iter(named.values()), None))
            if isinstance(template, str):
                return template
    return None
