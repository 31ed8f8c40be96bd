"""Keys for others with what they may do, TLS, and who is let in by a server and by a gateway."""

from __future__ import annotations

import hashlib
import http.server
import ssl
import stat
import threading
import urllib.error
import urllib.request

import pytest
from paddock_manager.fleet import keys, state
from paddock_manager.paths import places
from paddock_manager.store.web import Transient, Web, certificates
from paddock_runner.errors import HubError

from tests.cli.conftest import tiny_gguf

pytestmark = pytest.mark.usefixtures("fake_runner")


def get(server, key, path="/v1/models", context=None):
    request = urllib.request.Request(server["url"] + path, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, context=context) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_added_key_is_shown_once_kept_as_a_hash_and_can_be_taken_away(paddock, model_file):
    fresh = paddock("key", "add", "phone", "--json").json["key"]
    path = keys.server_file(places())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert fresh not in path.read_text() and f"sha256:{hashlib.sha256(fresh.encode()).hexdigest()} inference phone" in path.read_text()
    assert paddock("key").out.strip() not in path.read_text()
    assert paddock("key", "ls", "--json").json["keys"] == [{"name": "this-machine", "scope": "admin", "weight": 1}, {"name": "phone", "scope": "inference", "weight": 1}]
    assert paddock("key", "add", "phone").code == 2 and paddock("key", "add", "a b").code == 2 and paddock("key", "add").code == 2
    server = paddock("serve", str(model_file), "--port", "0", "--json").json["server"]
    assert get(server, fresh) == 200 and get(server, paddock("key").out.strip()) == 200 and get(server, "pk-other") == 401
    done = paddock("key", "rm", "phone")
    assert done.code == 0 and "phone" not in done.out and get(server, fresh) == 401
    assert paddock("key", "rm", "phone").code == 3 and paddock("key", "rm", "this-machine").code == 3


def test_new_key_replaces_the_old_one_in_the_list(paddock):
    old = paddock("key").out.strip()
    keys.server_file(places())
    new = paddock("key", "--new").out.strip()
    listed = keys.server_file(places()).read_text()
    assert old != new and hashlib.sha256(new.encode()).hexdigest() in listed and hashlib.sha256(old.encode()).hexdigest() not in listed


def test_damaged_list_of_keys_is_named(paddock):
    path = keys.server_file(places())
    path.write_text("what is this\n")
    assert paddock("key", "ls").code == 7


def test_own_key_that_is_no_text_is_named(paddock):
    paddock("key")
    places().key_file.write_bytes(b"\xff\xfe\n")
    done = paddock("key")
    assert done.code == 7 and "cannot be read" in done.err and "paddock key --new" in done.err
    assert paddock("key", "--new").code == 0


def test_server_speaks_https_with_the_files_it_was_given(paddock, model_file, tls):
    done = paddock("serve", str(model_file), "--port", "0", "--tls-cert", tls[0], "--tls-key", tls[1], "--json")
    assert done.code == 0, done.err
    server = done.json["server"]
    assert server["url"].startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=tls[0])
    context.check_hostname = False
    assert get(server, paddock("key").out.strip(), context=context) == 200
    with pytest.raises(urllib.error.URLError):
        get(server, "any")  # the certificate is not the system's
    assert paddock("ps", "--json").json["servers"][0]["state"] == "ready"
    assert paddock("run", str(model_file), "hello").out == "1: hello\n"


def test_gateway_speaks_https_too(paddock, tmp_path, tls):
    path = tmp_path / "one.gguf"
    path.write_bytes(tiny_gguf())
    from paddock_manager.commands import many

    def needs(target, given, where, budget, by):
        return {"name": target.name, "ref": target.ref, "path": str(target.path), "flags": [], "asked": {"by": by}, "need_bytes": 100}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many, "_model", needs)
        done = paddock("serve", str(path), "--on-demand", "--budget", "200", "--port", "0", "--tls-cert", tls[0], "--tls-key", tls[1], "--json")
    assert done.code == 0, done.err
    assert paddock("run", "one", "hello").out == "1: hello\n" or paddock("run", str(path), "hello").out == "1: hello\n"
    assert {s.name for s in state.servers(places())} >= {"gateway"}


@pytest.mark.parametrize("words, message", [(["--tls-cert", "CERT"], "both files"), (["--tls-cert", "CERT", "--tls-key", "/nowhere/key"], "no such file")])
def test_half_of_tls_is_refused(paddock, model_file, tls, words, message):
    done = paddock("serve", str(model_file), *[tls[0] if w == "CERT" else w for w in words])
    assert done.code == 2 and message in done.err


def test_other_address_than_loopback_is_warned_about_without_tls_only(paddock, model_file, tls):
    assert "not encrypted" in paddock("serve", str(model_file), "--host", "0.0.0.0", "--port", "0").err
    paddock("stop", "--all")
    assert "not encrypted" not in paddock("serve", str(model_file), "--host", "0.0.0.0", "--port", "0", "--tls-cert", tls[0], "--tls-key", tls[1]).err


def test_certificate_that_nobody_trusts_is_said_and_not_tried_again(tls):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, form, *args):
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls)
    served.socket = context.wrap_socket(served.socket, server_side=True)
    served.handle_error = lambda *_: None
    threading.Thread(target=served.serve_forever, daemon=True).start()
    certificates.cache_clear()
    try:
        with Web(f"https://127.0.0.1:{served.server_port}") as web, pytest.raises(HubError, match="is not trusted: self-signed certificate") as caught, web.get(web.endpoint):
            pass
        assert not isinstance(caught.value, Transient) and "SSL_CERT_FILE" in caught.value.hint
    finally:
        served.shutdown()
        served.server_close()
