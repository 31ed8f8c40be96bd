"""Pages on disk: what is read is what was written, whatever was torn, cut, changed or killed; the quota holds; one process at a time."""

from __future__ import annotations

import os
import random
import select
import signal
import stat
from hashlib import blake2b
from pathlib import Path

import pytest
from paddock_runner.cache.store import HEADER, PageStore
from paddock_runner.errors import Locked, UsageError

SIZE = 4096
RECORD = HEADER.size + SIZE


def key(i: int) -> bytes:
    return blake2b(str(i).encode(), digest_size=16).digest()


def page(i: int) -> bytes:
    return random.Random(i).randbytes(SIZE)


def store(folder: Path, quota: int = 1 << 30, segment: int = 1 << 20) -> PageStore:
    return PageStore(folder / "pages", SIZE, quota, segment)


def read(s: PageStore, i: int) -> bytes | None:
    into = memoryview(bytearray(SIZE))
    return bytes(into) if s.read(key(i), into) else None


def test_pages_come_back_after_closing_and_opening(tmp_path: Path) -> None:
    s = store(tmp_path)
    for i in range(20):
        s.append(key(i), page(i))
    s.append(key(3), page(4))
    assert all(read(s, i) == page(i) for i in range(20)) and read(s, 99) is None
    s.close()
    again = store(tmp_path)
    assert len(again) == 20 and all(read(again, i) == page(i) for i in range(20)) and again.n_cut == again.n_bad == 0
    again.close()


def test_folder_and_files_are_only_ours(tmp_path: Path) -> None:
    s = store(tmp_path)
    s.append(key(1), page(1))
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "pages").iterdir()}
    assert stat.S_IMODE((tmp_path / "pages").stat().st_mode) == 0o700 and set(modes.values()) == {0o600}
    with pytest.raises(Locked, match="another runner"):
        store(tmp_path)
    s.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        PageStore(tmp_path / "file" / "x", SIZE, 1 << 20)


@pytest.mark.parametrize("cut", [1, HEADER.size - 1, HEADER.size, HEADER.size + 7, RECORD - 1])
def test_a_record_that_was_cut_off_is_not_there_and_the_next_takes_its_place(tmp_path: Path, cut: int) -> None:
    s = store(tmp_path)
    for i in range(5):
        s.append(key(i), page(i))
    s.close()
    (path,) = (tmp_path / "pages").glob("*.kv")
    os.truncate(path, 4 * RECORD + cut)
    s = store(tmp_path)
    assert len(s) == 4 and read(s, 4) is None and s.n_cut == 1
    s.append(key(7), page(7))
    s.close()
    s = store(tmp_path)
    assert [read(s, i) for i in (0, 3, 7)] == [page(0), page(3), page(7)]
    s.close()


def test_a_changed_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    s = store(tmp_path)
    s.append(key(0), page(0))
    s.append(key(1), page(1))
    s.close()
    (path,) = (tmp_path / "pages").glob("*.kv")
    good = path.read_bytes()
    for at in (*range(0, 36, 3), 36, 39, HEADER.size, HEADER.size + 999, RECORD - 1):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        s = store(tmp_path)
        assert read(s, 0) is None and read(s, 0) is None
        s.close()
        path.write_bytes(good)


def test_the_oldest_segments_go_when_the_quota_is_reached(tmp_path: Path) -> None:
    s = store(tmp_path, quota=20 * RECORD, segment=4 * RECORD)
    for i in range(50):
        s.append(key(i), page(i))
    assert s.n_bytes <= 20 * RECORD + RECORD and read(s, 49) == page(49) and read(s, 0) is None and s.n_dropped > 20
    n = len(s)
    s.close()
    again = store(tmp_path, quota=20 * RECORD, segment=4 * RECORD)
    assert len(again) == n
    again.close()


def test_a_process_killed_at_twenty_random_moments_leaves_only_right_pages(tmp_path: Path) -> None:
    rng = random.Random(7)
    n_before = 0
    for _ in range(20):
        ready, tell = os.pipe()
        child = os.fork()
        if not child:
            try:
                s = store(tmp_path, segment=8 * RECORD)
                os.write(tell, b"x")
                for i in range(len(s), 1 << 20):
                    s.append(key(i), page(i))
            finally:
                os._exit(1)
        os.close(tell)
        assert os.read(ready, 1) == b"x"
        select.select([], [], [], rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        s = store(tmp_path, segment=8 * RECORD)
        assert len(s) >= n_before
        n_before = len(s)
        assert all(read(s, i) == page(i) for i in range(n_before)) and s.n_bad == 0
        s.close()
    assert n_before > 20


def test_a_system_that_gives_and_takes_a_few_bytes_at_a_time_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_v, write_v = os.preadv, os.pwritev

    def short(parts: list) -> list[memoryview]:
        first = next(memoryview(part) for part in parts if len(part))
        return [first[:1000]]

    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read_v(fd, short(parts), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: write_v(fd, short(parts), at))
    s = store(tmp_path)
    for i in range(5):
        s.append(key(i), page(i))
    assert all(read(s, i) == page(i) for i in range(5)) and s.n_bad == 0
    s.close()
