"""What the gateway says of itself."""

import asyncio
import sys
from types import SimpleNamespace

import pytest
from paddock_manager.web import own
from paddock_runner.errors import PaddockError


def described(program):
    pool = SimpleNamespace(entries={"m": SimpleNamespace(launch=SimpleNamespace(runner=(sys.executable, "-c", program) if program else ("/nowhere/runner",)))})
    return asyncio.run(own.Own(pool, 0).description())


@pytest.mark.parametrize("program", ["", "print('no JSON')", "raise SystemExit(3)", "import time; time.sleep(60)"], ids=["missing", "words", "fails", "hangs"])
def test_program_that_does_not_describe_its_api_is_one_sentence(monkeypatch, program):
    monkeypatch.setattr(own, "TIMEOUT_S", 3.0 if "sleep" not in program else 0.3)
    with pytest.raises(PaddockError, match="does not describe its API") as told:
        described(program)
    assert told.value.hint == "`paddock-runner openapi` shows why"


def test_program_that_is_asked_for_its_api_gets_no_hub_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert described("import json, os; print(json.dumps({'token': os.environ.get('HF_TOKEN')}))") == {"token": None}
