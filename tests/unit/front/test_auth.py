"""Keys and key files; hosts and origins are tested over HTTP in tests/conformance."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from paddock_runner.edge.auth import check_exposure, is_loopback, key_of, make_key, read_keys
from paddock_runner.errors import FileError, UsageError


def test_keys_are_read_a_line_each_without_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\nabc\n\n  def  \n")
    assert read_keys(file) == (key_of("abc"), key_of("def"))


def test_keys_may_be_hashed_and_limited_to_inference(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"abc").hexdigest()
    file.write_text(f"sha256:{digest} inference phone\nxyz admin\n")
    assert read_keys(file) == (key_of("abc", "inference"), key_of("xyz"))
    for bad in ("sha256:12 admin", "abc root", "abc admin name more", f"sha256:{digest[:-1]}g admin"):
        file.write_text(bad)
        with pytest.raises(FileError):
            read_keys(file)


@pytest.mark.parametrize("content", [b"", b"# only a comment\n", b"\xff\xfe", "schlüssel\n".encode(), b"two words\n"])
def test_file_without_a_usable_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(FileError):
        read_keys(file)


def test_key_is_made_once_for_the_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "a/b/api_key"
    assert make_key(file) and file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o077 == 0
    keys = read_keys(file)
    assert not make_key(file) and read_keys(file) == keys and len(file.read_text()) > 30
    assert [p.name for p in file.parent.iterdir()] == ["api_key"]


def test_without_a_key_only_loopback_is_served() -> None:
    check_exposure("127.0.0.1", False)
    check_exposure("0.0.0.0", True)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com"):
        with pytest.raises(UsageError, match="loopback"):
            check_exposure(host, False)
    assert is_loopback("localhost") and is_loopback("::1") and not is_loopback("localhost.evil.example")


def test_a_key_may_carry_a_weight(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("abc weight=4\ndef inference ci weight=2\nghi\n")
    assert [(k.scope, k.weight) for k in read_keys(file)] == [("admin", 4), ("inference", 2), ("admin", 1)]
    for wrong in ("0", "-1", "x", "1.5", "100000"):
        file.write_text(f"abc weight={wrong}\n")
        with pytest.raises(FileError, match="is no weight"):
            read_keys(file)
