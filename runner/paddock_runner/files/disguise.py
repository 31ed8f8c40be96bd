"""What a file really is when it is not what its name says."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import FileError

_MAGICS = (
    (b"\x1f\x8b", "a gzip archive"),
    (b"PK\x03\x04", "a zip archive (PyTorch checkpoints are zip archives: convert it to safetensors or GGUF)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x80\x02", "a Python pickle (convert it to safetensors or GGUF)"),
    (b"\x80\x04", "a Python pickle (convert it to safetensors or GGUF)"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive"),
    (b"7z\xbc\xaf", "a 7-zip archive"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a Windows program"),
    (b"lmgg", "a GGML file from before GGUF"),
    (b"tjgg", "a GGML file from before GGUF"),
    (b"fmgg", "a GGML file from before GGUF"),
    (b"%PDF", "a PDF document"),
)


def disguise(head: bytes) -> str:
    """What the first bytes (256 are enough) look like, as words that follow "this is"; "" when they look like nothing known."""
    if head.startswith(b"version https://git-lfs"):
        size = re.search(rb"\nsize (\d{1,19})\b", head)
        return f"a Git-LFS pointer{f' for a file of {int(size[1])} bytes' if size else ''}: the file itself was never fetched"
    for magic, words in _MAGICS:
        if head.startswith(magic):
            return words
    if head[:4] == b"GGUF":
        return "a GGUF file"
    if len(head) > 9 and head[5:8] == b"\0\0\0" and head[8:9] == b"{":
        return "a safetensors file"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    lower = text[:64].lower()
    if lower.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "a web page (HTML), not the file: the download got an answer meant for a browser"
    if text[:1] in (b"{", b"["):
        return "a JSON text (perhaps a server's error message)"
    if head and not head.strip(b"\0"):
        return "all zeros: perhaps an unfinished download"
    return ""


def not_a(kind: str, path: Path, head: bytes) -> FileError:
    """The error for a file that is not of this kind, naming the disguise or the bytes found."""
    what = disguise(head)
    if what:
        return FileError(f"{path}: not a {kind} file; this is {what}", path=str(path), offset=0, found=what)
    return FileError(
        f"{path}: not a {kind} file; it begins with {head[:8]!r}", path=str(path), offset=0, found=head[:8].hex()
    )
