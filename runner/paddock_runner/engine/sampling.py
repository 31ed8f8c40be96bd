"""An ask's limits and sampling parameters: checked against the sizes, and placed as the device wants them."""

from __future__ import annotations

import math
from struct import Struct

import numpy as np

from ..memory.state import StateSizes
from ..wire.messages import MAX_STOP, SAMPLING, AskView, BadField, Refused, RefusedCode

LENGTHS = Struct("<iii")
LENGTHS_AT = 40
"""prompt_length, min_length, max_length in pk_sampling."""


def place(ask: AskView, sizes: StateSizes) -> tuple[bytes, int] | Refused:
    """pk_sampling with its lengths filled in, and max_length; or the refusal of an ask that can never be served.

    An ask without max_tokens may go on to the end of the context, or of the page pool where that is smaller.
    """
    fields = SAMPLING.unpack(ask.sampling)
    floats, n_logprobs, n_bias, n_stop = fields[:7], fields[12], fields[13], fields[15]
    n_prompt, ctx = ask.prompt_tokens, sizes.max_ctx_tokens
    if n_prompt < 1 or len(ask.prompt) != 4 * n_prompt:
        return _bad(ask, BadField.PROMPT, n_prompt, 1)
    if ask.max_tokens < 0 or ask.min_tokens < 0:
        return _bad(ask, BadField.MAX_TOKENS, min(ask.max_tokens, ask.min_tokens), 0)
    if n_bias > sizes.max_bias or n_bias != ask.n_bias:
        return _bad(ask, BadField.BIAS, n_bias, sizes.max_bias)
    if n_logprobs > sizes.max_top:
        return _bad(ask, BadField.TOP, n_logprobs, sizes.max_top)
    if not 0 <= n_stop <= MAX_STOP:
        return _bad(ask, BadField.STOP, n_stop, MAX_STOP)
    if not math.isfinite(sum(floats)):
        return _bad(ask, BadField.SAMPLING, 0, 0)
    worst = int(np.frombuffer(ask.prompt, np.uint32).max())
    for token in fields[16 : 16 + n_stop]:
        worst = max(worst, token & 0xFFFFFFFF)
    if n_bias:
        worst = max(worst, int(np.frombuffer(ask.bias, np.uint32)[::2].max()))
    if worst >= sizes.n_vocab:
        return _bad(ask, BadField.TOKEN, worst if worst < 1 << 31 else worst - (1 << 32), sizes.n_vocab - 1)
    pool_tokens = (sizes.n_pages - 1) * sizes.page_tokens
    if n_prompt + max(1, ask.max_tokens) > ctx:
        return Refused(ask.ask_id, RefusedCode.CONTEXT, 0, n_prompt, ctx, ask.max_tokens)
    max_length = n_prompt + ask.max_tokens if ask.max_tokens else min(ctx, max(pool_tokens, n_prompt + 1))
    if max_length - 1 > pool_tokens:
        need = -(-(max_length - 1) // sizes.page_tokens)
        return Refused(ask.ask_id, RefusedCode.PAGES, 0, need, sizes.n_pages - 1, ask.max_tokens)
    placed = bytearray(ask.sampling)
    LENGTHS.pack_into(placed, LENGTHS_AT, n_prompt, min(n_prompt + ask.min_tokens, max_length), max_length)
    return bytes(placed), max_length


def _bad(ask: AskView, field: BadField, value: int, limit: int) -> Refused:
    return Refused(ask.ask_id, RefusedCode.BAD_ASK, 0, value, limit, field)
