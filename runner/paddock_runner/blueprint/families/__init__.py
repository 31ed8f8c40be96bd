"""The list of families: one line each. A family turns a checkpoint's metadata into a Blueprint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint
from . import gemma3, llama, qwen2, qwen3


@dataclass(frozen=True, slots=True)
class Family:
    """gguf: values of general.architecture; hf: values of model_type; examples: models that people know it by."""

    name: str
    gguf: tuple[str, ...]
    hf: tuple[str, ...]
    from_gguf: Callable[[Checkpoint, str], Blueprint]
    from_hf: Callable[[Checkpoint, Fields], Blueprint]
    examples: str


FAMILIES = (
    Family("llama", ("llama",), ("llama", "mistral"), llama.from_gguf, llama.from_hf, "Llama 1-3, Mistral, SmolLM"),
    Family("qwen2", ("qwen2",), ("qwen2",), qwen2.from_gguf, qwen2.from_hf, "Qwen 2, Qwen 2.5"),
    Family("qwen3", ("qwen3",), ("qwen3",), qwen3.from_gguf, qwen3.from_hf, "Qwen 3"),
    Family("gemma3", ("gemma3",), ("gemma3_text", "gemma3"), gemma3.from_gguf, gemma3.from_hf, "Gemma 3"),
)
