"""The downloader against a hub that misbehaves in every way of the network table (N8, N9, N11 and what pull must survive)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from paddock_manager.catalog import names
from paddock_manager.paths import HubSettings, Places
from paddock_manager.store import index, journal
from paddock_manager.store.download import IDLE_SHARE, LOOK_S, Appetite, Limits
from paddock_manager.store.part import PartHash
from paddock_manager.store.pull import Shop, Wish
from paddock_manager.store.web import Timing
from paddock_runner.errors import DiskFull, FileError, HubAuthError, HubError, Locked, PaddockError

from tests.fakes.hub import FakeHub, some_bytes

REPO = "org/repo"
FILE = "model.Q4_0.gguf"
PART = 64 << 10
SIZE = 10 * PART + 1234


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as fake:
        fake.add(REPO, {FILE: some_bytes(SIZE)})
        yield fake


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "paddock")


def shop(hub: FakeHub, places: Places, token: str = "", **limits: object) -> Shop:
    settings = {"connections": 3, "part_bytes": PART, "backoff_s": 0.001, "tries": 4, **limits}
    made = Shop(places, HubSettings(hub.url, token), Limits(**settings), Timing(5.0, 0.3))  # type: ignore[arg-type]
    made.reserve_bytes = 0
    return made


def pull(hub: FakeHub, places: Places, **limits: object) -> Path:
    here = shop(hub, places, **limits)
    return here.execute(here.resolve(names.parse(REPO), Wish())[0], lambda n: None).path


def content(hub: FakeHub) -> bytes:
    return hub.repos[REPO].files[FILE]


def leftovers(places: Places) -> list[str]:
    """Every file under the store but records."""
    return sorted(str(p.relative_to(places.home)) for p in places.home.rglob("*") if p.is_file() and p.name != "record.json")


def test_file_arrives_in_parts_under_its_own_name(hub, places):
    path = pull(hub, places)
    assert path == places.models / "org/repo" / FILE
    assert path.read_bytes() == content(hub)
    assert {a.status for a in hub.data_requests()} == {206}
    assert hub.served_bytes == SIZE
    assert leftovers(places) == [f"models/org/repo/.paddock/hashes/{FILE}.json", f"models/org/repo/{FILE}"]


def test_empty_and_tiny_files_arrive(hub, places):
    hub.add(REPO, {FILE: b"x", "config.json": b""})
    assert pull(hub, places).read_bytes() == b"x"


@pytest.mark.parametrize(
    "kind, value, times",
    [
        ("status", 500, 3), ("status", 502, 1), ("status", 503, 3), ("status", 429, 3), ("drop", None, 3), ("cut", 1000, 3),
        ("cut", 0, 3), ("wrong_start", None, 2), ("stall", 20000, 1), ("no_length", None, 3),
    ],
)  # fmt: skip
def test_passing_trouble_is_survived(hub, places, kind, value, times):
    hub.fault(kind, value, times)
    assert pull(hub, places).read_bytes() == content(hub)
    assert hub.served_bytes <= SIZE + 3 * PART


def test_broken_part_is_continued_where_it_broke(hub, places):
    hub.fault("cut", 48 << 10)
    pull(hub, places, connections=1)
    assert hub.served_bytes == SIZE


def test_server_without_ranges_is_read_as_one_stream(hub, places):
    hub.has_ranges = False
    assert pull(hub, places).read_bytes() == content(hub)


def test_answer_200_in_the_middle_is_never_appended(hub, places):
    hub.fault("", times=4)
    hub.fault("ignore_range", times=2)
    assert pull(hub, places, connections=1).read_bytes() == content(hub)


def test_retry_after_is_obeyed(hub, places):
    hub.fault("status", 429, 1, Retry_After="1")
    assert pull(hub, places, connections=1).read_bytes() == content(hub)
    assert len(hub.data_requests()) == 12


def test_trouble_that_stays_is_a_network_error_and_keeps_finished_parts(hub, places):
    hub.fault("", times=4)
    hub.fault("status", 503, 100)
    with pytest.raises(HubError) as error:
        pull(hub, places, connections=1)
    assert error.value.exit_code == 6
    part = index.part_path(places.models / REPO, FILE)
    assert journal.done_bytes(part) == 4 * PART
    assert not (places.models / REPO / FILE).exists()
    hub.faults.clear()
    before = hub.served_bytes
    assert pull(hub, places).read_bytes() == content(hub)
    assert hub.served_bytes - before == SIZE - 4 * PART


@pytest.mark.parametrize("kind, value", [("other_size", None), ("etag", '"other"')])
def test_file_that_changes_while_it_is_read_is_refused(hub, places, kind, value):
    hub.fault("", times=2)
    hub.fault(kind, value, 50)
    with pytest.raises(HubError, match="changed on the server"):
        pull(hub, places, connections=1)
    assert not (places.models / REPO / FILE).exists()


def test_compressed_ranges_are_refused(hub, places):
    hub.fault("gzip", times=50)
    with pytest.raises(HubError, match="compresses"):
        pull(hub, places)


def test_wrong_bytes_of_the_right_size_never_end_as_success(hub, places):
    hub.corrupt.add(FILE)
    with pytest.raises(FileError) as error:
        pull(hub, places)
    assert error.value.exit_code == 7
    assert hashlib.sha256(content(hub)).hexdigest() in error.value.message
    assert leftovers(places) == []
    assert index.models(places) == []


def test_one_corrupt_answer_is_found_and_fetched_again(hub, places):
    hub.fault("flip")
    assert pull(hub, places).read_bytes() == content(hub)


def test_small_files_are_checked_against_their_git_hash(hub, places):
    hub.add(REPO, {"model.safetensors": some_bytes(100), "config.json": b'{"model_type": "llama"}'})
    hub.corrupt.add("config.json")
    with pytest.raises(FileError, match="wrong"):
        pull(hub, places)


def test_token_goes_to_the_hub_and_not_to_the_data_host(hub, places):
    hub.token = "hf_secret"
    here = shop(hub, places, token="hf_secret")
    here.execute(here.resolve(names.parse(REPO), Wish())[0], lambda n: None)
    assert all(a.headers.get("authorization") == "Bearer hf_secret" for a in hub.asked if a.server == "hub")
    data = [a for a in hub.asked if a.server == "data"]
    assert data and not any("hf_secret" in json.dumps(a.headers) for a in data)


def test_missing_token_says_gated_and_what_to_do(hub, places):
    hub.token = "hf_secret"
    with pytest.raises(HubAuthError, match="gated") as error:
        pull(hub, places)
    assert error.value.exit_code == 5
    assert "HF_TOKEN" in error.value.hint


def test_unknown_repository_says_both_things_that_it_can_mean(hub, places):
    here = shop(hub, places)
    with pytest.raises(HubAuthError, match="may not exist, be private or be gated"):
        here.resolve(names.parse("org/nothing"), Wish())


def test_expired_signed_url_is_renewed(hub, places):
    hub.fault("", times=3)
    hub.fault("status", 403, 1)
    assert pull(hub, places, connections=1).read_bytes() == content(hub)
    assert sum("/resolve/" in a.path for a in hub.asked) == 2


def test_listing_survives_two_failures(hub, places):
    from tests.fakes.hub import Fault

    hub.api_faults.extend([Fault("status", 503), Fault("status", 429)])
    assert pull(hub, places).exists()


def test_commit_is_pinned_before_bytes_move(hub, places):
    pull(hub, places)
    assert all(f"/resolve/{hub.repos[REPO].commit}/" in a.path for a in hub.asked if "/resolve/" in a.path)


@pytest.mark.parametrize("name", ["../../x.gguf", "/etc/x.gguf", "a\\b.gguf", "a/../../b.gguf", ".paddock/x.gguf", "con.gguf", "x.gguf."])
def test_names_that_would_leave_the_store_never_become_paths(hub, places, name):
    hub.add(REPO, {name: some_bytes(10), FILE: some_bytes(20)}, lfs={name, FILE})
    assert pull(hub, places).name == FILE
    assert not any(name in a.path for a in hub.asked)


def test_disk_without_room_is_refused_before_anything_is_written(hub, places, monkeypatch):
    class Full:
        f_bavail, f_frsize, f_blocks = 1, 4096, 1000

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(DiskFull) as error:
        pull(hub, places)
    assert error.value.exit_code == 8
    assert error.value.facts["free_bytes"] == 4096 and error.value.facts["need_bytes"] == SIZE
    assert hub.served_bytes == 0 and leftovers(places) == []


def test_disk_that_fills_up_is_said_and_leaves_no_final_name(hub, places, monkeypatch):
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull):
        pull(hub, places)
    assert not (places.models / REPO / FILE).exists()


def test_second_pull_of_the_same_model_is_told_who_has_it(hub, places):
    here = shop(hub, places)
    order = here.resolve(names.parse(REPO), Wish())[0]
    lease = places.models / REPO / ".paddock/lease"
    from paddock_manager.disk import Lease

    with Lease(lease), pytest.raises(Locked, match=str(os.getpid())) as error:
        here.execute(order, lambda n: None)
    assert error.value.exit_code == 13


def test_lease_of_a_dead_process_is_taken_over(hub, places):
    lease = places.models / REPO / ".paddock/lease"
    lease.parent.mkdir(parents=True)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    import socket

    lease.write_text(json.dumps({"pid": dead.pid, "host": socket.gethostname(), "nonce": "x", "born": 1.0}))
    assert pull(hub, places).exists()


def test_rate_limit_is_kept(hub, places):
    import time

    begun = time.monotonic()
    pull(hub, places, rate_bytes_per_s=2_000_000.0)
    assert time.monotonic() - begun > 0.8 * (SIZE - 500_000) / 2_000_000


def run_pull(hub: FakeHub, home: Path) -> subprocess.Popen[bytes]:
    """`paddock pull`, with Ctrl-C heard also where the tests themselves run in a script's background, which ignores it."""
    env = {**os.environ, "HF_ENDPOINT": hub.url, "PADDOCK_HOME": str(home)}
    words = [sys.executable, "-m", "paddock_manager", "pull", REPO, "--reserve", "0", "--connections", "2", "--json"]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


