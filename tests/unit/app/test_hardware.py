"""What the machine has, read from a made-up /proc."""

from __future__ import annotations

from pathlib import Path

import pytest
from paddock_runner import hardware
from paddock_runner.config import read_config
from paddock_runner.errors import PackError


def test_control_groups_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 800 kB\n")
    assert hardware.memory(tmp_path) == hardware.Memory(1000 * 1024, 800 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("512000\n")
    (group / "memory.current").write_text("200000\n")
    (group / "memory.stat").write_text("inactive_file 50000\n")
    assert hardware.memory(tmp_path) == hardware.Memory(512000, 362000)
    (group / "memory.max").write_text("max\n")
    assert hardware.memory(tmp_path).total_bytes == 1000 * 1024


def test_packs_are_tried_exact_first() -> None:
    assert hardware.pack_names((9, 0)) == ["cuda_sm90a", "cuda_sm90", "cuda_sm90f"]
    assert hardware.pack_names((12, 1))[2] == "cuda_sm120f"


def test_missing_driver_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(PackError, match="--device cpu"):
        hardware.gpu("0", "libnothing-of-the-kind.so")


@pytest.mark.parametrize("visible, index, found", [("", 2, 2), ("3", 0, 3), ("1, 0", 1, 0), ("GPU-ab,2", 0, "GPU-ab"), ("0,-1,1", 0, 0)])
def test_gpus_are_counted_among_those_that_cuda_shows(visible: str, index: int, found: int | str) -> None:
    assert hardware.seen(str(index), visible) == found


@pytest.mark.parametrize("visible, index", [("3", 1), ("-1", 0), ("0,-1,1", 1)])
def test_gpu_that_cuda_does_not_show_is_refused(visible: str, index: int) -> None:
    with pytest.raises(PackError, match=f"GPU {index} cannot be used: CUDA_VISIBLE_DEVICES={visible} shows"):
        hardware.gpu(str(index), "libnothing-of-the-kind.so", visible)


def test_variable_that_is_set_to_nothing_shows_no_gpu() -> None:
    assert [read_config({}, env).visible_gpus for env in ({}, {"CUDA_VISIBLE_DEVICES": " "}, {"CUDA_VISIBLE_DEVICES": "1"})] == ["", "-1", "1"]


def test_gpu_that_is_neither_number_nor_uuid_is_refused() -> None:
    with pytest.raises(PackError, match="--gpu first is no number and no UUID"):
        hardware.gpu("first")
