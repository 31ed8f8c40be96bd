"""The tool-call dialects. The first that fits the chat template is the model's."""

from __future__ import annotations

from .dialect import Dialect, Schemas, Takes, ToolParser
from .gemma import GEMMA4
from .glm import GLM, HUNYUAN
from .hermes import HERMES
from .json_blocks import COHERE, FUNCTOOLS, GIGACHAT, GRANITE, NEMOTRON, PHI4, TOOL_CALLS
from .llama import LLAMA
from .markup import DEEPSEEK_V4, DEEPSEEK_V32, MINICPM5, MINIMAX_M2, MUSE, QWEN3_CODER, SEED_OSS
from .minimax_m3 import MINIMAX_M3
from .named import DEEPSEEK, FUNCTIONARY, KIMI, MISTRAL, SOLAR
from .pythonic import APERTUS, LFM2

DIALECTS: tuple[Dialect, ...] = (
    MINIMAX_M3,
    MINIMAX_M2,
    MUSE,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DEEPSEEK,
    KIMI,
    SOLAR,
    HUNYUAN,
    GLM,
    SEED_OSS,
    GEMMA4,
    COHERE,
    MISTRAL,
    NEMOTRON,
    PHI4,
    GRANITE,
    GIGACHAT,
    LFM2,
    APERTUS,
    QWEN3_CODER,
    FUNCTIONARY,
    MINICPM5,
    TOOL_CALLS,
    HERMES,
    FUNCTOOLS,
    LLAMA,
)


def dialect_of(template: str) -> Dialect | None:
    """The dialect that a chat template teaches its model, or None when it knows no tools."""
    if "tool" not in template and "function" not in template:
        return None
    return next((d for d in DIALECTS if d.fits(template)), None)


__all__ = ["DIALECTS", "Dialect", "Schemas", "Takes", "ToolParser", "dialect_of"]
