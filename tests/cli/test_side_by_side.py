"""Commands at the same time, on one store: who has a model has it alone, and nobody loses what another one needs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from paddock_manager import cli, disk
from paddock_manager.catalog import names
from paddock_manager.disk import Lease
from paddock_manager.fleet import keys, state, watch
from paddock_manager.paths import HubSettings, places
from paddock_manager.store import headline, index
from paddock_manager.store.download import Limits
from paddock_manager.store.pull import Shop, Wish
from paddock_runner.errors import Locked, UnknownModel

from tests.cli.conftest import tiny_gguf


def dead() -> int:
    """The number of a process that was."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def test_lease_of_a_dead_process_is_taken_over_by_one_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "PAUSE_S", 0.001)
    path, pid, found = tmp_path / "lease", dead(), [0]
    for _ in range(40):
        path.write_text(json.dumps({"pid": pid, "host": socket.gethostname(), "nonce": "x", "born": 1.0}))
        gate = threading.Barrier(6)
        holders = [threading.Thread(target=hold, args=(path, gate, found)) for _ in range(6)]
        for thread in holders:
            thread.start()
        for thread in holders:
            thread.join()
    assert found[0] == 1


def hold(path: Path, gate: threading.Barrier, most: list[int]) -> None:
    """Take a lease, and look for a while whether it stays ours."""
    gate.wait()
    try:
        with Lease(path) as lease:
            mine = json.loads(path.read_text())["nonce"]
            for _ in range(20):
                try:
                    is_ours = json.loads(path.read_text())["nonce"] == mine
                except (OSError, ValueError):
                    is_ours = False
                most[0] = max(most[0], 1 if is_ours else 2)
            assert lease.path == path
    except Locked:
        pass


