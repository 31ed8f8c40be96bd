"""GPUs are found by their UUID, whatever CUDA's order is: with a made-up driver."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from paddock_runner.errors import PackError
from paddock_runner.pack.ordinal import cuda_ordinal

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int i) { *device = i; return 0; }
int cuDeviceGetUuid_v2(char *to, int device) { memset(to, device ? 0xab : 0x11, 16); to[0] = 0x5c; return 0; }
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A driver with two GPUs, as CUDA orders them."""
    (tmp_path / "cuda.c").write_text(DRIVER)
    for name, fails in (("libcuda.so.1", 0), ("libbroken.so", 802)):
        subprocess.run(["cc", "-shared", "-fPIC", f"-DFAILS={fails}", str(tmp_path / "cuda.c"), "-o", str(tmp_path / name)], check=True)
    return tmp_path / "libcuda.so.1"


def test_cuda_is_asked_for_a_gpu_by_its_uuid(driver: Path) -> None:
    assert cuda_ordinal("GPU-5cababab-abab-abab-abab-abababababab", str(driver)) == 1
    assert cuda_ordinal("MIG-5c111111-1111-1111-1111-111111111111", str(driver)) == 0


def test_gpu_that_cuda_hides_is_named(driver: Path) -> None:
    with pytest.raises(PackError, match="CUDA does not show GPU GPU-00 among its 2"):
        cuda_ordinal("GPU-00", str(driver))
    with pytest.raises(PackError, match="error 802"):
        cuda_ordinal("GPU-00", str(driver.parent / "libbroken.so"))
