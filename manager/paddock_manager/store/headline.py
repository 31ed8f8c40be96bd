"""The few facts of a checkpoint that lists show: family, format, parameters, context. Read once, when a model is pulled or added."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

from paddock_runner.errors import FileError, PaddockError
from paddock_runner.files.checkpoint import Checkpoint, open_checkpoint
from paddock_runner.files.sentence import purpose

MAX_LICENCE = 64


def read(path: Path) -> dict[str, Any]:
    """Open a checkpoint's header.

    Raises: FileError, UnsupportedError, UnknownModel, AmbiguousModel.
    """
    return of(open_checkpoint(path))


def of(checkpoint: Checkpoint) -> dict[str, Any]:
    """family, format (the one that holds most bytes), n_params, max_ctx_tokens, template_sha256, role, task; None where unknown."""
    bytes_of: Counter[str] = Counter()
    for view in checkpoint.tensors.values():
        bytes_of[view.format] += view.n_bytes
    template = template_of(checkpoint)
    return {
        "family": family(checkpoint),
        "format": bytes_of.most_common(1)[0][0] if bytes_of else None,
        "n_params": sum(v.n_elements for v in checkpoint.tensors.values()),
        "max_ctx_tokens": max_ctx_tokens(checkpoint),
        "template_sha256": hashlib.sha256(template.encode("utf-8", "replace")).hexdigest() if template else None,
        "role": checkpoint.role,
        "kind": checkpoint.kind,
        "task": task(checkpoint),
    }


def task(checkpoint: Checkpoint) -> str:
    """What the model is for, as far as its files say: "generate", "embed" or "rank"."""
    try:
        return purpose(checkpoint) or "generate"
    except PaddockError:
        return "generate"


def licence(checkpoint: Checkpoint) -> str | None:
    """As the header says, or the model card beside it."""
    said = checkpoint.metadata.get("general.license")
    if isinstance(said, str):
        return said[:MAX_LICENCE]
    card = checkpoint.path / "README.md" if checkpoint.path.is_dir() else None
    try:
        head = card.read_bytes()[: 1 << 16].decode("utf-8", "replace") if card is not None else ""
    except OSError:
        return None
    front = head.split("---")[1] if head.startswith("---") else ""
    lines = (line.partition(":")[2].strip() for line in front.splitlines() if line.startswith("license:"))
    return next(lines, None)


def family(checkpoint: Checkpoint) -> str | None:
    """What the file calls its architecture."""
    name = (
        checkpoint.metadata.get("general.architecture")
        if checkpoint.kind == "gguf"
        else checkpoint.config.get("model_type")
    )
    return name if isinstance(name, str) else None


def max_ctx_tokens(checkpoint: Checkpoint) -> int | None:
    """The context that the model was trained for."""
    if checkpoint.kind == "gguf":
        value = checkpoint.metadata.get(f"{family(checkpoint)}.context_length")
    else:
        text = checkpoint.config.get("text_config")
        value = checkpoint.config.get("max_position_embeddings")
        if value is None and isinstance(text, dict):
            value = text.get("max_position_embeddings")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def template_of(checkpoint: Checkpoint) -> str | None:
    """The chat template, None when there is none or its file is damaged."""
    try:
        return checkpoint.chat_template
    except PaddockError:
        return None


def template_at(path: Path) -> str:
    """The chat template of the checkpoint there; "" when it has none or cannot be read."""
    try:
        return template_of(open_checkpoint(path)) or ""
    except PaddockError:
        return ""


def pinned_template(path: Path, pinned_sha256: str) -> str:
    """The chat template of a stored model; "" when it has none.

    Raises: FileError when it is not the one that was pinned at the pull ("" pins nothing).
    """
    text = template_of(open_checkpoint(path)) or ""
    found = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    if pinned_sha256 and found != pinned_sha256:
        raise FileError(
            f"{path}: the chat template is not the one that was pulled",
            "`paddock verify` says what else changed",
            expected=pinned_sha256,
            actual=found,
        )
    return text