def test_lease_of_a_process_in_another_container_is_respected(tmp_path):
    path = tmp_path / "lease"
    body = {"pid": dead(), "host": socket.gethostname(), "nonce": "x", "born": 1.0, "is_locked": True}  # its number means nothing here
    path.write_text(json.dumps(body))
    with path.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Locked), Lease(path):
            pass
    with Lease(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_pulls_and_removals_of_one_model_at_once_harm_nobody(hub, monkeypatch):
    rmtree = shutil.rmtree

    def slowly(path, ignore_errors=False):
        time.sleep(0.005)
        rmtree(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", slowly)
    hub.add("org/tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf()})
    home = places()
    strange: list[BaseException] = []
    n_pulled = [0]
    order = Shop(home, HubSettings(hub.url)).resolve(names.parse("org/tiny-GGUF"), Wish())[0]

    def pull() -> None:
        shop = Shop(home, HubSettings(hub.url), Limits(connections=1, backoff_s=0.01))
        shop.reserve_bytes = 0
        for _ in range(25):
            try:
                assert shop.execute(order, lambda n: None).state == "ok"
                n_pulled[0] += 1
            except Locked:
                pass
            except BaseException as error:
                strange.append(error)

    def remove() -> None:
        while n_pulled[0] >= 0:
            try:
                index.remove(home, index.find(home, names.parse("org/tiny-GGUF")), False)
            except (Locked, UnknownModel):
                pass
            except BaseException as error:
                strange.append(error)

    pullers = [threading.Thread(target=pull) for _ in range(2)]
    removers = [threading.Thread(target=remove) for _ in range(2)]
    for thread in pullers + removers:
        thread.start()
    for thread in pullers:
        thread.join()
    was, n_pulled[0] = n_pulled[0], -1
    for thread in removers:
        thread.join()
    assert strange == [] and was > 5


def test_folder_that_goes_while_it_is_listed_is_no_fault():
    assert index.in_folder(places(), places().models / "org/gone") == []


def test_two_models_cannot_be_added_under_one_name_at_once(paddock, model_file, monkeypatch):
    read, codes = headline.of, []

    def slowly(checkpoint):
        monkeypatch.setattr(headline, "of", read)
        codes.append(cli.main(["add", str(model_file), "--name", "mine", "--quiet"]))
        return read(checkpoint)

    monkeypatch.setattr(headline, "of", slowly)
    done = paddock("add", str(model_file), "--name", "mine")
    assert codes == [0] and done.code == 2 and "there is a model mine already" in done.err
    assert [p.name for p in places().added.iterdir()] == ["mine.json"]


def test_gc_leaves_what_a_command_that_runs_needs(paddock, model_file, fake_runner):
    home = places()
    assert paddock("serve", str(model_file), "--port", "0").code == 0
    (server,) = paddock("ps", "--json").json["servers"]
    listed = (home.fleet / "state.json").read_bytes()
    (home.fleet / "state.json").unlink()  # as while it starts
    (home.fleet / "ready-000000000001.json").write_text(json.dumps({"pid": server["pid"], "port": 1}))
    (home.fleet / "ready-000000000002.json").write_text(json.dumps({"pid": dead(), "port": 1}))
    wheel = home.models / "o/r/.paddock/wheel-12345678"
    wheel.mkdir(parents=True)
    with Lease(wheel.parent / "lease"):
        gone = [Path(r["path"]).name for r in paddock("gc", "--json").json["removed"]]
    assert gone == ["ready-000000000002.json"] and wheel.is_dir()
    (home.fleet / "state.json").write_bytes(listed)
    assert paddock("stop", "--all").code == 0
    assert {Path(r["path"]).name for r in paddock("gc", "--json").json["removed"]} == {"ready-000000000001.json", "wheel-12345678", Path(server["log"]).name}


def test_start_leaves_no_lock_behind(paddock, model_file, fake_runner):
    assert paddock("serve", str(model_file), "--port", "0").code == 0
    assert list(places().fleet.glob("*.start")) == []


def test_server_starts_where_the_file_system_has_no_locks(paddock, model_file, fake_runner, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert paddock("serve", str(model_file), "--port", "0").code == 0
    assert paddock("stop", "--all").code == 0


def test_runner_whose_command_had_gone_before_it_asked_does_not_stay():
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], preexec_fn=watch.dies_with(os.getpid() + 1))
    assert child.wait(30) == -signal.SIGKILL


def test_server_that_ends_with_its_command_is_nobody_elses(paddock, model_file, fake_runner):
    """It answered a second `paddock run`, and ended under its hands with the first."""
    assert paddock("serve", str(model_file), "--port", "0").code == 0
    home = places()
    (server,) = state.servers(home)
    state.remember(home, replace(server, name="mine.run1", ends_with=os.getpid()))
    assert paddock("run", str(model_file), "hello").out == "1: hello\n"
    assert "POST" not in Path(server.log).read_text()
    with pytest.raises(UnknownModel):
        state.find(home, server.ref, lasting=True)
    state.remember(home, server)
    assert paddock("run", str(model_file), "hello").code == 0 and "POST" in Path(server.log).read_text()


def test_key_that_was_taken_out_does_not_come_back(paddock, monkeypatch):
    """`paddock run` and `serve` write the list, too: from what they had read before."""
    home = places()
    keys.add(home, "phone", "inference")
    read, threads = keys.entries, []

    def slowly(where):
        monkeypatch.setattr(keys, "entries", read)
        found = read(where)
        threads.append(threading.Thread(target=keys.remove, args=(home, "phone")))
        threads[0].start()
        threads[0].join(0.3)
        return found

    keys.key(home)
    monkeypatch.setattr(keys, "entries", slowly)
    keys.server_file(home)
    threads[0].join()
    assert [e.name for e in read(home)] == [keys.OWN]


def test_settings_and_locked_names_of_two_commands_are_both_kept(tmp_path):
    """Each reads the file and writes it anew."""
    from paddock_manager import settings
    from paddock_manager.catalog.catalog import Source
    from paddock_manager.store import lock
    from paddock_manager.store.hub import RemoteFile
    from paddock_manager.store.pull import Order

    order = Order("org/repo", "c" * 40, "", [RemoteFile("a.gguf", 1, "0" * 64)], Source("org/repo"), "")
    words = [f"org/repo{n}" for n in range(8)]
    tables = [("serve.port", "1234"), ("serve.timeout", "77"), ("pull.connections", "3")]
    jobs = [threading.Thread(target=lock.remember, args=(tmp_path / "paddock.lock", word, order)) for word in words]
    jobs += [threading.Thread(target=settings.change, args=(tmp_path / "config.toml", *pair)) for pair in tables]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert sorted(json.loads((tmp_path / "paddock.lock").read_text())["models"]) == words
    found = settings.load(tmp_path / "config.toml")
    assert [str(found[key].value) for key, _ in tables] == [value for _, value in tables]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_command_that_a_signal_ends_says_so_in_json_too(number):
    """Scripts read one document, whatever happens."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        words = [sys.executable, "-m", "paddock_manager", "pull", "org/x", "--json"]
        before = signal.signal(number, signal.SIG_DFL)  # where tests run in the background, or under nohup, it is ignored, by us too
        try:
            command = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        finally:
            signal.signal(number, before)
        with command, silent.accept()[0]:
            command.send_signal(number)
            try:
                out, err = command.communicate(timeout=30)
            finally:
                command.kill()
    error = json.loads(out)["error"]
    assert command.returncode == error["exit_code"] == 128 + number and error["code"] == "cancelled"
    assert err.count("\n") == 1 and err.startswith("error: ")


def test_watch_goes_on_where_nothing_can_be_written(tmp_path, monkeypatch):
    """Its log and its report are on a disk that is full."""
    (tmp_path / "file").touch()
    paths = {"inner": tmp_path / "i", "outer": tmp_path / "o", "report": tmp_path / "file/r", "log": tmp_path / "l"}
    made = watch.Watch({"words": [], "starter": [1, 0.0]} | {k: str(v) for k, v in paths.items()})
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        made._tell(1, 0.5)
