"""The lock file, further roots on disks that may be away, export, a deep look at the weights, and the difference of two templates."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

import pytest
from paddock_manager.disk import file_system
from paddock_manager.paths import places

from tests.cli.conftest import tiny_gguf

REPO = "org/tiny-GGUF"
REF = f"{REPO}:Q4_0"


@pytest.fixture
def repo(hub):
    hub.add(REPO, {"tiny.Q4_0.gguf": tiny_gguf(), "tiny.Q8_0.gguf": tiny_gguf(context=256)})
    return hub


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder that commands are typed in."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def pull(paddock, *words):
    return paddock("pull", *words, "--reserve", "0")


def test_locked_pull_gets_the_same_bytes_after_the_repository_has_moved(paddock, repo, project):
    assert pull(paddock, REF, "--lock").code == 0
    locked = json.loads((project / "paddock.lock").read_text())["models"][REF]
    assert locked["commit"] == repo.repos[REPO].commit and locked["files"][0]["sha256"] == hashlib.sha256(tiny_gguf()).hexdigest()
    paddock("rm", REF)
    old = repo.repos[REPO].commit
    repo.repos[REPO].commit = "f" * 40
    before = len(repo.asked)
    done = pull(paddock, "--locked", "--json")
    assert done.code == 0 and done.json["models"][0]["commit"] == old
    asked = [a.path for a in repo.asked[before:]]
    assert not any("/api/" in path for path in asked) and any(f"/resolve/{old}/" in path for path in asked)


def test_locked_pull_refuses_other_bytes_and_names_that_are_not_locked(paddock, repo, project):
    pull(paddock, REF, "--lock")
    paddock("rm", REF)
    repo.corrupt.add("tiny.Q4_0.gguf")
    assert pull(paddock, REF, "--locked").code == 7
    assert pull(paddock, "org/other", "--locked").code == 3
    (project / "paddock.lock").write_text('{"models": {"x": {"repo": "../..", "files": []}}}')
    assert pull(paddock, "--locked").code == 7
    (project / "paddock.lock").unlink()
    assert pull(paddock, "--locked").code == 3


def test_lock_that_points_outside_of_the_store_is_refused(paddock, repo, project):
    pull(paddock, REF, "--lock")
    body = json.loads((project / "paddock.lock").read_text())
    body["models"][REF]["files"][0]["name"] = "../../../x.gguf"
    (project / "paddock.lock").write_text(json.dumps(body))
    done = pull(paddock, "--locked", "--json")
    assert done.code == 2 and "not safe" in done.json["error"]["message"]


def test_model_in_another_root_is_offline_while_its_disk_is_away(paddock, repo, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    assert pull(paddock, REF, "--root", str(disk)).code == 2
    assert paddock("config", "set", "store.roots", str(disk)).code == 0
    assert pull(paddock, REF, "--root", str(disk)).code == 0
    assert (disk / REPO / "tiny.Q4_0.gguf").exists()
    assert [m["state"] for m in paddock("ls", "--json").json["models"]] == ["ok"]
    assert paddock("show", REF, "--path").out.strip() == str(disk / REPO / "tiny.Q4_0.gguf")
    disk.rename(tmp_path / "away")
    assert [(m["name"], m["state"]) for m in paddock("ls", "--json").json["models"]] == [(REF, "offline")]
    assert "is its disk mounted?" in paddock("run", REF, "hello").err
    (tmp_path / "away").rename(disk)
    assert [m["state"] for m in paddock("ls", "--json").json["models"]] == ["ok"]
    assert paddock("rm", REF).code == 0 and not (disk / REPO).exists()
    assert paddock("ls", "--json").json["models"] == []


def test_folder_that_cannot_be_read_is_said_and_the_rest_listed(paddock, repo, monkeypatch):
    pull(paddock, REF)
    closed = places().models / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refusing(path):
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    done = paddock("ls")
    assert done.code == 0 and REF in done.out and f"{closed} cannot be read: Permission denied" in done.err
    found = paddock("doctor", "--json").json["findings"]
    assert [(f["says"], f["fix"]) for f in found if f["state"] == "wrong"] == [(f"{closed} cannot be read: Permission denied", f"chown or chmod {closed}")]


def test_links_to_nothing_and_names_that_are_no_text_end_nothing(paddock):
    folder = places().models / "org" / "by-hand"
    folder.mkdir(parents=True)
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    (folder / "tiny.Q4_0.gguf").write_bytes(tiny_gguf())
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.gguf")).write_bytes(b"GGUF")
    found = paddock("ls", "--json").json["models"]
    assert len(found) == 2 and "org/by-hand:Q4_0" in [m["ref"] for m in found]
    assert paddock("du").code == 0 and paddock("gc").code == 0 and paddock("ls").code == 0


def test_home_that_is_no_folder_or_cannot_be_made_is_one_line(paddock, repo, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PADDOCK_HOME", str(tmp_path / "file"))
    assert (paddock("ls").code, paddock("ls").err.splitlines()[0]) == (2, f"error: {tmp_path}/file is no folder")
    monkeypatch.setenv("PADDOCK_HOME", "/proc/paddock")
    done = pull(paddock, REF)
    assert done.code == 7 and "error: /proc/paddock: No such file or directory" in done.err


def test_doctor_looks_at_every_root(paddock, tmp_path):
    (tmp_path / "disk").mkdir()
    paddock("config", "set", "store.roots", f"{tmp_path}/disk:{tmp_path}/away")
    found = {f["check"]: f for f in paddock("doctor", "--json").json["findings"]}
    kind = file_system(tmp_path)
    assert kind and kind in found["disk"]["says"] and found["disk 1"]["says"].startswith(f"{tmp_path}/disk, {kind}, ")
    assert found["disk 2"]["state"] == "warn" and "is away: its models are offline" in found["disk 2"]["says"] and "mount its disk" in found["disk 2"]["fix"]


def test_second_quant_joins_the_first_in_its_root(paddock, repo, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    paddock("config", "set", "store.roots", str(disk))
    pull(paddock, REF, "--root", str(disk))
    pull(paddock, f"{REPO}:Q8_0")
    assert (disk / REPO / "tiny.Q8_0.gguf").exists()


def test_roots_are_absolute_paths(paddock):
    assert paddock("config", "set", "store.roots", "models").code == 2


def test_export_copies_under_the_own_names_and_checks_the_bytes(paddock, repo, tmp_path):
    pull(paddock, REF)
    done = paddock("export", REF, str(tmp_path / "out"), "--json")
    assert done.code == 0 and done.json["how"] in ("copies", "clones")
    assert (tmp_path / "out/tiny.Q4_0.gguf").read_bytes() == tiny_gguf()
    assert (tmp_path / "out/SHA256SUMS").read_text() == f"{hashlib.sha256(tiny_gguf()).hexdigest()}  tiny.Q4_0.gguf\n"
    assert paddock("export", REF, str(tmp_path / "out")).code == 2
    stored = Path(paddock("show", REF, "--path").out.strip())
    stored.write_bytes(tiny_gguf()[:-1] + b"\0")
    assert paddock("export", REF, str(tmp_path / "other")).code == 7
    assert list((tmp_path / "other").iterdir()) == []


def test_export_by_links_moves_no_bytes(paddock, repo, tmp_path):
    pull(paddock, REF)
    done = paddock("export", REF, str(tmp_path / "out"), "--link")
    assert done.code == 0 and "as links" in done.out
    assert os.stat(tmp_path / "out/tiny.Q4_0.gguf").st_nlink == 2


def test_deep_verify_finds_weights_that_are_no_numbers(paddock, tmp_path):
    clean = tiny_gguf()[: -2 * 256]
    path = tmp_path / "weights.Q4_0.gguf"
    path.write_bytes(clean + bytes(512))
    paddock("add", str(path), "--name", "good")
    path = tmp_path / "spoilt.Q4_0.gguf"
    path.write_bytes(clean + bytes(256) + bytes(100) + struct.pack("<f", float("nan")) + struct.pack("<f", float("inf")) + bytes(148))
    paddock("add", str(path), "--name", "bad")
    assert paddock("verify", "good", "--deep").code == 0
    done = paddock("verify", "good", "bad", "--deep", "--json")
    assert done.code == 7
    found = {m["name"]: m["not_finite"] for m in done.json["models"]}
    assert found["good"] == []
    assert found["bad"] == [{"tensor": "output.weight", "format": "f32", "n_blocks": 2, "first": len(clean) + 256 + 100}]
    assert "output.weight (f32): 2 block(s) hold NaN or infinity" in paddock("verify", "bad", "--deep").out


@pytest.mark.parametrize("format", ["q8_0", "q4_1", "q2_k", "q3_k", "q6_k", "iq4_xs", "mxfp4", "nvfp4", "fp8_e4m3", "fp8_e5m2", "bf16", "f16", "e8m0"])
def test_every_format_says_which_block_is_spoilt(format):
    import numpy as np
    from paddock_runner.files import finite

    block = finite.BLOCKS[format]
    raw = np.zeros((9, block), np.uint8)
    assert not finite._bad_blocks(format, raw.reshape(-1)).any()
    if format in finite.NAN_CODES:
        raw[5, 0] = finite.NAN_CODES[format][1]
    else:
        at = finite.HALVES.get(format, (0,))[-1]
        raw[5, at : at + 2] = (0x01, 0x7C) if format != "bf16" else (0x80, 0x7F)
    assert np.flatnonzero(finite._bad_blocks(format, raw.reshape(-1))).tolist() == [5]


def test_difference_of_two_templates(paddock, repo, model_file, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_gguf().replace(b"{{ messages }}", b"{{ MESSAGES }}"))
    done = paddock("show", str(model_file), "--diff", str(other), "--json")
    assert done.code == 0 and not done.json["same"]
    assert "-{{ messages }}" in done.json["diff"] and "+{{ MESSAGES }}" in done.json["diff"]
    assert "same" in paddock("show", str(model_file), "--diff", REF).err  # the other side by its header, on the hub
    assert paddock("ls", "--json").json["models"] == []


def test_ls_takes_words_and_unknown_names_are_answered_with_those_that_begin_so(paddock, repo, model_file):
    paddock("add", str(model_file))
    pull(paddock, REF)
    assert [m["name"] for m in paddock("ls", "tiny", "--json").json["models"]] == [REF]
    assert [m["name"] for m in paddock("ls", "MINE", "q4", "--json").json["models"]] == ["mine.q4_0"]
    assert "no model here is called sea; `paddock search sea`" in paddock("ls", "sea").err
    assert "it has qwen3-0.6b, qwen3-1.7b, qwen3-4b" in paddock("pull", "qwen3").err
