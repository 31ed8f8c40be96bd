"""The loader refuses what is no pack of ours, in one sentence that names the file."""

from __future__ import annotations

import subprocess

import pytest
from paddock_runner.errors import PackError
from paddock_runner.pack import abi
from paddock_runner.pack.library import find_pack, load_pack


def build(tmp_path, source):
    (tmp_path / "x.c").write_text(source)
    target = tmp_path / "libpaddock_x.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "x.c"), "-o", str(target)], check=True)
    return target


def test_missing_pack_is_refused_with_its_path(tmp_path):
    with pytest.raises(PackError, match=r"libnothing\.so does not exist"):
        load_pack(tmp_path / "libnothing.so")


def test_unknown_kind_names_the_folders_that_were_searched():
    with pytest.raises(PackError, match=r"libpaddock_abacus\.so is not installed.*_packs"):
        find_pack("abacus")


def test_file_that_is_no_library_is_refused(tmp_path):
    (tmp_path / "libpaddock_x.so").write_text("hello")
    with pytest.raises(PackError, match="cannot be loaded"):
        load_pack(tmp_path / "libpaddock_x.so")


def test_library_that_is_no_pack_is_refused(tmp_path):
    with pytest.raises(PackError, match="is no kernel pack"):
        load_pack(build(tmp_path, "int f(void) { return 1; }"))


def test_pack_of_another_header_is_refused_with_both_digests(tmp_path):
    path = build(tmp_path, 'const char *pk_abi_digest(void) { return "0123456789abcdef"; }')
    with pytest.raises(PackError) as caught:
        load_pack(path)
    assert "0123456789abcdef" in str(caught.value) and abi.DIGEST in str(caught.value)


def test_pack_without_a_function_is_refused_by_its_name(tmp_path):
    path = build(tmp_path, f'const char *pk_abi_digest(void) {{ return "{abi.DIGEST}"; }}')
    with pytest.raises(PackError, match="lacks pk_"):
        load_pack(path)
