"""The generated ctypes agree with the C compiler, and the digest changes when, and only when, the meaning does."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paddock_runner.formats.table import FORMATS
from paddock_runner.pack import abi

ROOT = Path(__file__).resolve().parents[3]
HEADER = "\n".join((ROOT / "packs" / name).read_text() for name in ("pack.h", "rare.h", "copies.h", "cold.h", "beside.h"))


@pytest.fixture(scope="module")
def bindgen():
    """The generator as a module."""
    spec = importlib.util.spec_from_file_location("bindgen", ROOT / "packs/bindgen.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def structs():
    return {
        n: v
        for n, v in vars(abi).items()
        if n.startswith("pk_") and isinstance(v, type) and issubclass(v, ctypes.Structure)
    }


def test_every_struct_has_the_compilers_sizes_and_offsets(tmp_path):
    facts, lines = {}, []
    for name, struct in structs().items():
        facts[name] = ctypes.sizeof(struct)
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            facts[f"{name}.{field}"] = getattr(struct, field).offset
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stdio.h>\n#include <stddef.h>\n#include "{ROOT}/packs/rare.h"\n#include "{ROOT}/packs/cold.h"\nint main(void) {{ {" ".join(lines)} return 0; }}\n'
    )
    subprocess.run(["cc", "-std=c99", "-Wall", "-Werror", str(source), "-o", str(tmp_path / "layout")], check=True)
    printed = subprocess.run([str(tmp_path / "layout")], check=True, capture_output=True, text=True).stdout
    assert {k: int(v) for k, v in (line.split() for line in printed.splitlines())} == facts
    assert len(facts) > 200


def test_structs_have_no_padding_that_a_record_could_leak():
    for name, struct in structs().items():
        end = 0
        for field, *_ in struct._fields_:
            assert getattr(struct, field).offset == end, f"{name}.{field} follows a hole"
            end = getattr(struct, field).offset + getattr(struct, field).size
        assert end == ctypes.sizeof(struct) or name == "pk_step_head", f"{name} ends with a hole"


def test_generated_files_are_fresh():
    subprocess.run([sys.executable, str(ROOT / "packs/bindgen.py"), "--check"], check=True)


def test_comments_and_spacing_do_not_change_the_digest(bindgen):
    assert (
        bindgen.generate(re.sub(r"/\*.*?\*/", "/* other */", HEADER, flags=re.S).replace("    ", "\t"))[1] == abi.DIGEST
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("float eps;", "double eps;"),
        ("PK_OP_GATE = 7", "PK_OP_GATE = 17"),
        ("#define PK_ROW_NAN 16", "#define PK_ROW_NAN 32"),
        ("int32_t n_kv_heads;", "int32_t n_key_heads;"),
    ],
)
def test_a_changed_meaning_changes_the_digest(bindgen, before, after):
    assert before in HEADER
    assert bindgen.generate(HEADER.replace(before, after))[1] != abi.DIGEST


@pytest.mark.parametrize("line", ["int32_t flag : 1;", "size_t n;", "struct { int32_t a; } b;"])
def test_declarations_outside_the_subset_are_refused(bindgen, line):
    with pytest.raises(SystemExit, match=r"pack\.h"):
        bindgen.generate(HEADER.replace("uint64_t data;\n    int64_t rows;", f"{line}\n    int64_t rows;", 1))


def test_format_numbers_are_those_of_the_table():
    header = {
        n: int(v) for n, v in re.findall(r"PK_(\w+) = (\d+)", HEADER.split("typedef enum pk_format")[1].split("}")[0])
    }
    table = {f.name.upper(): f.id for f in FORMATS}
    assert {n: table[n] for n in header} == header


def test_host_table_of_formats_is_the_runners():
    source = (ROOT / "packs/host/format.cpp").read_text()
    rows = re.findall(r'\{PK_(\w+), "(\w+)", (\d+), (\d+)\}', source)
    ours = {f.name: (f.block_elements, f.block_bytes) for f in FORMATS}
    assert len(rows) == 22
    for constant, name, elements, size in rows:
        assert constant.lower() == name and ours[name] == (int(elements), int(size))
