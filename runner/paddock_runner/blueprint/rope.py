"""Rope scaling, resolved: every known recipe becomes per-frequency divisors and a magnitude.

Frequency i of a rope of `width` dimensions is theta^(-2i/width) / factors[i].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedError
from ..files.fields import Fields

KNOWN = ("default", "linear", "llama3", "yarn")


def llama3_factors(
    theta: float, width: int, factor: float, low: float, high: float, original_ctx_tokens: int
) -> tuple[float, ...]:
    """Long wave lengths are stretched by `factor`, short ones kept, those between blended.

    Source: meta-llama/llama-models, models/llama3/reference_impl/model.py, apply_scaling.
    """
    out = []
    for i in range(width // 2):
        turns = original_ctx_tokens / (2 * math.pi * theta ** (2 * i / width))
        if turns < low:
            out.append(factor)
        elif turns > high:
            out.append(1.0)
        else:
            smooth = (turns - low) / (high - low)
            out.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(out)


def yarn_factors(
    theta: float, width: int, factor: float, original_ctx_tokens: int, fast: float = 32.0, slow: float = 1.0
) -> tuple[float, ...]:
    """Dimensions that turn more than `fast` times within the original context are kept, those under `slow` stretched.

    Source: Peng et al. 2023, YaRN, section 3.2; bounds rounded outwards as in the authors' code.
    """

    def dimension(turns: float) -> float:
        return width * math.log(original_ctx_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), width - 1)
    out = []
    for i in range(width // 2):
        kept = 1.0 - min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        out.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(out)


def yarn_magnitude(factor: float) -> float:
    """Multiplies cos and sin. Source: Peng et al. 2023, YaRN, eq. 22."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def refuse(kind: str, where: str) -> UnsupportedError:
    """The refusal of a scaling recipe."""
    return UnsupportedError(
        f"{where}: rope scaling {kind!r:.40} is not supported; supported: {', '.join(KNOWN)}",
        what=f"rope scaling {kind}",
        supported=list(KNOWN),
    )


def hf_scaling(
    parameters: Mapping[str, Any] | None, theta: float, width: int, ctx_tokens: int, where: str
) -> tuple[tuple[float, ...], float]:
    """(factors, magnitude) of a Hugging Face rope_scaling or rope_parameters object. Raises: FileError, UnsupportedError."""
    if not parameters:
        return (), 1.0
    fields = Fields(parameters, where, "field", "rope.")
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return (), 1.0
    if kind not in KNOWN:
        raise refuse(kind, where)
    factor = fields.number("factor")
    if factor <= 0:
        raise fields.error("factor", f"is {factor}, expected more than 0")
    original = fields.integer("original_max_position_embeddings", ctx_tokens, low=1)
    if kind == "linear":
        return (factor,) * (width // 2), 1.0
    if kind == "llama3":
        low, high = fields.number("low_freq_factor", 1.0), fields.number("high_freq_factor", 4.0)
        if not 0 < low < high:
            raise fields.error(
                "high_freq_factor", f"is {high} and low_freq_factor {low}, expected two rising positive numbers"
            )
        return llama3_factors(theta, width, factor, low, high, original), 1.0
    magnitude = fields.number("attention_factor", yarn_magnitude(factor))
    fast, slow = fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0)
    if not 0 < slow <= fast:
        raise fields.error(
            "beta_fast", f"is {fast} and beta_slow {slow}, expected two positive numbers, the first the larger"
        )
    return yarn_factors(theta, width, factor, original, fast, slow), magnitude


def gguf_scaling(
    fields: Fields, arch: str, theta: float, width: int, ctx_tokens: int
) -> tuple[tuple[float, ...], float]:
    """(factors, magnitude) of GGUF's rope.scaling keys. Raises: FileError, UnsupportedError."""
    kind = fields.text(f"{arch}.rope.scaling.type", "none")
    factor = fields.number(f"{arch}.rope.scaling.factor", fields.number(f"{arch}.rope.scale_linear", 1.0))
    if factor <= 0:
        raise fields.error(f"{arch}.rope.scaling.factor", f"is {factor}, expected more than 0")
    if kind == "none" or factor == 1.0:
        return (), 1.0
    if kind == "linear":
        return (factor,) * (width // 2), 1.0
    if kind == "yarn":
        original = fields.integer(f"{arch}.rope.scaling.original_context_length", ctx_tokens, low=1)
        attention = fields.number(f"{arch}.rope.scaling.attn_factor", 1.0)
        return yarn_factors(theta, width, factor, original), attention * yarn_magnitude(factor)
    raise refuse(kind, fields.where)
