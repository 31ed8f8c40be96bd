"""What the manager reads of the machine: environment, memory, locks, processes."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest
from paddock_manager import disk, paths
from paddock_manager.fit import fit, gpus, packs
from paddock_runner.errors import FileError, Locked, PackError, UsageError


def test_home_is_told_or_the_platforms():
    assert paths.places({"PADDOCK_HOME": "/data/p"}).models == Path("/data/p/models")
    assert paths.places({}).home.name == "paddock"


@pytest.mark.parametrize(
    "env, token",
    [({}, ""), ({"HF_TOKEN": " hf_a \n"}, "hf_a"), ({"HF_TOKEN_PATH": "{tmp}/t"}, "hf_file"), ({"HF_HOME": "{tmp}/home"}, "hf_home")],
)
def test_hub_token_is_found_where_the_hubs_tools_put_it(tmp_path, env, token):
    (tmp_path / "t").write_text("hf_file\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/token").write_text("hf_home\n")
    settings = paths.hub_settings({"HOME": str(tmp_path / "nobody"), **{k: v.format(tmp=tmp_path) for k, v in env.items()}})
    assert settings.token == token and (not token or token not in repr(settings))


def test_token_does_not_reach_the_runner(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "hf_secret" not in json.dumps(paths.child_environment())


def fake_root(tmp_path: Path, limit: str = "max") -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal:  1000 kB\nMemAvailable: 600 kB\n", "proc/cpuinfo": "model name\t: Fast CPU\n", "sys/fs/cgroup/memory.max": limit + "\n",
        "sys/fs/cgroup/memory.current": "300000\n", "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 100000\n",
    }.items():  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_free_memory_is_what_the_kernel_says(tmp_path):
    found = gpus.host(fake_root(tmp_path))
    assert (found.memory_bytes, found.free_bytes, found.name) == (1024000, 614400, "Fast CPU")


def test_free_memory_stays_within_the_cgroup(tmp_path):
    found = gpus.host(fake_root(tmp_path, "500000"))
    assert (found.memory_bytes, found.free_bytes) == (500000, 300000)


def test_machine_without_a_driver_has_no_gpus_and_a_reason(monkeypatch):
    from paddock_manager.fit import nvml

    monkeypatch.setattr(gpus.hardware, "has_gpu", lambda: False)
    assert gpus.gpus() == ([], "no NVIDIA driver is loaded")
    monkeypatch.setattr(gpus.hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(nvml.Nvml.__init__, "__defaults__", ("libno-such-library.so.1",))
    assert gpus.gpus() == ([], "no NVIDIA driver is installed")


def gpu(index: int, free: int) -> gpus.Gpu:
    return gpus.Gpu(index, f"GPU-{index}", "NVIDIA H200", "sm_90", 132, 140 << 30, free, "580.1", (gpus.Holder(812, "python3", 1 << 30),))


def test_gpus_are_chosen_by_number_uuid_or_name(monkeypatch):
    monkeypatch.setattr(fit, "gpus", lambda: ([gpu(0, 1 << 30), gpu(1, 2 << 30)], ""))
    assert [w.facts.free_bytes for w in fit.find_where("auto", None, "", None)] == [1 << 30, 2 << 30]
    assert [w.facts.free_bytes for w in fit.find_where("1", None, "", None)] == [2 << 30]
    assert [w.facts.free_bytes for w in fit.find_where("gpu-0", None, "", None)] == [1 << 30]
    assert len(fit.find_where("h200", None, "", None)) == 2
    with pytest.raises(UsageError, match="no GPU"):
        fit.find_where("7", None, "", None)
    with pytest.raises(UsageError, match="sm_70"):
        fit.find_where("", 24 << 30, "sm_70", None)


@pytest.mark.parametrize("visible, shown", [("", [0, 1, 2]), ("2,0", [2, 0]), ("GPU-1", [1]), ("-1", []), ("1,7,0", [1]), ("MIG-x", [0, 1, 2])])
def test_fit_sees_the_gpus_that_cuda_sees_in_its_order(visible, shown):
    assert [g.index for g in gpus._shown([gpu(i, 1 << 30) for i in range(3)], visible)] == shown


def test_gpu_that_is_asked_for_and_is_not_there_is_no_cpu(monkeypatch):
    monkeypatch.setattr(fit, "gpus", lambda: ([], "the driver sees no GPU"))
    with pytest.raises(PackError, match="the driver sees no GPU"):
        fit.find_where("cuda", None, "", None)
    assert fit.find_where("auto", None, "", None)[0].facts.kind == "cpu"


def test_lease_is_held_by_one_and_given_back(tmp_path):
    path = tmp_path / "lease"
    refused = pytest.raises(Locked, match=f"the model is in use by process {os.getpid()}")
    with disk.Lease(path, "the model"), refused, disk.Lease(path, "the model"):
        pass
    assert not path.exists()
    with disk.Lease(path):
        assert path.exists()


def test_lease_of_another_machine_is_taken_over_only_when_it_is_old(tmp_path):
    path = tmp_path / "lease"
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "nonce": "n", "born": 1}))
    with pytest.raises(Locked, match="process 1 on elsewhere"), disk.Lease(path):
        pass
    os.utime(path, (1, 1))
    with disk.Lease(path):
        assert json.loads(path.read_text())["host"] == socket.gethostname()


def test_lease_that_was_taken_over_is_not_removed_by_its_old_holder(tmp_path):
    path = tmp_path / "lease"
    with disk.Lease(path):
        path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "nonce": "n"}))
    assert path.exists()


def test_only_one_of_many_gets_the_lease(tmp_path):
    got, refused = [], []
    gate, hold = threading.Barrier(8), threading.Event()

    def take() -> None:
        gate.wait()
        try:
            with disk.Lease(tmp_path / "lease"):
                got.append(1)
                hold.wait(10)
        except Locked:
            refused.append(1)
            if len(refused) == 7:
                hold.set()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (len(got), len(refused)) == (1, 7)


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.json"
    disk.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        disk.write_json(path, {"a": object()})
    assert disk.read_json(path) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100000, '{"layout": 2}', '{"layout": "x"}'])
def test_damaged_json_is_a_file_error(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FileError):
        disk.read_json(path)


def test_process_is_known_by_number_and_start():
    me = os.getpid()
    assert disk.is_same_process(me, disk.born(me)) and disk.is_same_process(me, 0.0)
    assert not disk.is_same_process(me, disk.born(me) + 1) and not disk.is_same_process(0, 0.0)


def test_gpu_without_its_pack_or_with_an_old_driver_is_told_what_to_do():
    def gpu(arch: str, driver: str) -> gpus.Gpu:
        return gpus.Gpu(0, "GPU-1", "Test GPU", arch, 10, 1, 1, driver, ())

    installed = [packs.Pack("libpaddock_cuda_sm90a.so")]
    assert packs.trouble(gpu("sm_90", "580.65"), installed) == ("", "")
    assert packs.trouble(gpu("sm_86", "580.65"), installed)[1] == "pip install paddock-cuda-sm86"
    assert packs.trouble(gpu("sm_75", "580.65"), installed)[1] == "--device cpu serves on the CPU"
    assert packs.trouble(gpu("sm_90", "570.86"), installed)[1] == "update the driver"


def test_packs_are_found_in_every_folder_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import paddock_runner
    from paddock_runner import manifest

    for name in ("sources", "built"):
        (tmp_path / name / "_packs").mkdir(parents=True)
    (tmp_path / "built/_packs/libpaddock_cpu.so").write_bytes(b"a pack")
    monkeypatch.setattr(manifest, "PACKS", tmp_path / "sources/_packs")
    monkeypatch.setattr(paddock_runner, "__path__", [str(tmp_path / "sources"), str(tmp_path / "built")])
    assert [p.name for p in packs.packs()] == ["libpaddock_cpu.so"]
