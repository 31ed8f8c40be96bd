"""How far ahead of what it has read the engine runs: every way."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[0, 1, 2, 3], ids=lambda n: f"run_ahead_{n}")
def run_ahead(request: pytest.FixtureRequest) -> int:
    return int(request.param)
