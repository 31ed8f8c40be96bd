"""Repositories of the network table through a real hub: N1 to N7 (indexes, shards, strays), N10 (names), and a proxy on the way."""

from __future__ import annotations

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from paddock_manager.catalog import names
from paddock_manager.paths import HubSettings, Places
from paddock_manager.store.download import Limits
from paddock_manager.store.pull import Shop, Wish
from paddock_manager.store.web import Timing
from paddock_runner.errors import FileError, PaddockError, UnknownModel
from paddock_runner.files.checkpoint import open_checkpoint

from tests.fakes.hub import FakeHub, some_bytes
from tests.hostile.test_safetensors_cases import FIRST, INDEX, LLAMA_CONFIG, NAMES, SECOND, SHAPES, shard

REPO = "org/folder"
CONFIG = json.dumps(LLAMA_CONFIG).encode()


@pytest.fixture
def hub():
    with FakeHub() as fake:
        yield fake


def pull(hub, tmp_path, text=REPO):
    shop = Shop(Places(tmp_path), HubSettings(hub.url), Limits(backoff_s=0.001, tries=2), Timing(5.0, 5.0))
    shop.reserve_bytes = 0
    return shop.execute(shop.resolve(names.parse(text), Wish())[0], lambda n: None)


def index(**more):
    return json.dumps({"weight_map": {**INDEX["weight_map"], **more}}).encode()


def sharded(**more):
    files = {"config.json": CONFIG, FIRST: shard(NAMES[:6]), SECOND: shard(NAMES[6:]), "model.safetensors.index.json": index()}
    return {k: v for k, v in {**files, **more}.items() if v is not None}


@pytest.mark.parametrize("name", ["../../../other/repo/model.safetensors", "/etc/passwd", "..\\x.safetensors"])
def test_n1_index_that_names_a_path_elsewhere_asks_for_nothing_there_and_cannot_be_opened(hub, tmp_path, name):
    hub.add(REPO, sharded(**{"model.safetensors.index.json": index(**{NAMES[0]: name})}))
    model = pull(hub, tmp_path)
    assert "the index names the shard" in str(model.headline["problem"])
    assert all(a.path.count("..") == 0 and "passwd" not in a.path for a in hub.asked)
    assert {p.name for p in tmp_path.rglob("*.safetensors")} == {FIRST, SECOND}
    with pytest.raises(FileError):
        open_checkpoint(model.path)


def test_n2_tensor_that_the_shard_lacks_is_named(hub, tmp_path):
    hub.add(REPO, sharded(**{SECOND: shard(NAMES[7:])}))
    assert NAMES[6] in str(pull(hub, tmp_path).headline["problem"])


def test_n3_shard_that_the_repository_lacks_is_named_before_anything_is_fetched(hub, tmp_path):
    hub.add(REPO, sharded(**{SECOND: None}))
    with pytest.raises(UnknownModel, match=f"is incomplete: {SECOND} is not in the repository, which has 1 of 2"):
        pull(hub, tmp_path)
    assert not hub.data_requests()


def test_n3_shard_that_is_lost_here_is_named_and_never_read_as_zeros(hub, tmp_path):
    hub.add(REPO, sharded())
    model = pull(hub, tmp_path)
    (model.path / SECOND).unlink()
    with pytest.raises(FileError, match=f"1 of 2 shards are missing: {SECOND}"):
        open_checkpoint(model.path)


def test_n4_stale_index_beside_one_file_yields_to_it(hub, tmp_path):
    hub.add(REPO, {"config.json": CONFIG, "model.safetensors": shard(NAMES), "model.safetensors.index.json": index()})
    model = pull(hub, tmp_path)
    assert "problem" not in model.headline and len(open_checkpoint(model.path).tensors) == len(SHAPES)


def test_n5_n6_strays_and_second_copies_are_neither_fetched_nor_loaded(hub, tmp_path):
    strays = ["adapter_model.safetensors", "optimizer.safetensors", "consolidated.00.safetensors", "original/model.safetensors", "metal/model.bin", "pytorch_model.bin"]
    hub.add(REPO, sharded(**dict.fromkeys(strays, some_bytes(64))))
    model = pull(hub, tmp_path)
    assert {f.name for f in model.files} == set(sharded())
    assert not any(s in a.path for a in hub.asked for s in strays)
    assert open_checkpoint(model.path).warnings == []


def test_n7_shards_that_are_numbered_from_zero_are_accepted(hub, tmp_path):
    zero, one = "model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"
    weight_map = {n: zero if f == FIRST else one for n, f in INDEX["weight_map"].items()}
    files = {"config.json": CONFIG, zero: shard(NAMES[:6]), one: shard(NAMES[6:]), "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}
    hub.add(REPO, files)
    model = pull(hub, tmp_path)
    assert "problem" not in model.headline and len(open_checkpoint(model.path).tensors) == len(SHAPES)


@pytest.mark.parametrize("pair", [("Tokenizer.json", "tokenizer.json"), ("model.safetensors", "MODEL.safetensors"), ("mod\u00e9le.safetensors", "mode\u0301le.safetensors")])
def test_n10_names_that_are_one_on_other_file_systems_are_refused(hub, tmp_path, pair):
    hub.add(REPO, {"config.json": CONFIG, "model-a.safetensors": shard(NAMES), **dict.fromkeys(pair, shard(NAMES))})
    if pair[0] == "Tokenizer.json":  # not one of the files of a model: left where it is
        assert pair[0] not in {f.name for f in pull(hub, tmp_path).files}
        return
    with pytest.raises(PaddockError, match="differ only in"):
        pull(hub, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


class _Proxy(BaseHTTPRequestHandler):
    """Forwards absolute URLs, and keeps them."""

    seen: list[str]

    def log_message(self, *_: object) -> None:
        """Silence."""

    def do_GET(self) -> None:
        """Fetch it."""
        import http.client

        self.seen.append(self.path)
        url = urlsplit(self.path)
        connection = http.client.HTTPConnection(url.netloc)
        connection.request("GET", url.path + (f"?{url.query}" if url.query else ""), headers={k: v for k, v in self.headers.items() if k.lower() != "connection"})
        answer = connection.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("content-length", "connection"):
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        connection.close()


def test_everything_goes_through_the_proxy_that_is_set(hub, tmp_path, monkeypatch):
    hub.add("org/repo", {"m.Q4_0.gguf": some_bytes(300_000)})
    socketserver.TCPServer.allow_reuse_address = True
    handler = type("Handler", (_Proxy,), {"seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.server_port}")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
        path = pull(hub, tmp_path, "org/repo").path
        proxy.shutdown()
    assert path.read_bytes() == some_bytes(300_000)
    assert len(handler.seen) == len(hub.asked)
