"""Fixtures of every test: a private home, a clean environment, and where shared goldens and real models lie."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


def _import_this_checkout() -> None:
    """The tests test the checkout that they lie in, also where the environment has another one installed editable."""
    spec = importlib.util.find_spec("paddock_runner")
    if spec is not None and spec.origin is not None and Path(spec.origin).is_relative_to(CHECKOUT):
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
    folders = [str(CHECKOUT / name) for name in ("runner", "manager")]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT / "tests" / "checkout"), *folders])


_import_this_checkout()
KEPT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTEST_CURRENT_TEST",
    "PYTEST_VERSION",
    "PYTEST_XDIST_WORKER",
    "CC",
    "CXX",
)
"""Variables that a test may inherit; everything else (proxies, tokens, PADDOCK_*) is removed."""

OUTSIDE = dict(os.environ)
"""The environment as it was when pytest started: fixtures below read it, tests do not see it."""


@pytest.fixture(autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary HOME and PADDOCK_HOME, and no variable that could change a program's behaviour; on a GPU machine those that
    choose the GPU and by which compute-sanitizer finds its process stay."""
    home = tmp_path_factory.mktemp("home")
    own = ("COV_", "CUDA_", "NV", "SANITIZER_", "COMPUTE_SANITIZER_", "LD_") if "PADDOCK_TEST_PACK" in OUTSIDE else ("COV_",)
    for name in list(os.environ):
        if name not in KEPT and not name.startswith(own):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / ".local/share"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("PADDOCK_HOME", str(home / "paddock"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    yield home


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with goldens, cases and research: PADDOCK_SHARED, or ../shared beside the checkout."""
    told = OUTSIDE.get("PADDOCK_SHARED")
    folder = Path(told) if told else CHECKOUT.parent / "shared"
    if not (folder / "golden").is_dir():
        pytest.skip(f"no shared goldens at {folder} (set PADDOCK_SHARED)")
    return folder


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """The folder with real models, as shared/tools/models/fetch_models.sh fills it: PADDOCK_TEST_MODELS."""
    told = OUTSIDE.get("PADDOCK_TEST_MODELS")
    if not told:
        pytest.skip("real models are not at hand (set PADDOCK_TEST_MODELS)")
    folder = Path(told)
    if not folder.is_dir():
        pytest.skip(f"PADDOCK_TEST_MODELS={folder} is not a folder")
    return folder
