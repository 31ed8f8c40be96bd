"""A pack is compared with its manifest before it is opened; wheels bring both, and say what has never been tested."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from paddock_runner.errors import PackError
from paddock_runner.manifest import read_manifest, verify, wheel_name
from paddock_runner.pack import abi
from paddock_runner.pack.library import load_pack

from tests.conftest import CHECKOUT


def pack_at(folder, data=b"no library", **changes):
    path = folder / "libpaddock_cuda_sm86.so"
    path.write_bytes(data)
    facts = {"file": path.name, "sha256": hashlib.sha256(data).hexdigest(), "arch": "sm_86", "build": "b", "abi": abi.DIGEST, "is_validated": False}
    path.with_suffix(".json").write_text(json.dumps(facts | changes))
    return path


def test_pack_without_a_manifest_is_taken_as_it_is(tmp_path):
    path = pack_at(tmp_path)
    path.with_suffix(".json").unlink()
    assert verify(path) is None


def test_pack_that_its_tests_never_met_says_so(tmp_path):
    assert verify(pack_at(tmp_path)).doubt == "UNVALIDATED: its tests have never run on sm_86"
    assert verify(pack_at(tmp_path, is_validated=True)).doubt == ""


def test_damaged_pack_is_refused_before_it_is_opened(tmp_path):
    path = pack_at(tmp_path)
    path.write_bytes(b"another library")
    with pytest.raises(PackError, match=r"libpaddock_cuda_sm86\.so is damaged") as caught:
        load_pack(path)
    assert caught.value.hint == "pip install --force-reinstall paddock-cuda-sm86"


def test_pack_of_another_header_is_refused_before_it_is_opened(tmp_path):
    with pytest.raises(PackError, match=r"built from another pack\.h"):
        load_pack(pack_at(tmp_path, abi="0123"))


def test_manifest_that_cannot_be_read_is_refused(tmp_path):
    path = pack_at(tmp_path)
    path.with_suffix(".json").write_text("{")
    with pytest.raises(PackError, match="is no manifest"):
        read_manifest(path)


def test_packages_are_named_by_number():
    assert [wheel_name(a) for a in ("sm_80", "sm_90a", "sm_100f", "sm_120f")] == [f"paddock-cuda-sm{n}" for n in (80, 90, 100, 120)]


def test_wheel_holds_the_pack_and_its_manifest_and_is_the_same_each_time(tmp_path):
    pack_at(tmp_path)
    command = [sys.executable, str(CHECKOUT / "packs/cuda/wheel.py"), "sm_86", "--built", "--packs", str(tmp_path), "--out"]
    wheels = []
    for name in ("one", "two"):
        told = subprocess.run([*command, str(tmp_path / name)], check=True, capture_output=True, text=True)
        wheels.append(told.stdout.strip())
    assert Path(wheels[0]).read_bytes() == Path(wheels[1]).read_bytes()
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = wheel.namelist()
        assert {"paddock_runner/_packs/libpaddock_cuda_sm86.so", "paddock_runner/_packs/libpaddock_cuda_sm86.json"} <= set(names)
        assert wheels[0].endswith("manylinux_2_28_x86_64.whl") and "paddock_cuda_sm86-" in wheels[0]
        metadata = next(n for n in names if n.endswith("METADATA"))
        assert "UNVALIDATED" in wheel.read(metadata).decode()
