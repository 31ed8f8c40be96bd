"""Packs and levels that kernel tests run on: the CPU pack at each instruction level that this machine has.

PADDOCK_TEST_PACK names another library (the CUDA pack's, on a machine with a GPU); then every case runs on that one.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Bench
from paddock_runner.pack.device import Device
from paddock_runner.pack.library import Pack, find_pack, load_pack

from tests.conftest import CHECKOUT, OUTSIDE

LEVELS = {"avx2": 1, "avx512": 2, "amx": 3}


def pack_path() -> Path:
    """The library under test: the one that is named, the development build, or the installed pack."""
    told = OUTSIDE.get("PADDOCK_TEST_PACK")
    if told:
        return Path(told)
    built = CHECKOUT / "build/dev/libpaddock_cpu.so"
    return built if built.exists() else find_pack("cpu")


@pytest.fixture(scope="session")
def pack() -> Pack:
    """The pack under test."""
    return load_pack(pack_path())


@pytest.fixture(params=list(LEVELS))
def level(request: pytest.FixtureRequest, pack: Pack) -> int:
    """An instruction level of the CPU pack; other packs have one, and a second where they have kernels that never ran."""
    wanted = LEVELS[request.param]
    if pack.description["pack"] != "cpu":
        if wanted > 1 + pack.description["has_untried"]:
            pytest.skip("levels are the CPU pack's")
        return wanted - 1
    device = Device(pack, 0, 1, wanted)
    name = device.facts.arch
    device.close()
    if name != pack.description["archs"][wanted - 1]:
        pytest.skip(f"this machine has no {request.param}")
    return wanted


@pytest.fixture
def bench(pack: Pack, level: int) -> Iterator[Callable[..., Bench]]:
    """Makes benches at the level; closes them."""
    made: list[Bench] = []

    def make(**options: object) -> Bench:
        made.append(Bench(pack, level, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh inputs each run; the seed is in the report of a failing test."""
    seed = int.from_bytes(np.random.bytes(4), "little") ^ zlib.crc32(request.node.name.encode())
    request.node.user_properties.append(("seed", seed))
    print("seed", seed)
    return np.random.default_rng(seed)