@pytest.fixture(scope="module")
def puller() -> Iterator[Puller]:
    with FakeHub() as fake:
        fake.add(REPO, {FILE: some_bytes(SIZE)})
        words = [sys.executable, "-m", "tests.fakes.puller", fake.url]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield Puller(fake, process)
            assert process.stdin is not None
            process.stdin.close()


@dataclass
class Puller:
    """Starts pulls in processes of their own. `end`: how one ended."""

    hub: FakeHub
    process: subprocess.Popen[str]

    def begin(self, home: Path) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{home} {PART}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.mark.parametrize("point", range(20))
def test_pull_killed_at_a_random_point_costs_the_parts_in_flight_and_nothing_else(puller, tmp_path, point):
    hub = puller.hub
    before, hub.released = hub.served_bytes, threading.Event()
    hub.held.clear()
    hub.hold_after = before + random.Random(point).randrange(SIZE)
    pid = puller.begin(tmp_path)
    assert hub.held.wait(30)
    os.kill(pid, signal.SIGKILL)
    assert puller.end() == -signal.SIGKILL
    assert not (tmp_path / "models" / REPO / FILE).exists()
    hub.hold_after = None
    hub.released.set()
    puller.begin(tmp_path)
    assert puller.end() == 0
    assert (tmp_path / "models" / REPO / FILE).read_bytes() == content(hub)
    assert hub.served_bytes - before <= SIZE + 2 * PART


