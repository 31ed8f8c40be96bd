"""Keys that change while a server runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from paddock_runner.edge import keyfile
from paddock_runner.edge.auth import Guard, key_of
from paddock_runner.edge.keyfile import KeyFile
from paddock_runner.errors import FileError, Unauthorized


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list of one number."""
    now = [100.0]
    monkeypatch.setattr(keyfile.time, "monotonic", lambda: now[0])
    return now


def write(path: Path, text: str) -> None:
    """As the manager does: a new file in the old one's place."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def test_changes_are_taken_within_a_second_and_the_guard_goes_by_them(tmp_path: Path, clock: list[float]) -> None:
    path, said = tmp_path / "keys", []
    write(path, "abc\n")
    file = KeyFile(path, said.append)
    guard = Guard(file.now)
    write(path, "abc\ndef inference phone\n")
    with pytest.raises(Unauthorized):
        guard.check_key(["Bearer def"])
    clock[0] += keyfile.LOOK_S
    assert guard.check_key(["Bearer def"]).key == "def" and guard.check_key(["", "abc"]).key == "abc"
    write(path, "def inference phone\n")
    clock[0] += keyfile.LOOK_S
    with pytest.raises(Unauthorized):
        guard.check_key(["Bearer abc"])
    assert said == []


def test_file_without_keys_changes_nothing_and_is_told_once(tmp_path: Path, clock: list[float]) -> None:
    path, said = tmp_path / "keys", []
    write(path, "abc\n")
    file = KeyFile(path, said.append)
    for change in (lambda: write(path, ""), lambda: path.unlink(), lambda: write(path, "two words\n")):
        change()
        for _ in range(3):
            clock[0] += keyfile.LOOK_S
            assert file.now() == (key_of("abc"),)
    assert len(said) == 3 and all("the keys of before are let in" in text for text in said)
    write(path, "xyz\n")
    clock[0] += keyfile.LOOK_S
    assert file.now() == (key_of("xyz"),) and len(said) == 3


def test_file_that_could_not_be_read_for_a_while_is_read_again(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "keys", []
    write(path, "abc\n")
    file = KeyFile(path, said.append)

    def fail(path: Path) -> None:
        raise FileError(f"{path}: too many open files", path=str(path))

    write(path, "xyz\n")
    with monkeypatch.context() as failing:
        failing.setattr(keyfile, "read_keys", fail)
        for _ in range(3):
            clock[0] += keyfile.LOOK_S
            assert file.now() == (key_of("abc"),)
    clock[0] += keyfile.LOOK_S
    assert file.now() == (key_of("xyz"),) and len(said) == 1


def test_first_reading_must_succeed(tmp_path: Path) -> None:
    with pytest.raises(FileError):
        KeyFile(tmp_path / "none", print)
