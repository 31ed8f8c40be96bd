"""Load cells are files that the load client reads: every one is whole, named once, and says what its name says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import gpu_cells, load
from bench.load import ROOT_CELLS, read_cells

FILES = sorted(ROOT_CELLS.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_cells_are_whole_and_named_once(path: Path) -> None:
    cells = read_cells(path)
    assert len({c["name"] for c in cells}) == len(cells) > 0
    for cell in cells:
        found = re.fullmatch(r"(?:[a-z]+-)?(\w+)-(\w+)-c(\d+)", cell["name"])
        assert found and int(found[3]) == cell["concurrency"] <= cell["requests"] and cell.get("shared", 0) < cell["in"]


def test_the_cells_of_the_issue_are_there() -> None:
    names = {c["name"] for c in read_cells(ROOT_CELLS / "aiperf.toml")}
    assert {f"128-128-c{n}" for n in (1, 8, 16, 32, 64, 96, 128)} <= names and "8192-1024-c8" in names


def test_a_cell_that_is_run_again_has_rows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(a: object) -> tuple[list[load.Result], float]:
        return [], 1.0

    monkeypatch.setattr(load, "run", run)
    monkeypatch.setattr(load, "summary", lambda *_: dict.fromkeys(gpu_cells.NAMES, 2.0) | {"failed": 0, "errors": ""})
    ids = [gpu_cells.run_cell("http://127.0.0.1:1", "8b.fp8", "128/128c32x128", n)[0]["id"] for n in range(3)]
    assert ids == [f"h200.load.8b.fp8.128/128c32{again}.ttft_p50_ms" for again in ("", ".again", ".again2")]


def test_a_cell_without_a_field_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[[cell]]\nname = "a"\nin = 1\nout = 2\nconcurrency = 1\n')
    with pytest.raises(SystemExit, match="cell 1 needs requests"):
        read_cells(file)
