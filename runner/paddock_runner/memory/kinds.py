"""Bytes of per-sequence state by kind of layer: ordinary KV, latent KV, recurrent state, and cells of a sliding window.

Pure formulas, for plans and for comparison with other engines. Each was checked against published figures (the tests hold them).
"""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT_BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "fp8": (1, 1),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "nvfp4": (16, 9),
}
"""KV formats of any engine: name -> (elements of a block, bytes of a block)."""


def joined_format(format: str, of_windows: str = "") -> str:
    """A KV format by its one word: FORMAT, or FORMAT,window=FORMAT where layers with a window have another."""
    return f"{format},window={of_windows}" if of_windows and of_windows != format else format


def split_format(format: str) -> tuple[str, str]:
    """(format, format of layers with a window) of such a word."""
    plain, _, of_windows = format.partition(",window=")
    return plain, of_windows or plain


def stored_bytes(n_elements: int, format: str) -> int:
    """Bytes of n_elements in that KV format, rounded up to whole blocks."""
    elements, n_bytes = ELEMENT_BLOCKS[format]
    return -(-n_elements // elements) * n_bytes


def kv_token_bytes(n_kv_heads: int, k_width: int, v_width: int, format: str) -> int:
    """Keys and values of one token in one layer of ordinary attention (also grouped and single-head)."""
    return stored_bytes(n_kv_heads * k_width, format) + stored_bytes(n_kv_heads * v_width, format)


def latent_token_bytes(rank: int, rope_width: int, format: str) -> int:
    """One token in one layer of latent attention: the latent and its rope part; values are a view of it.

    Source: DeepSeek-V2, 2024, section 2.1.2.
    """
    return stored_bytes(rank + rope_width, format)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """One recurrent layer's state of one sequence: the matrix (or vector) state, and the tail of its convolution."""

    state: int
    tail: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.state + self.tail


def delta_net_bytes(
    n_k_heads: int, n_v_heads: int, k_width: int, v_width: int, conv_width: int, element_bytes: int = 4
) -> StateBytes:
    """Gated delta net: a k_width x v_width matrix per value head; the convolution runs over q, k and v.

    Source: Yang et al. 2024, Gated Delta Networks, eq. 10; layout of Qwen3-Next.
    """
    channels = 2 * n_k_heads * k_width + n_v_heads * v_width
    return StateBytes(n_v_heads * k_width * v_width * element_bytes, (conv_width - 1) * channels * element_bytes)


def mamba2_bytes(
    n_heads: int, head_width: int, state_width: int, n_groups: int, conv_width: int, element_bytes: int = 4
) -> StateBytes:
    """Mamba 2: head_width x state_width per head; the convolution runs over x, B and C. Source: Dao and Gu 2024, section 7."""
    channels = n_heads * head_width + 2 * n_groups * state_width
    return StateBytes(n_heads * head_width * state_width * element_bytes, (conv_width - 1) * channels * element_bytes)


def short_conv_bytes(model_width: int, conv_width: int, element_bytes: int = 4) -> StateBytes:
    """A gated short convolution (LFM2): nothing but the tail."""
    return StateBytes(0, (conv_width - 1) * model_width * element_bytes)


def window_tokens(window: int, max_ctx_tokens: int, max_step_tokens: int, page_tokens: int) -> int:
    """Tokens that a paged engine must hold per sequence for a layer that sees `window` tokens: the window and the chunk that is
    computed, in whole pages, at most the context. window 0: all of it."""
    need = max_ctx_tokens if window == 0 else min(max_ctx_tokens, window + max_step_tokens)
    return -(-need // page_tokens) * page_tokens


def llama_cpp_cells(n_ctx: int, n_seqs: int, window: int = 0, n_ubatch: int = 512, is_unified: bool = False) -> int:
    """Cells that llama.cpp allocates over all sequences for one layer. window 0: a layer that sees everything.

    Source: https://github.com/ggml-org/llama.cpp, src/llama-kv-cache-iswa.cpp and llama-context.cpp (contexts padded to 256).
    """
    n_streams = 1 if is_unified else n_seqs
    per_stream = -(-(n_ctx // n_streams) // 256) * 256
    if window:
        wanted = window * (n_seqs if is_unified else 1) + n_ubatch
        per_stream = min(per_stream, -(-wanted // 256) * 256)
    return per_stream * n_streams