def test_connections_are_added_only_while_the_hash_waits():
    appetite, now = Appetite(0.0), 0.0
    for share, is_hungry in ((0.9, True), (0.2, False), (1.0, True), (0.0, False)):
        for _ in range(3):
            now += LOOK_S / 4
            assert not appetite.waited(share * LOOK_S / 4, now)
        now += LOOK_S / 4
        assert appetite.waited(share * LOOK_S / 4, now) is is_hungry
    assert 0 < IDLE_SHARE < 1


def test_power_cut_costs_the_parts_that_were_not_synced(hub, places):
    hub.fault("", times=6)
    hub.fault("status", 503, 100)
    with pytest.raises(PaddockError):
        pull(hub, places, connections=1)
    part = index.part_path(places.models / REPO, FILE)
    assert journal.load(part).unsynced == []
    path = journal.journal_path(part)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "synced" not in line))
    assert journal.load(part).unsynced == list(range(6))
    with part.open("r+b") as f:  # what a power cut leaves of blocks that were never written
        f.seek(2 * PART)
        f.write(bytes(PART))
    hub.faults.clear()
    before = hub.served_bytes
    assert pull(hub, places).read_bytes() == content(hub)
    assert hub.served_bytes - before == SIZE - 5 * PART


@pytest.mark.parametrize("piece", [1, 3, 8, 13, 1000])
def test_hash_of_a_part_does_not_depend_on_how_its_bytes_arrive(piece):
    data = random.Random(piece).randbytes(1003)
    whole, pieces = PartHash(), PartHash()
    whole.update(data)
    for at in range(0, len(data), piece):
        pieces.update(memoryview(data)[at : at + piece])
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    assert whole.hexdigest() == pieces.hexdigest() == f"{sum(words) % 2**64:016x}"


