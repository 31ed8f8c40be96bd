"""Which device and pack a model gets, and the one sentence when there is none: with a made-up driver library."""

from __future__ import annotations

import functools
import subprocess

import pytest
from paddock_runner import hardware
from paddock_runner.app import opening
from paddock_runner.config import Config, read_config
from paddock_runner.errors import PackError
from paddock_runner.pack import library

from tests.golden.test_tiny import TINY

DRIVER = """
#include <string.h>
const char *nvmlErrorString(int e) { return "Unknown Error"; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *to, unsigned n) { strncpy(to, VERSION, n); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = 0; return i ? 2 : 0; }
int nvmlDeviceGetUUID(void *d, char *to, unsigned n) { strncpy(to, "GPU-5c", n); return 0; }
int nvmlDeviceGetName(void *d, char *to, unsigned n) { strncpy(to, "Test GPU", n); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) { *major = MAJOR; *minor = MINOR; return 0; }
int nvmlDeviceGetNumGpuCores(void *d, unsigned *n) { *n = 1280; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) { m[0] = 8ull << 30; m[1] = 7ull << 30; m[2] = 1ull << 30; return 0; }
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """place(capability, driver, packs=()): what choose_place says with that GPU and those (empty) pack files."""

    def choose(major, minor, driver="580.65.06", packs=()):
        (tmp_path / "nvml.c").write_text(DRIVER)
        target = tmp_path / "libnvidia-ml.so.1"
        defines = [f"-DMAJOR={major}", f"-DMINOR={minor}", f'-DVERSION="{driver}"']
        subprocess.run(["cc", "-shared", "-fPIC", *defines, str(tmp_path / "nvml.c"), "-o", str(target)], check=True)
        for name in packs:
            (tmp_path / name).write_bytes(b"pack")
        monkeypatch.setattr(hardware, "gpu", functools.partial(hardware.gpu, library=str(target)))
        monkeypatch.setattr(library, "pack_folders", lambda: [tmp_path])
        return opening.choose_place(Config(device="cuda"))

    return choose


def test_pack_of_the_exact_architecture_comes_first(place):
    found = place(8, 9, packs=("libpaddock_cuda_sm80.so", "libpaddock_cuda_sm89.so"))
    assert found.pack.name == "libpaddock_cuda_sm89.so" and found.label == "Test GPU (GPU 0), libpaddock_cuda_sm89.so"


def test_family_pack_serves_a_later_member(place):
    assert place(12, 1, packs=("libpaddock_cuda_sm120f.so",)).pack.name == "libpaddock_cuda_sm120f.so"


def test_old_driver_is_refused_with_what_is_needed(place):
    with pytest.raises(PackError, match=r"the NVIDIA driver 570\.86\.15 is too old: kernel packs need 580 or newer") as caught:
        place(9, 0, "570.86.15", ("libpaddock_cuda_sm90a.so",))
    assert caught.value.hint == "update the driver; --device cpu serves on the CPU"


def test_missing_pack_names_the_package(place):
    with pytest.raises(PackError, match=r"no kernel pack for Test GPU \(sm_90\) is installed") as caught:
        place(9, 0)
    assert caught.value.hint == "pip install paddock-cuda-sm90; --device cpu serves on the CPU"


def test_gpu_that_is_too_old_for_any_pack_is_refused(place):
    with pytest.raises(PackError, match=r"there is no kernel pack for Test GPU \(sm_75\): they begin at sm_80"):
        place(7, 5)


@pytest.mark.parametrize("which", ["0", "3", "GPU-5c"])
def test_gpu_that_was_named_is_not_silently_the_cpu(which, monkeypatch):
    monkeypatch.setattr(hardware, "has_gpu", lambda: False)
    monkeypatch.setattr(hardware, "gpu", functools.partial(hardware.gpu, library="none.so"))
    for flags, env in (({"gpu": which}, {}), ({}, {"PADDOCK_GPU": which})):
        with pytest.raises(PackError, match="library libnvidia-ml"):
            opening.choose_place(read_config(flags, env))
    assert opening.choose_place(read_config({"gpu": which, "device": "cpu"}, {})).label.startswith("CPU")
    assert opening.choose_place(read_config({}, {})).why == "no NVIDIA GPU here: "


def test_untried_kernels_are_refused_where_there_are_none():
    with pytest.raises(PackError, match="--untried-kernels is for GPUs"):
        opening.choose_place(Config(device="cpu", untried_kernels=True))


@pytest.mark.parametrize("config, has_note", [(Config(device="cpu", max_batch=1, prefill_share=0.5), True), (Config(device="cpu", max_batch=1), False), (Config(device="cpu", max_batch=1, prefill_share=0.0), False)])
def test_a_part_that_was_asked_for_and_cannot_be_had_is_told(config, has_note, caplog):
    with caplog.at_level("INFO", logger="paddock"):
        opening.open_model(config, TINY / "llama")
    assert ("--prefill-share has no effect" in caplog.text) == has_note
