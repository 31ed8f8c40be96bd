"""A store that others change, closed, or brought: what is read once is not believed later, and nothing outside of the store is touched."""

from __future__ import annotations

import errno
import fcntl
import json
import threading
import time
from pathlib import Path

import pytest
from paddock_manager import disk
from paddock_manager.catalog import names
from paddock_manager.commands import gc
from paddock_manager.disk import Lease, remove_unlocked
from paddock_manager.fleet import spawn, state
from paddock_manager.paths import places
from paddock_manager.store import index, record
from paddock_manager.store import verify as checking
from paddock_runner.errors import FileError, Locked

from tests.cli.conftest import tiny_gguf


@pytest.fixture
def tiny(paddock, hub):
    """A model that was pulled."""
    hub.add("org/tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf()})
    assert paddock("pull", "org/tiny-GGUF").code == 0
    return index.find(places(), names.parse("org/tiny-GGUF"))


def unfinished(folder: Path) -> Path:
    """What a pull that was killed leaves."""
    part = folder / ".paddock/parts/sub/big.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 5000)
    return part


def test_gc_leaves_a_pull_that_runs_also_where_the_store_is_called_as_records_are(paddock, monkeypatch, tmp_path):
    monkeypatch.setenv("PADDOCK_HOME", str(tmp_path / ".paddock"))
    part = unfinished(places().models / "org/big")
    with Lease(part.parents[2] / index.LEASE):
        assert paddock("gc", "--partials", "--json").json["removed"] == []
        with pytest.raises(Locked):
            gc.remove(gc.Leftover(part, "unfinished download", part.parents[2]))
    assert [r["what"] for r in paddock("gc", "--partials", "--json").json["removed"]] == ["unfinished download"]
    assert not (tmp_path / ".paddock/lease").exists()


def test_gc_does_not_remove_a_model_whose_pull_ends_while_it_waits(tiny):
    home, seen = places(), index.find(places(), names.parse("org/tiny-GGUF"))
    seen.state, seen.done_bytes = "partial", 0  # as gc read it when the pull had just begun
    index.forget_empty(home, seen)
    assert index.find(home, names.parse("org/tiny-GGUF")).state == "ok"
    tiny.path.unlink()
    record.save(tiny)
    index.forget_empty(home, seen)
    assert index.models(home) == []


def test_verdict_on_a_model_that_was_replaced_meanwhile_is_not_noted(tiny, paddock, hub, monkeypatch):
    old_check, home, commits = checking.verify, places(), ["c" * 40, "b" * 40]

    def slowly(model, moved):
        found = old_check(model, moved)
        body = json.loads(record.record_path(model.folder).read_text())
        body["variants"][model.quant]["commit"] = commits.pop()
        record.record_path(model.folder).write_text(json.dumps(body))
        return found

    monkeypatch.setattr("paddock_manager.commands.verify.verify", slowly)
    tiny.path.write_bytes(b"y" * tiny.size_bytes)
    outcome = paddock("verify", "org/tiny-GGUF", "--json")
    assert outcome.code == FileError.exit_code and "changed by another command" in outcome.err
    assert index.find(home, names.parse("org/tiny-GGUF")).commit == "b" * 40
    outcome = paddock("verify", "org/tiny-GGUF", "--repair")
    assert (outcome.code, tiny.path.read_bytes()) == (Locked.exit_code, b"y" * tiny.size_bytes)


def test_model_that_was_removed_while_it_was_verified_does_not_come_back(tiny):
    home = places()
    index.remove(home, tiny, False)
    with pytest.raises(Locked):
        index.mark(home, tiny, True)
    assert index.models(home) == [] and not tiny.folder.exists()


def test_verify_tells_what_it_found_where_nothing_can_be_written(tiny, paddock, monkeypatch):
    tiny.path.write_bytes(b"y" * tiny.size_bytes)

    def closed(*_, **__):
        raise OSError(30, "Read-only file system", "lease")

    monkeypatch.setattr(index, "mark", closed)
    outcome = paddock("verify", "--json")
    assert (outcome.code, outcome.json["models"][0]["state"]) == (7, "wrong") and "Read-only file system" in outcome.err


def test_ls_of_a_further_root_needs_no_writing(paddock, tmp_path, monkeypatch):
    monkeypatch.setenv("PADDOCK_STORE_ROOTS", str(tmp_path))
    (tmp_path / "org/there").mkdir(parents=True)
    (tmp_path / "org/there/a.Q4_0.gguf").write_bytes(tiny_gguf())
    assert len(paddock("ls", "--json").json["models"]) == 1
    (kept,) = places().remembered.iterdir()
    kept.write_text("damaged")
    assert len(paddock("ls", "--json").json["models"]) == 1 and json.loads(kept.read_text())

    def closed(*_, **__):
        raise OSError(30, "Read-only file system", "x")

    kept.unlink()
    monkeypatch.setattr(index, "write_json", closed)
    assert len(paddock("ls", "--json").json["models"]) == 1


def test_record_that_names_files_outside_of_its_folder_is_refused(tiny, paddock, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("keep me")
    body = json.loads(record.record_path(tiny.folder).read_text())
    body["variants"][tiny.quant]["files"].append({"name": str(mine), "size_bytes": 7, "sha256": "0" * 64})
    record.record_path(tiny.folder).write_text(json.dumps(body))
    assert paddock("rm", "org/tiny-GGUF").code == FileError.exit_code
    assert mine.exists()


def test_log_is_not_taken_away_from_a_start_that_has_just_made_it(tmp_path):
    log = tmp_path / "s.log"
    with spawn._new_log(log) as out:
        with pytest.raises(Locked):
            remove_unlocked(log)
        assert disk.is_at(out.fileno(), log)
    remove_unlocked(log)
    log.write_text("old")
    with log.open("rb") as other:  # gc, which has it and is about to remove it
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.05, other.close).start()
        begun = time.monotonic()
        with spawn._new_log(log):  # its own file: the old one has moved on
            assert time.monotonic() - begun < 5 and log.with_suffix(".log.1").read_text() == "old"


def test_servers_that_a_newer_paddock_wrote_down_are_not_forgotten(paddock, model_file, fake_runner):
    assert paddock("serve", str(model_file), "--port", "0").code == 0
    path = places().fleet / "state.json"
    body = json.loads(path.read_text())
    body["servers"][0]["of_tomorrow"] = 1
    path.write_text(json.dumps(body))
    assert len(state.servers(places())) == 1
    assert paddock("stop", "--all").code == 0


def test_gc_takes_the_command_line_of_a_start_that_was_killed(paddock):
    fleet = places().fleet
    fleet.mkdir(parents=True)
    (fleet / "ready-00.spec").write_text(json.dumps({"starter": [1, 0.0]}))
    (fleet / "ready-01.spec").write_text(json.dumps({"starter": [2**22 + 5, 0.0]}))
    assert [Path(r["path"]).name for r in paddock("gc", "--json").json["removed"]] == ["ready-01.spec"]


def test_sums_of_two_models_in_one_folder_are_both_kept(paddock, hub, tiny, tmp_path):
    hub.add("org/more-GGUF", {"more.Q4_0.gguf": tiny_gguf(context=64)})
    assert paddock("pull", "org/more-GGUF").code == 0
    for name in ("tiny", "more"):
        assert paddock("export", f"org/{name}-GGUF", str(tmp_path / "stick")).code == 0
    lines = (tmp_path / "stick/SHA256SUMS").read_text().splitlines()
    assert [line[66:] for line in lines] == ["tiny.Q4_0.gguf", "more.Q4_0.gguf"]
    (tmp_path / "stick/tiny.Q4_0.gguf").unlink()
    assert paddock("export", "org/tiny-GGUF", str(tmp_path / "stick")).code == 0
    assert len((tmp_path / "stick/SHA256SUMS").read_text().splitlines()) == 2


def test_dry_run_of_a_lock_tells_its_orders_in_json(paddock, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paddock("pull", "org/tiny-GGUF", "--lock").code == 0
    told = paddock("pull", "--locked", "--dry-run", "--json").json
    assert [(o["ref"], o["need_bytes"]) for o in told["orders"]] == [("org/tiny-GGUF:Q4_0", 0)]


def test_doctor_tells_of_what_is_closed_to_it(paddock, monkeypatch):
    def closed(*_):
        raise PermissionError(13, "Permission denied", "/of/others/keys/api_key")

    monkeypatch.setattr("paddock_manager.fleet.keys.key", closed)
    places().key_file.parent.mkdir(parents=True)
    places().key_file.write_text("x")
    found = {f["check"]: f for f in paddock("doctor", "--json").json["findings"]}
    assert found["key"]["state"] == "wrong" and "/of/others/keys/api_key: Permission denied" in found["key"]["says"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_pull_of_what_is_here_needs_no_writing(paddock, tiny, monkeypatch, number):
    def closed(*_):
        raise OSError(number, "closed", "lease")

    monkeypatch.setattr(index, "held", closed)
    outcome = paddock("pull", "org/tiny-GGUF", "--json")
    assert outcome.code == 0 and outcome.json["model"]["name"] == tiny.name and "nothing was fetched" in outcome.err
    tiny.path.unlink()
    assert paddock("pull", "org/tiny-GGUF").code == FileError.exit_code


def test_word_of_a_variable_that_is_not_set_is_not_the_folder_we_are_in(paddock, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paddock("export", "org/tiny-GGUF", "").code == 2 and paddock("add", "").code == 2
    assert list(tmp_path.glob("*.gguf")) == []
