"""Makes small GGUF and safetensors files as bytes, legal or not, for tests of everything that reads them."""

from __future__ import annotations

import json
import struct
from typing import Any

from paddock_runner.files.checkpoint import Checkpoint, open_remote
from paddock_runner.files.source import RemoteFile

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def one(kind: int, value: Any) -> bytes:
    """A value without its type."""
    return text(value) if kind == STR else struct.pack("<" + CODES[kind], value)


def key(name: str | bytes, kind: int, value: Any, element: int | None = None) -> bytes:
    """A metadata entry; `element` for arrays."""
    head = text(name) + struct.pack("<I", kind)
    if kind == ARR:
        assert element is not None
        return head + struct.pack("<IQ", element, len(value)) + b"".join(one(element, v) for v in value)
    return head + one(kind, value)


def auto(name: str, value: Any) -> bytes:
    """A metadata entry of the type that the value suggests."""
    if isinstance(value, list):
        element = STR if isinstance(value[0], str) else F32 if isinstance(value[0], float) else BOOL if isinstance(value[0], bool) else I32
        return key(name, ARR, value, element)
    kind = BOOL if isinstance(value, bool) else U32 if isinstance(value, int) else F32 if isinstance(value, float) else STR
    return key(name, kind, value)


def tensor(name: str | bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor info; dims innermost first, as in the file."""
    return text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def gguf(keys: list[bytes], infos: list[bytes], data: int = 0, version: int = 3, align: int = 32) -> bytes:
    """A file with these entries and `data` bytes of zeros."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % align) + bytes(data)


def gguf_model(metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], kinds: dict[str, int] | None = None, sizes: tuple[int, int] = (1, 4)) -> bytes:
    """A whole file of f32 tensors (shapes outermost first) with consistent offsets. kinds: other ggml types, of block `sizes`."""
    infos, at = [], 0
    for name, shape in shapes.items():
        kind = (kinds or {}).get(name, 0)
        n = 1
        for d in shape:
            n *= d
        infos.append(tensor(name, tuple(reversed(shape)), kind, at))
        at += -(-(n // sizes[0] * sizes[1] if kind else n * 4) // 32) * 32
    return gguf([auto(k, v) for k, v in metadata.items()], infos, at)


def safetensors(entries: dict[str, Any] | bytes, data: int = 0) -> bytes:
    """A file with this header and `data` bytes of zeros."""
    head = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(head)) + head + bytes(data)


def source(data: bytes, name: str = "file.gguf") -> RemoteFile:
    """Bytes in memory, as a remote file of known size."""
    return RemoteFile(name, lambda offset, n: data[offset : offset + n], len(data))


def checkpoint(data: bytes, name: str = "file.gguf", config: dict[str, Any] | None = None) -> Checkpoint:
    """An opened checkpoint of bytes in memory."""
    raw = None if config is None else json.dumps(config).encode()
    return open_remote(name, [(name, lambda offset, n: data[offset : offset + n], len(data))], raw)


LLAMA = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 256, "llama.embedding_length": 64,
    "llama.feed_forward_length": 96, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
"""Metadata of a tiny llama."""


def llama_shapes(n_layers: int = 2, m: int = 64, kv: int = 32, ff: int = 96, vocab: int = 40, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of that llama, by GGUF names."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, m), "output_norm.weight": (m,)}
    if not tied:
        shapes["output.weight"] = (vocab, m)
    for i in range(n_layers):
        rows = {"attn_q": (m, m), "attn_k": (kv, m), "attn_v": (kv, m), "attn_output": (m, m), "ffn_gate": (ff, m), "ffn_up": (ff, m), "ffn_down": (m, ff), "attn_norm": (m,), "ffn_norm": (m,)}
        shapes.update({f"blk.{i}.{name}.weight": shape for name, shape in rows.items()})
    return shapes
