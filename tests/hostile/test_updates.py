"""A model whose repository has changed: the old bytes never pass for the new ones, and stay a model while nothing of the new is here."""

# ruff: noqa: F811 - fixtures of another file, by name

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from paddock_manager.catalog import names
from paddock_manager.store import index, verify
from paddock_manager.store.download import Download
from paddock_manager.store.export import export
from paddock_manager.store.pull import Shop
from paddock_runner.errors import HubError, Locked

from tests.fakes.hub import some_bytes
from tests.hostile.test_download import FILE, REPO, SIZE, content, hub, places, pull, shop  # noqa: F401 - fixtures

OTHER = "f" * 40


def state(places) -> tuple[str, str]:
    model = index.find(places, names.parse(REPO))
    return model.state, model.commit


def change(hub) -> None:
    """Other bytes, as many."""
    hub.repos[REPO].files[FILE] = some_bytes(SIZE, 2)
    hub.repos[REPO].commit = OTHER


@contextmanager
def killed(monkeypatch) -> Iterator[None]:
    """The next pull ends as by kill -9 when its first file is due: nothing is tidied up."""

    def dies(*_):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Shop, "_withdraw", lambda *_: None)
        patch.setattr(Download, "run", dies)
        yield


def test_update_that_was_killed_is_no_update(hub, places, monkeypatch):
    path = pull(hub, places)
    change(hub)
    with killed(monkeypatch), pytest.raises(SystemExit):
        pull(hub, places)
    assert state(places)[0] == "partial"
    assert pull(hub, places).read_bytes() == content(hub) == path.read_bytes() and state(places) == ("ok", OTHER)


def test_file_that_was_there_before_the_pull_does_not_pass_for_the_published_one(hub, places, monkeypatch):
    path = places.models / REPO / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(some_bytes(SIZE, 3))
    with killed(monkeypatch), pytest.raises(SystemExit):
        pull(hub, places)
    assert state(places)[0] == "partial" and pull(hub, places).read_bytes() == content(hub)


def test_model_stays_what_it_was_when_its_update_fails(hub, places):
    old = pull(hub, places).read_bytes()
    was = state(places)
    change(hub)
    hub.fault("status", 404, 30)
    with pytest.raises(HubError):
        pull(hub, places)
    assert state(places) == was and (places.models / REPO / FILE).read_bytes() == old
    hub.faults.clear()
    assert pull(hub, places).read_bytes() == content(hub) and state(places) == ("ok", OTHER)


def test_update_that_fails_between_two_files_goes_on_from_there(hub, places):
    first, second = "config.json", "model.safetensors"
    hub.add(REPO, {first: b"{}", second: some_bytes(SIZE)})
    pull(hub, places)
    hub.repos[REPO].files |= {first: b"[]", second: some_bytes(SIZE, 2)}
    hub.repos[REPO].commit = OTHER
    hub.fault("", times=1)
    hub.fault("status", 404, 30)
    with pytest.raises(HubError):
        pull(hub, places)
    assert state(places) == ("partial", OTHER)
    hub.faults.clear()
    served = hub.served_bytes
    pull(hub, places)
    assert hub.served_bytes - served == SIZE and state(places) == ("ok", OTHER)
    assert (places.models / REPO / second).read_bytes() == some_bytes(SIZE, 2)


def test_repaired_file_of_a_killed_update_is_here(hub, places, monkeypatch):
    pull(hub, places)
    change(hub)
    with killed(monkeypatch), pytest.raises(SystemExit):
        pull(hub, places)
    model = index.find(places, names.parse(REPO))
    verify.repair(shop(hub, places), model, [v for v in verify.verify(model, lambda n: None) if v.state == "wrong"])
    assert state(places) == ("ok", OTHER) and model.path.read_bytes() == content(hub)


def test_two_exports_into_one_folder_do_not_spoil_each_other(hub, places, tmp_path):
    pull(hub, places)
    model, folder = index.find(places, names.parse(REPO)), tmp_path / "out"
    folder.mkdir()
    (folder / f".{FILE}.part").write_bytes(b"x" * (SIZE + 5))  # left by one that was killed
    told: list[Locked] = []

    def second(n_bytes: int) -> None:
        if not told:
            with pytest.raises(Locked) as refused:
                export(model, folder, False, lambda n: None)
            told.append(refused.value)

    export(model, folder, False, second)
    assert told and (folder / FILE).read_bytes() == content(hub)
    assert sorted(p.name for p in folder.iterdir()) == ["SHA256SUMS", FILE]
