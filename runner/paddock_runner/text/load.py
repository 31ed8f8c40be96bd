"""The tokenizer of an opened checkpoint, whatever its kind."""

from __future__ import annotations

from ..errors import FileError
from ..files.checkpoint import Checkpoint
from .folder_tokenizer import tokenizer_from_folder
from .gguf_tokenizer import tokenizer_from_gguf
from .tokenizer import Tokenizer


def load_tokenizer(checkpoint: Checkpoint, n_rows: int | None = None) -> Tokenizer:
    """The checkpoint's tokenizer. n_rows: rows of the model's embedding; ids at or above it are never produced.

    Raises: UnsupportedError (kind not known, no tokenizer.json), FileError (damaged; named by the checkpoint).
    """
    if checkpoint.kind != "gguf":
        return tokenizer_from_folder(checkpoint.path, n_rows)
    try:
        return tokenizer_from_gguf(checkpoint.metadata, n_rows)
    except FileError as error:
        raise FileError(
            f"{checkpoint.path}: {error.message}", error.hint, path=str(checkpoint.path), **error.facts
        ) from error
