"""paddock inspect: what a checkpoint's header says. Reads headers only, from here or from a URL or the hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from paddock_runner.files.checkpoint import Checkpoint

from paddock_manager.commands.fit import opened
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.store import headline
from paddock_manager.ui import Ui, count, plain, size

MAX_VALUE = 120
COMMAND = Command(
    "inspect",
    "Read a checkpoint's header: what it is, its metadata, tensors and formats.",
    (Argument("file", "a GGUF or safetensors file, a folder, a URL, or a model", kind="path"),),
    (
        Option("--tensors", "list every tensor"),
        Option("--metadata", "list every metadata key"),
        Option("--template", "print the chat template"),
    ),
    "Weights are never read. Exit code 7: the file is damaged or hostile; 12: a format that Paddock does not read.",
)


def run(values: Values, ui: Ui) -> int:
    """Open, print."""
    _, checkpoint, notes = opened(values.text("file"), ui)
    for warning in checkpoint.warnings:
        ui.warn(plain(warning))
    head = headline.of(checkpoint)
    if values.flag("template"):
        template = headline.template_of(checkpoint) or ""
        ui.result(
            "inspect",
            {"template": template, "sha256": head["template_sha256"]},
            lambda u: u.line(plain(template, keep="\n\t")),
        )
        return 0
    body = {**facts(checkpoint, head), "notes": notes}
    ui.result("inspect", body, lambda u: human(u, checkpoint, body, values))
    return 0


def facts(checkpoint: Checkpoint, head: dict[str, Any]) -> dict[str, Any]:
    """Everything for --json."""
    unsupported = checkpoint.unsupported_tensors()
    return {
        "path": str(checkpoint.path),
        "version": checkpoint.version,
        **head,
        "architecture_known": head["family"] is not None,
        "n_tensors": len(checkpoint.tensors),
        "tensor_bytes": checkpoint.n_bytes,
        "formats": formats(checkpoint),
        "tokenizer": tokenizer(checkpoint),
        "licence": headline.licence(checkpoint),
        "unsupported_tensors": [{"name": v.name, "format": v.format} for v in unsupported],
        "metadata": {str(k): shown(v) for k, v in _items(checkpoint)},
        "tensors": [
            {"name": v.name, "shape": list(v.shape), "format": v.format, "offset": v.offset, "n_bytes": v.n_bytes}
            for v in checkpoint.tensors.values()
        ],
        "warnings": list(checkpoint.warnings),
    }


def tokenizer(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Its kind, how many tokens it has, and those that begin and end a text, as numbers; None when the checkpoint holds none."""
    if checkpoint.kind == "gguf":
        head, stem = checkpoint.metadata, "tokenizer.ggml."
        if not isinstance(head.get(f"{stem}model"), str):
            return None
        kind = "/".join(str(head[k]) for k in (f"{stem}model", f"{stem}pre") if isinstance(head.get(k), str))
        ids, tokens = {x: head.get(f"{stem}{x}_token_id") for x in ("bos", "eos")}, head.get(f"{stem}tokens")
    else:
        names = [n for n in ("tokenizer.json", "tokenizer.model", "vocab.txt", "tekken.json") if n in checkpoint.files]
        config = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
        if not names and "vocab_size" not in config:
            return None
        kind, tokens = names[0] if names else "not in the header", range(_whole(config.get("vocab_size")) or 0)
        ids = {x: config.get(f"{x}_token_id") for x in ("bos", "eos")}
    n_tokens = len(tokens) if isinstance(tokens, Sequence) else 0
    return {"kind": kind, "n_tokens": n_tokens, "bos": _whole(ids["bos"]), "eos": _whole(ids["eos"])}


def _whole(value: Any) -> int | None:
    """A number, or the first of several; None for anything else."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) and not isinstance(first, bool) else None


def formats(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes by weight format, largest first."""
    bytes_of: Counter[str] = Counter()
    for view in checkpoint.tensors.values():
        bytes_of[view.format] += view.n_bytes
    return dict(bytes_of.most_common())


def _items(checkpoint: Checkpoint) -> list[tuple[str, Any]]:
    source = checkpoint.metadata if checkpoint.kind == "gguf" or not checkpoint.config else checkpoint.config
    return [(k, source[k]) for k in source]


def shown(value: Any) -> Any:
    """A metadata value that can be printed: long arrays by their length."""
    if isinstance(value, str | int | bool) or value is None:
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, dict):
        return {str(k): shown(v) for k, v in list(value.items())[:64]}
    n = len(value)
    return [shown(x) for x in value] if n <= 16 else f"array of {n}"


def human(out: Ui, checkpoint: Checkpoint, body: dict[str, Any], values: Values) -> None:
    """For people."""
    rows = [
        ("file", str(checkpoint.path)),
        ("format", f"{checkpoint.kind}" + (f" version {checkpoint.version}" if checkpoint.version else "")),
        ("architecture", str(body["family"]) if body["family"] else "unknown architecture"),
        ("role", str(body["role"])),
        ("parameters", count(body["n_params"])),
        ("tensors", f"{body['n_tensors']}, {size(body['tensor_bytes'])}"),
        ("formats", ", ".join(f"{k} {size(n)}" for k, n in body["formats"].items()) or "none"),
        ("context", f"{body['max_ctx_tokens']} tokens" if body["max_ctx_tokens"] else "not said"),
        ("tokenizer", _tokenizer_line(body["tokenizer"])),
        ("licence", plain(body["licence"] or "not said")),
        ("chat template", f"sha256 {body['template_sha256'][:16]}" if body["template_sha256"] else "none"),
    ]
    out.pairs(rows)
    for row in body["unsupported_tensors"][:8]:
        out.line(f"unsupported: tensor {plain(row['name'])} is of {row['format'].replace('unsupported:', 'type ')}")
    for note in body["notes"]:
        out.line(f"note: {note}")
    if values.flag("metadata"):
        out.line()
        out.pairs((plain(k), _short(v)) for k, v in body["metadata"].items())
    if values.flag("tensors"):
        out.line()
        cells = [
            (t["name"], "x".join(map(str, t["shape"])) or "scalar", t["format"], str(t["n_bytes"]))
            for t in body["tensors"]
        ]
        out.table(("TENSOR", "SHAPE", "FORMAT", "BYTES"), cells, right=(3,))


def _tokenizer_line(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none"
    ends = ", ".join(f"{name} {found[name]}" for name in ("bos", "eos") if found[name] is not None)
    return plain(f"{found['kind']}, {found['n_tokens']} tokens" + (f", {ends}" if ends else ""))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"
