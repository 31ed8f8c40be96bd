"""Live servers of the conformance tests: one per template, for the whole session; every test starts with its script reset."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from paddock_runner.wire.messages import ErrorCode, Miss

from tests.conformance.live import CHATML, THINKING, TOOLS, Live, live
from tests.fakes.engine import FOREVER


def _reset(server: Live) -> Live:
    script = server.script
    script.starts, script.n_tokens, script.max_queue = True, FOREVER, FOREVER
    script.miss, script.known_tokens = Miss.NONE, 0
    script.refusal, script.error, script.cached_tokens, script.draw = None, ErrorCode.NONE, 0, None
    script.cache.clear()
    server.engine.aborted.clear()
    server.engine.asked.clear()
    server.say("Hello there, general.")
    return server


@pytest.fixture(scope="session")
def _plain() -> Iterator[Live]:
    with live(CHATML, comment_s=0.1) as server:
        yield server


@pytest.fixture(scope="session")
def _thinking() -> Iterator[Live]:
    with live(THINKING) as server:
        yield server


@pytest.fixture(scope="session")
def _tools() -> Iterator[Live]:
    with live(TOOLS) as server:
        yield server


@pytest.fixture
def server(_plain: Live) -> Live:
    """A server of a plain chat model."""
    return _reset(_plain)


@pytest.fixture
def thinking(_thinking: Live) -> Live:
    """A server of a model that thinks in <think> blocks."""
    return _reset(_thinking)


@pytest.fixture
def tools(_tools: Live) -> Live:
    """A server of a model that calls tools in hermes' way."""
    return _reset(_tools)
