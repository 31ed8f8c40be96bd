"""Running commands as a user would: argv in; exit code, standard output and standard error out."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from paddock_manager import cli, schemas
from paddock_manager.fleet import spawn, state
from paddock_manager.paths import places

from tests.fakes.hub import FakeHub

FAKE_RUNNER = Path(__file__).parent.parent / "fakes" / "runner.py"


@dataclass
class Outcome:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def paddock(capsys: pytest.CaptureFixture[str]) -> Run:
    """`paddock("ls", "--json")` in this process. Every JSON document is checked against its published schema."""

    def run(*words: str) -> Outcome:
        capsys.readouterr()
        code = cli.main(list(words))
        got = capsys.readouterr()
        if "--json" in words:
            document = json.loads(got.out)
            kind = document["schema"].removeprefix("paddock.").split("/")[0]
            jsonschema.validate(document, schemas.schema(kind))
            assert (kind == "error") == (code != 0) or kind in ("fit", "verify", "doctor", "bench")
        return Outcome(code, got.out, got.err)

    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub of our own, which HF_ENDPOINT names."""
    with FakeHub() as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        yield fake


@pytest.fixture
def stopped() -> Iterator[None]:
    """No server outlives its test."""
    home = places()
    yield
    for server in state.servers(home):
        spawn.stop(home, server, 10.0)
    while spawn.CHILDREN:
        spawn.CHILDREN.popitem()[1].wait(10.0)


@pytest.fixture
def fake_runner(monkeypatch: pytest.MonkeyPatch, stopped: None) -> None:
    """Runners are the fake one; all are stopped at the end."""
    monkeypatch.setattr(spawn, "RUNNER", (sys.executable, str(FAKE_RUNNER)))


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=paddock.test"]
    subprocess.run([*words, "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")], check=True, capture_output=True)
    return str(folder / "cert.pem"), str(folder / "key.pem")


def tiny_gguf(arch: str = "llama", context: int = 128) -> bytes:
    """A GGUF header with two tensors of f32 (256 bytes each), enough for every command but those that run a model."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = [text("general.architecture") + struct.pack("<I", 8) + text(arch)]
    pairs.append(text(f"{arch}.context_length") + struct.pack("<II", 4, context))
    pairs.append(text("tokenizer.chat_template") + struct.pack("<I", 8) + text("{{ messages }}"))
    tensors = [text(name) + struct.pack("<IQQIQ", 2, 8, 8, 0, 256 * i) for i, name in enumerate(("token_embd.weight", "output.weight"))]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(range(256)) * 2


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A small checkpoint outside the store."""
    path = tmp_path / "mine.Q4_0.gguf"
    path.write_bytes(tiny_gguf())
    return path
