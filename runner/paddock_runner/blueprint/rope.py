"""Rope scaling, resolved: every known recipe becomes per-frequency divisors and a magnitude.

Frequency i of a rope of `width` dimensions is theta^(-2i/width) / factors[i].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError
from ..files.fields import Fields

KNOWN = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Scaling:
    """A resolved recipe: the fields of Rope that it sets."""

    factors: tuple[float, ...] = ()
    magnitude: float = 1.0
    long_factors: tuple[float, ...] = ()
    original_ctx_tokens: int = 0


UNSCALED = Scaling()


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
    theta: float, width: int, factor: float, original_ctx_tokens: int, turns: tuple[float, float] = (32.0, 1.0), is_rounded: bool = True
) -> tuple[float, ...]:
    """Dimensions that turn more than turns[0] times within the original context are kept, those under turns[1] stretched.

    is_rounded: bounds are rounded outwards to whole dimensions, as in the authors' code. Source: Peng et al. 2023, YaRN, section 3.2.
    """

    def dimension(n: float) -> float:
        return width * math.log(original_ctx_tokens / (n * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(turns[0]), dimension(turns[1])
    if is_rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    out = []
    for i in range(width // 2):
        kept = 1.0 - min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(out)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Multiplies cos and sin. Source: Peng et al. 2023, YaRN, eq. 22; weight: mscale of DeepSeek's variant."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_magnitude(factor: float, original_ctx_tokens: int) -> float:
    """Multiplies cos and sin; factor: how much longer the context became. Source: Ding et al. 2024, LongRoPE; transformers' code."""
    return math.sqrt(1 + math.log(factor) / math.log(original_ctx_tokens)) if factor > 1 else 1.0


def proportional_factors(width: int, n_turned: int, factor: float = 1.0) -> tuple[float, ...]:
    """The first n_turned pairs of the whole width turn by its frequencies, the others stand still. Source: transformers, "proportional" rope."""
    n = width // 2
    return () if n_turned >= n and factor == 1.0 else (factor,) * n_turned + (math.inf,) * (n - n_turned)


def refuse(kind: str, where: str) -> UnsupportedError:
    """The refusal of a scaling recipe."""
    return UnsupportedError(
        f"{where}: rope scaling {kind!r:.40} is not supported; supported: {', '.join(KNOWN)}",
        what=f"rope scaling {kind}",
        supported=list(KNOWN),
    )


def hf_scaling(parameters: Mapping[str, Any] | None, config: Fields, theta: float, width: int) -> Scaling:
    """What a Hugging Face rope_scaling or rope_parameters object means. config: holds context lengths. Raises: FileError, UnsupportedError."""
    if not parameters:
        return UNSCALED
    fields = Fields(parameters, config.where, "field", "rope.")
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "su":
        kind = "longrope"
    if kind == "default":
        return UNSCALED
    if kind not in KNOWN:
        raise refuse(kind, config.where)
    ctx_tokens = config.integer("max_position_embeddings", low=1, high=1 << 31)
    default = config.integer("original_max_position_embeddings", ctx_tokens, low=1)
    original = fields.integer("original_max_position_embeddings", default, low=1)
    factor = fields.number("factor", ctx_tokens / original if kind in ("yarn", "longrope") else None)
    if factor <= 0:
        raise fields.error("factor", f"is {factor}, expected more than 0")
    if kind == "linear":
        return Scaling((factor,) * (width // 2))
    if kind == "llama3":
        low, high = fields.number("low_freq_factor", 1.0), fields.number("high_freq_factor", 4.0)
        if not 0 < low < high:
            raise fields.error("high_freq_factor", f"is {high} and low_freq_factor {low}, expected two rising positive numbers")
        return Scaling(llama3_factors(theta, width, factor, low, high, original))
    return _hf_longrope(fields, width, factor, original) if kind == "longrope" else _hf_yarn(fields, theta, width, factor, original)


def _hf_longrope(fields: Fields, width: int, factor: float, original: int) -> Scaling:
    short, long = (fields.numbers(key) for key in ("short_factor", "long_factor"))
    for key, values in (("short_factor", short), ("long_factor", long)):
        if len(values) != width // 2 or min(values) <= 0:
            raise fields.error(key, f"has {len(values)} entries, expected {width // 2} positive divisors")
    magnitude = fields.number("attention_factor", longrope_magnitude(factor, max(original, 2)))
    return Scaling(short, magnitude, long, original)


def _hf_yarn(fields: Fields, theta: float, width: int, factor: float, original: int) -> Scaling:
    over, under = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    magnitude = yarn_magnitude(factor, over) / yarn_magnitude(factor, under) if over and under else yarn_magnitude(factor)
    magnitude = fields.number("attention_factor", magnitude)
    fast, slow = fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0)
    if not 0 < slow <= fast:
        raise fields.error("beta_fast", f"is {fast} and beta_slow {slow}, expected two positive numbers, the first the larger")
    return Scaling(yarn_factors(theta, width, factor, original, (fast, slow), fields.flag("truncate", True)), magnitude)


def gguf_scaling(fields: Fields, arch: str, theta: float, width: int, ctx_tokens: int) -> Scaling:
    """What GGUF's rope.scaling keys mean. Raises: FileError, UnsupportedError."""
    kind = fields.text(f"{arch}.rope.scaling.type", "none")
    factor = fields.number(f"{arch}.rope.scaling.factor", fields.number(f"{arch}.rope.scale_linear", 1.0))
    if factor <= 0:
        raise fields.error(f"{arch}.rope.scaling.factor", f"is {factor}, expected more than 0")
    if kind == "none" or factor == 1.0:
        return UNSCALED
    if kind == "linear":
        return Scaling((factor,) * (width // 2))
    if kind == "yarn":
        original = fields.integer(f"{arch}.rope.scaling.original_context_length", ctx_tokens, low=1)
        attention = fields.number(f"{arch}.rope.scaling.attn_factor", fields.number(f"{arch}.rope.scaling.yarn_attn_factor", 1.0))
        fast = fields.number(f"{arch}.rope.scaling.yarn_beta_fast", 32.0)
        slow = fields.number(f"{arch}.rope.scaling.yarn_beta_slow", 1.0)
        if not 0 < slow <= fast:
            raise fields.error(f"{arch}.rope.scaling.yarn_beta_fast", f"is {fast}, the slow one {slow}; expected the first the larger")
        return Scaling(yarn_factors(theta, width, factor, original, (fast, slow)), attention * yarn_magnitude(factor))
    raise refuse(kind, fields.where)
