"""One case list per op: odd shapes and every option. Correctness on every pack, and speed, come from the same lists."""

from __future__ import annotations

from dataclasses import dataclass

from paddock_runner.pack import abi


@dataclass(frozen=True)
class Norm:
    """rows T of width M."""

    n: int
    width: int
    has_post: bool = False
    has_residual: bool = False
    has_out: bool = True
    scale: float = 1.0
    eps: float = 1e-5
    gap: int = 0
    in_place: bool = False


NORM = [
    Norm(1, 576),
    Norm(1, 1),
    Norm(7, 33, gap=5),
    Norm(3, 2048, eps=1e-6),
    Norm(130, 640, has_residual=True, scale=0.22),
    Norm(5, 97, has_residual=True, has_out=False),
    Norm(4, 256, has_post=True, has_residual=True, gap=16),
    Norm(2, 100, has_post=True),
    Norm(9, 15, in_place=True),
    Norm(300, 640),
    Norm(700, 4096, gap=8),
]


@dataclass(frozen=True)
class Gate:
    """out [n, width] from x [n, 2 * width]."""

    n: int
    width: int
    act: str
    gap: int = 0


GATE = [
    Gate(1, 1536, "silu"),
    Gate(5, 37, "silu", 3),
    Gate(33, 100, "gelu_tanh"),
    Gate(3, 17, "gelu_erf", 1),
    Gate(2, 8, "none"),
    Gate(65, 129, "gelu_tanh", 7),
]


@dataclass(frozen=True)
class Copy:
    """x [n, width] of one format to another."""

    n: int
    width: int
    source: int
    target: int
    gap: int = 0


FLOATS = (abi.PK_F32, abi.PK_F16, abi.PK_BF16)
COPY = [Copy(5, 67, a, b, gap) for a in FLOATS for b in FLOATS for gap in (0, 3)] + [
    Copy(3, 19, abi.PK_I32, abi.PK_I32, 2),
    Copy(1, 5, abi.PK_U8, abi.PK_U8),
]


@dataclass(frozen=True)
class Add:
    """out = x * scale + y over [n, width]."""

    n: int
    width: int
    scale: float
    gap: int = 0


ADD = [Add(1, 576, 1.0), Add(7, 33, -0.5, 3), Add(100, 200, 0.25)]


@dataclass(frozen=True)
class Qkv:
    """Heads, rotation and where the tokens of each row stand: rows of (slot, position, n_tokens)."""

    n_heads: int
    n_kv_heads: int
    width: int
    v_width: int
    rows: tuple[tuple[int, int, int], ...]
    rope_width: int = 0
    layout: str = "neox"
    magnitude: float = 1.0
    has_norm: bool = False
    kv_format: int = abi.PK_F16
    page_tokens: int = 16
    in_place: bool = False


ROWS = ((0, 0, 1), (3, 5, 7), (1, 15, 2), (2, 100, 40))
MANY = ((0, 0, 300), (3, 5, 299), (2, 100, 40), (1, 30, 301))
QKV = [
    Qkv(9, 3, 64, 64, ROWS, rope_width=64),
    Qkv(4, 1, 256, 256, ROWS, rope_width=256, has_norm=True, kv_format=abi.PK_BF16),
    Qkv(2, 2, 80, 80, ROWS, rope_width=20, layout="interleaved", kv_format=abi.PK_F32, page_tokens=32),
    Qkv(6, 2, 33, 17, ROWS, rope_width=6, has_norm=True, page_tokens=5),
    Qkv(3, 1, 40, 64, ROWS, kv_format=abi.PK_F32, in_place=True),
    Qkv(2, 1, 128, 128, ROWS, rope_width=128, layout="interleaved", magnitude=1.3, kv_format=abi.PK_BF16, in_place=True),
    Qkv(32, 8, 128, 128, MANY, rope_width=128, has_norm=True, kv_format=abi.PK_BF16),
    Qkv(5, 1, 96, 64, MANY, rope_width=48, has_norm=True, kv_format=abi.PK_FP8_E4M3),
]


@dataclass(frozen=True)
class Attention:
    """rows: (slot, tokens already in the cache, n_tokens now)."""

    n_heads: int
    n_kv_heads: int
    width: int
    v_width: int
    rows: tuple[tuple[int, int, int], ...]
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    kv_format: int = abi.PK_F16
    page_tokens: int = 16
    n_threads: int = 2


DECODE = ((0, 0, 1), (3, 30, 1), (1, 15, 1), (2, 200, 1))
MIXED = ((0, 0, 37), (3, 30, 1), (1, 15, 2), (2, 200, 5), (4, 100, 1), (5, 3, 17))
LONG = ((1, 500, 1),)
PREFILL = ((2, 0, 300),)
CHUNK = ((2, 170, 130), (0, 7, 64))
ATTENTION = [
    Attention(9, 3, 64, 64, DECODE),
    Attention(9, 3, 64, 64, MIXED),
    Attention(9, 3, 64, 64, PREFILL, kv_format=abi.PK_BF16),
    Attention(9, 3, 64, 64, CHUNK, kv_format=abi.PK_F32, page_tokens=32),
    Attention(14, 2, 64, 64, LONG, page_tokens=32),
    Attention(4, 1, 256, 256, MIXED, window=20),
    Attention(4, 1, 256, 256, CHUNK, window=70, kv_format=abi.PK_BF16),
    Attention(4, 1, 256, 256, LONG, window=333, kv_format=abi.PK_BF16, n_threads=3),
    Attention(16, 2, 256, 256, ((1, 129, 1),), kv_format=abi.PK_BF16),  # alone and short: whole heads
    Attention(16, 2, 256, 256, ((1, 7, 1),), kv_format=abi.PK_BF16),
    Attention(4, 2, 32, 32, MIXED, softcap=5.0),
    Attention(4, 2, 128, 128, MIXED, has_sinks=True, window=16, kv_format=abi.PK_F32),
    Attention(2, 2, 33, 17, MIXED, page_tokens=5),
    Attention(2, 1, 80, 96, CHUNK, softcap=8.0, kv_format=abi.PK_BF16, page_tokens=7),
    Attention(16, 1, 72, 72, LONG, has_sinks=True, kv_format=abi.PK_F32, page_tokens=64),
    Attention(5, 1, 96, 96, PREFILL, has_sinks=True, softcap=3.0, window=50),
    Attention(3, 3, 1, 1, MIXED, page_tokens=1, kv_format=abi.PK_F32),
    Attention(8, 2, 512, 512, MIXED, kv_format=abi.PK_BF16),
    Attention(4, 1, 512, 264, CHUNK, window=70, has_sinks=True),
    Attention(2, 2, 320, 320, LONG, softcap=8.0, kv_format=abi.PK_BF16, page_tokens=7),
    Attention(2, 1, 516, 516, MIXED, kv_format=abi.PK_F32),
]


@dataclass(frozen=True)
class Embed:
    """Table [V, width] in a format; tokens drawn at random."""

    n: int
    vocab: int
    width: int
    format: str
    is_packed: bool
    scale: float = 1.0


EMBED = [
    Embed(1, 100, 576, "f32", False),
    Embed(9, 100, 33, "f16", False, 0.5),
    Embed(130, 100, 64, "bf16", True, 8.0),
    Embed(5, 100, 96, "f16", True),
]
