"""What llama.cpp is measured with as a peer: its file of our shape, and machine code put into its library."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
from paddock_runner.blueprint.names import expected_shapes
from paddock_runner.files.checkpoint import open_checkpoint

from bench.fatbins import Image, chosen, images, modules, thinned
from bench.gpu_models import SHAPES, blueprint
from bench.llama_file import write

KERNEL = ".visible .entry {}(\n.param .u64 p\n)\n{{\n{{mul.f16x2 %r1,%r2,%r3;\n}}\nmov.b32 %r1, {{%rs1, %rs2}};\nret;\n}}\n"


@pytest.mark.parametrize("kind, formats", [("bf16", {"bf16", "f32"}), ("q8_0", {"q8_0", "f32"}), ("q4_k_m", {"q4_k", "q6_k", "f32"})])
def test_the_file_is_a_whole_model_of_the_shape_that_we_measure(tmp_path: Path, kind: str, formats: set[str]) -> None:
    n_bytes = write(kind, tmp_path / "m.gguf", SHAPES["tiny"], 2)
    opened = open_checkpoint(tmp_path / "m.gguf")
    assert n_bytes == (tmp_path / "m.gguf").stat().st_size and opened.warnings == ["there is no chat template"]
    assert {t.format for t in opened.tensors.values()} == formats
    assert sorted(t.shape for t in opened.tensors.values()) == sorted(expected_shapes(blueprint("tiny")).values())
    assert opened.metadata["qwen3.block_count"] == 2 and len(opened.metadata["tokenizer.ggml.tokens"]) == SHAPES["tiny"][-1]


def fat(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary of (kind, architecture, body)."""
    body = b"".join(struct.pack("<HHIQ", kind, 1, 64, len(data)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + data for kind, arch, data in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_every_module_of_a_library_is_found_with_the_room_until_the_next() -> None:
    one, two = fat((1, 75, b"p" * 24), (2, 86, b"e" * 40)), fat((2, 90, b"x" * 8))
    held, names = one + bytes(16) + two + bytes(24), b"\0.nv_fatbin\0.shstrtab\0"
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, 64)
    struct.pack_into("<HHH", head, 0x3A, 64, 2, 1)
    sections = [struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, start, n, 0, 0, 8, 0) for at, start, n in ((1, 192, len(held)), (12, 192 + len(held), len(names)))]
    data = bytes(head) + b"".join(sections) + held + names
    found = list(modules(data))
    assert found == [(192, len(one) + 16), (192 + len(one) + 16, len(two) + 24)]
    assert list(images(data, found[0][0])) == [Image("ptx", 75, 24), Image("elf", 86, 40)]


def test_the_last_pattern_that_matches_decides() -> None:
    stays = chosen([".", "!moe|attention<", "attention<128"])
    assert [stays(name) for name in ("add", "moe_add", "attention<64>", "attention<128>")] == [True, False, False, True]


@pytest.mark.skipif(not shutil.which("c++filt"), reason="no c++filt")
def test_kernels_go_whole_however_their_assembly_is_written() -> None:
    text = ".version 9.1\n.global .b8 table[2] = {1, 2};\n" + KERNEL.format("_Z3addf") + KERNEL.format("_Z3mulf")
    left, n_kept = thinned(text, chosen([".", "!mul"]))
    assert n_kept == 1 and left == text.replace(KERNEL.format("_Z3mulf"), "\n")