def test_parts_that_were_synced_are_not_read_again(hub, places):
    hub.fault("", times=3)
    hub.fault("status", 503, 100)
    with pytest.raises(PaddockError):
        pull(hub, places, connections=1)
    part = index.part_path(places.models / REPO, FILE)
    found = journal.load(part)
    writing = journal.Journal(journal.journal_path(part), found.identity)
    writing.resume(found)
    writing.synced(3)
    writing.close()
    assert journal.load(part).unsynced == []


def test_redirects_in_a_circle_end(hub, places):
    hub.fault("loop", times=500)
    with pytest.raises(HubError, match="circle"):
        pull(hub, places)


@pytest.mark.parametrize("share", [0.5])
def test_killed_pull_is_finished_by_the_next_one(hub, tmp_path, share):
    size = 40 << 20
    part = 4 << 20
    hub.add(REPO, {FILE: some_bytes(size)})
    hub.hold_after = int(size * share)
    killed = run_pull(hub, tmp_path)
    assert hub.held.wait(30)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "models" / REPO / FILE).exists()
    hub.hold_after = None
    hub.released.set()
    found = index.models(Places(tmp_path))
    assert [m.state for m in found] == ["partial"]
    again = run_pull(hub, tmp_path)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    path = Path(json.loads(out)["model"]["path"])
    assert path.read_bytes() == content(hub)
    assert hub.served_bytes <= size + 2 * part + (1 << 20)


def test_interrupted_pull_ends_with_130_and_can_go_on(hub, tmp_path):
    hub.add(REPO, {FILE: some_bytes(16 << 20)})
    hub.hold_after = 9 << 20
    stopped = run_pull(hub, tmp_path)
    assert hub.held.wait(30)
    stopped.send_signal(signal.SIGINT)
    out, _ = stopped.communicate(timeout=30)
    assert stopped.returncode == 130
    assert json.loads(out)["error"]["code"] == "cancelled"
    hub.hold_after = None
    hub.released.set()
    again = run_pull(hub, tmp_path)
    assert again.communicate(timeout=60) and again.returncode == 0


def test_damaged_journal_only_costs_its_parts(hub, places):
    hub.fault("", times=6)
    hub.fault("status", 503, 100)
    with pytest.raises(PaddockError):
        pull(hub, places, connections=1)
    path = journal.journal_path(index.part_path(places.models / REPO, FILE))
    path.write_bytes(path.read_bytes()[:-20])
    hub.faults.clear()
    before = hub.served_bytes
    assert pull(hub, places).read_bytes() == content(hub)
    assert hub.served_bytes - before == SIZE - 5 * PART


def test_parts_of_another_commit_are_not_used(hub, places):
    hub.fault("", times=4)
    hub.fault("status", 503, 100)
    with pytest.raises(PaddockError):
        pull(hub, places, connections=1)
    hub.faults.clear()
    hub.repos[REPO].files[FILE] = some_bytes(SIZE, seed=2)
    hub.repos[REPO].commit = "f" * 40
    assert pull(hub, places).read_bytes() == content(hub)


def test_repair_fetches_one_part(hub, places):
    from paddock_manager.store.verify import repair, verify

    path = pull(hub, places)
    raw = bytearray(path.read_bytes())
    raw[3 * PART + 17] ^= 0x40
    path.write_bytes(raw)
    model = index.models(places)[0]
    verdicts = verify(model, lambda n: None)
    assert [(v.state, v.bad_parts) for v in verdicts] == [("wrong", [3])]
    before = hub.served_bytes
    assert repair(shop(hub, places, part_bytes=0), model, verdicts) == PART
    assert hub.served_bytes - before == PART
    assert path.read_bytes() == content(hub)
