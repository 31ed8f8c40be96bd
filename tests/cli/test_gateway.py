"""Several models on one port: routing, loading on demand, eviction by bytes, idle unloading, keys and origins."""

from __future__ import annotations

import http.client
import json
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from paddock_manager.commands import many
from paddock_manager.fleet import spawn, state
from paddock_manager.paths import places
from paddock_runner.front import openapi

from tests.cli.conftest import tiny_gguf

pytestmark = pytest.mark.usefixtures("fake_runner")
PLANNED = many._model


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three models that need 100 bytes each, as far as the gateway is told."""
    found = []
    for name in ("one", "two", "three", "dies"):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(tiny_gguf())
        found.append(str(path))

    def needs(target: Any, given: dict[str, str], where: object, budget: int, by: str) -> dict[str, Any]:
        return {"name": target.name, "ref": target.ref, "path": str(target.path), "flags": [], "asked": {"by": by}, "need_bytes": 100}

    monkeypatch.setattr(many, "_model", needs)
    return found


def serve(paddock: Any, models: list[str], *more: str) -> dict[str, Any]:
    done = paddock("serve", *models, "--port", "0", "--json", *more)
    assert done.code == 0, done.err
    return {**done.json["server"], "key": paddock("key").out.strip()}


def call(server: dict[str, Any], model: str, text: str = "hi", key: str | None = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server["port"], timeout=60)
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": text}]})
    sent = {"Authorization": f"Bearer {server['key'] if key is None else key}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    connection.request("POST", "/v1/chat/completions", body, sent)
    answer = connection.getresponse()
    raw = answer.read().decode()
    connection.close()
    if answer.status != 200:
        return answer.status, raw
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert raw.endswith("data: [DONE]\n\n")
    return 200, "".join(c["delta"].get("content", "") for e in events for c in e["choices"])


def loaded() -> set[str]:
    return {s.name for s in state.servers(places()) if s.device != "gateway"}


def wait_for(condition: Any) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        threading.Event().wait(0.02)


def test_models_are_loaded_when_they_are_asked_for_and_routed_by_name(paddock, models):
    server = serve(paddock, models[:3], "--budget", "300")
    assert loaded() == set()
    assert call(server, "two", "hello") == (200, "1: hello")
    assert loaded() == {"two"}
    assert call(server, "one")[0] == 200 and loaded() == {"one", "two"}
    status, raw = call(server, "four")
    assert status == 404 and json.loads(raw)["error"]["code"] == "model_not_found"
    assert {s["name"] for s in paddock("ps", "--json").json["servers"]} == {"gateway", "one", "two"}
    assert paddock("run", models[0], "through the gateway").out == "1: through the gateway\n"
    assert paddock("stop", "gateway").code == 0
    assert state.servers(places()) == []


def test_room_is_made_by_bytes_and_no_request_is_lost(paddock, models):
    server = serve(paddock, models[:3], "--budget", "200")
    answers: list[tuple[int, str]] = []

    def client(number: int) -> None:
        for turn in range(6):
            answers.append(call(server, ("one", "two", "three")[(number + turn) % 3], f"{number} {turn}"))
            assert len(loaded()) <= 2

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 24 and {status for status, _ in answers} == {200}
    assert "evicting" in Path(server["log"]).read_text()


def test_client_that_hangs_up_ends_the_answer_and_frees_the_model(paddock, models, tmp_path):
    path = tmp_path / "endless.gguf"
    path.write_bytes(tiny_gguf())
    server = serve(paddock, [str(path), models[0]], "--budget", "100")
    connection = http.client.HTTPConnection("127.0.0.1", server["port"], timeout=20)
    body = json.dumps({"model": "endless", "messages": [{"role": "user", "content": "go"}]})
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {server['key']}"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    answer.close()
    connection.close()
    wait_for(lambda: "client gone" in spawn.log_path(places(), "endless").read_text())
    assert call(server, "one") == (200, "1: hi")


def test_idle_models_are_unloaded(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200", "--idle", "0.2")
    assert call(server, "one")[0] == 200
    wait_for(lambda: loaded() == set())
    assert call(server, "one")[0] == 200


def test_model_that_dies_at_start_is_an_error_with_back_off_and_the_rest_goes_on(paddock, models):
    server = serve(paddock, [models[0], models[3]], "--budget", "200")
    status, raw = call(server, "dies")
    assert status == 500 and "dies cannot be served" in json.loads(raw)["error"]["message"] and "its log" not in raw
    status, raw = call(server, "dies")
    assert status == 429 and "the next try is in" in json.loads(raw)["error"]["message"]
    assert call(server, "one")[0] == 200


def test_model_that_is_killed_is_started_again(paddock, models):
    import os
    import signal

    server = serve(paddock, models[:2], "--budget", "200")
    assert call(server, "one")[0] == 200
    pid = next(s.pid for s in state.servers(places()) if s.name == "one")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: loaded() == set())
    assert call(server, "one")[0] == 200


def test_gateway_that_was_killed_leaves_runners_that_the_next_one_takes_over(paddock, models):
    import os
    import signal

    server = serve(paddock, models[:2], "--budget", "200")
    assert call(server, "one")[0] == 200
    os.kill(server["pid"], signal.SIGKILL)
    spawn.CHILDREN.pop(server["pid"]).wait(10)
    pid = next(s.pid for s in state.servers(places()) if s.name == "one")
    again = serve(paddock, models[:2], "--budget", "200")
    assert call(again, "one")[0] == 200
    assert [s.pid for s in state.servers(places()) if s.name == "one"] == [pid]


def test_gateway_that_dies_is_started_again_on_its_port_with_its_runners(paddock, models):
    import os
    import signal

    import psutil

    server = serve(paddock, models[:2], "--budget", "200")
    assert call(server, "one")[0] == 200
    one = next(s.pid for s in state.servers(places()) if s.name == "one")
    gateway = psutil.Process(server["pid"]).children()[0].pid
    os.kill(gateway, signal.SIGKILL)
    wait_for(lambda: (row := paddock("ps", "--json").json["servers"][0])["restarts"] == 1 and row["state"] == "ready")
    assert call(server, "one") == (200, "1: hi") and call(server, "two")[0] == 200
    assert [s.pid for s in state.servers(places()) if s.name == "one"] == [one]
    told = next(r for r in paddock("ps", "--json").json["servers"] if r["name"] == "gateway")
    assert (told["pid"], told["port"], told["ended"]) == (server["pid"], server["port"], "by signal 9 (SIGKILL)")
    assert paddock("stop", "gateway", "--json").json["stopped"][0]["killed"] is False and loaded() == set()


def test_unit_of_several_models_is_a_gateway_that_systemd_starts_again(paddock, models):
    text = paddock("serve", *models[:2], "--systemd").out
    assert "Restart=on-failure" in text and '"--state-file"' in text and '"--port" "11660"' in text and "fleet.watch" not in text
    plan = text.split('"paddock_manager.web" "')[1].split('"')[0]
    assert [m["name"] for m in json.loads(Path(plan).read_text())["models"]] == ["one", "two"]
    assert state.servers(places()) == []


@pytest.mark.parametrize(
    "headers, key, status",
    [
        ({}, "", 401), ({}, "pk-wrong", 401), ({"Host": "evil.example"}, None, 403), ({"Origin": "https://evil.example"}, None, 403),
        ({"Origin": "http://localhost:3000"}, None, 200), ({"x_api_key": "KEY"}, "", 200), ({"api_key": "KEY"}, "", 200),
    ],
)  # fmt: skip
def test_callers_without_key_from_another_host_or_origin_are_refused_before_anything_is_started(paddock, models, headers, key, status):
    server = serve(paddock, models[:2], "--budget", "200")
    sent = {k: server["key"] if v == "KEY" else v for k, v in headers.items()}
    assert call(server, "one", key=key, **sent)[0] == status
    assert loaded() == ({"one"} if status == 200 else set())


def test_keys_of_others_come_and_go_while_the_gateway_runs(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    assert call(server, "one")[0] == 200  # its runner is there before the key is
    fresh = paddock("key", "add", "phone").out.strip()

    def until(status: int) -> None:
        end = time.monotonic() + 20
        while (found := call(server, "one", key=fresh)[0]) != status:
            assert time.monotonic() < end, found
            time.sleep(0.1)

    until(200)
    assert paddock("key", "rm", "phone").code == 0
    until(401)
    assert call(server, "one")[0] == 200


def test_bad_requests_are_refused_in_one_shape(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    connection = http.client.HTTPConnection("127.0.0.1", server["port"], timeout=20)
    auth = {"Authorization": f"Bearer {server['key']}"}
    for method, path, body, status in [("POST", "/v1/chat/completions", "{", 400), ("POST", "/v1/chat/completions", "[]", 400), ("POST", "/v1/chat/completions", '{"model": 3}', 400), ("POST", "/admin", "{}", 404), ("DELETE", "/v1/models/one", "", 404), ("GET", "/v1/models", "", 200), ("GET", "/health/ready", "", 200)]:
        connection.request(method, path, body, auth)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == status and (status == 200 or found["error"]["message"])
    connection.close()


def test_what_does_not_fit_the_budget_is_refused_at_the_start(paddock, models_dir):
    path = str(models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf")
    done = paddock("serve", path, "--on-demand", "--port", "0", "--budget", "100MiB", "--device", "cpu")
    assert done.code == 9 and "the budget is 0.10" in done.err


def test_client_that_hangs_up_while_its_model_loads_leaves_a_runner_that_the_next_one_uses(paddock, models, tmp_path):
    import socket

    slow = tmp_path / "slowstart.gguf"
    slow.write_bytes(tiny_gguf())
    server = serve(paddock, [str(slow), models[0]], "--budget", "200")
    body = json.dumps({"model": "slowstart", "messages": [{"role": "user", "content": "hi"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server['key']}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server["port"])) as client:
        client.sendall(head.encode() + body)
    wait_for(lambda: loaded() == {"slowstart"})
    pid = next(s.pid for s in state.servers(places()) if s.name == "slowstart")
    assert call(server, "slowstart")[0] == 200
    assert [s.pid for s in state.servers(places()) if s.name == "slowstart"] == [pid]
    assert "Traceback" not in "\n".join(paddock("logs", server["name"], "--json").json["lines"])


def ask(server: dict[str, Any], method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """(status, body, headers) of one request with the key."""
    connection = http.client.HTTPConnection("127.0.0.1", server["port"], timeout=60)
    sent = {"Authorization": f"Bearer {server['key']}"} | {k.replace("_", "-"): v for k, v in headers.items()}
    connection.request(method, path, None if body is None else json.dumps(body), sent)
    answer = connection.getresponse()
    raw = answer.read().decode()
    connection.close()
    is_json = answer.headers.get("content-type") == "application/json"
    return answer.status, json.loads(raw) if is_json and raw else raw, {k.lower(): v for k, v in answer.headers.items()}


def test_models_are_listed_as_openai_and_ollama_do_without_loading_one(paddock, models_dir, models, monkeypatch):
    monkeypatch.setattr(many, "_model", PLANNED)
    path = str(models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf")
    server = serve(paddock, [path], "--on-demand", "--name", "g", "--device", "cpu")
    name = Path(path).stem
    listed = ask(server, "GET", "/v1/models")[1]["data"]
    assert [(m["id"], m["max_model_len"], m["family"], m["parameters"], m["state"]) for m in listed] == [(name, 8192, "llama", 134515008, "on demand")]
    assert ask(server, "GET", f"/v1/models/{name}")[1] == listed[0]
    tag = ask(server, "GET", "/api/tags")[1]["models"][0]
    assert (tag["name"], tag["details"]["parameter_size"], tag["details"]["format"]) == (name, "134.52M", "gguf")
    shown = ask(server, "POST", "/api/show", {"model": f"{name}:latest"})[1]
    assert shown["capabilities"][0] == "completion" and shown["model_info"]["llama.context_length"] == 8192 and "im_start" in shown["template"]
    assert ask(server, "GET", "/api/ps")[1] == {"models": []} and loaded() == set()


def test_every_vendors_clients_read_their_own_errors(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    status, body, _ = ask(server, "POST", "/v1/chat/completions", {"model": "on", "messages": []})
    assert status == 404 and body["error"] | {"message": ""} == {"message": "", "type": "not_found_error", "param": "model", "code": "model_not_found", "hint": "did you mean one?"}
    status, body, _ = ask(server, "POST", "/v1/messages", {"model": "x"})
    assert status == 404 and body["type"] == "error" and body["error"]["type"] == "not_found_error"
    status, body, _ = ask(server, "POST", "/api/chat", {"model": "x"})
    assert status == 404 and body["error"] == "no model 'x' is served here (there are one, two)"
    assert [ask(server, "GET", path)[0] for path in ("/v1/chat/completions", "/v1/models/x", "/nothing", "/v1/nothing")] == [405, 404, 404, 404]
    assert loaded() == set()


def test_paths_that_are_looked_at_first_need_no_key(paddock, models):
    server = {**serve(paddock, models[:2], "--budget", "200"), "key": ""}
    assert ask(server, "GET", "/")[:2] == (200, "Paddock is running")
    assert ask(server, "HEAD", "/")[:2] == (200, "")
    assert ask(server, "GET", "/api/version")[1]["paddock"] == ask(server, "GET", "/version")[1]["version"] and ask(server, "GET", "/api/version")[0] == ask(server, "GET", "/ping")[0] == 200
    assert ask(server, "GET", "/v1/models")[0] == ask(server, "GET", "/api/tags")[0] == 401


def test_page_of_this_machine_may_read_answers(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    page = "http://localhost:3000"
    status, _, headers = ask(server, "OPTIONS", "/v1/chat/completions", Origin=page)
    assert status == 204 and headers["access-control-allow-origin"] == page and "authorization" in headers["access-control-allow-headers"]
    assert ask(server, "GET", "/v1/models", Origin=page)[2]["access-control-allow-origin"] == page
    assert ask(server, "GET", "/v1/models/x", Origin=page)[2]["access-control-allow-origin"] == page
    assert "access-control-allow-origin" not in ask(server, "GET", "/v1/models")[2]


def test_only_model_needs_no_name(paddock, models):
    server = serve(paddock, models[:1], "--on-demand", "--budget", "200")
    assert call(server, "") == (200, "1: hi") and call(server, "one:latest") == (200, "1: hi")


def test_name_of_a_server_is_taken_once_whoever_serves_it(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    alone = paddock("serve", models[0], "--port", "0")
    assert alone.code == 2 and f"error: one is already served at http://127.0.0.1:{server['port']}, by gateway\n" in alone.err
    assert call(server, "one")[0] == 200
    assert "error: one is already served" in paddock("serve", models[0], "--port", "0").err
    assert paddock("serve", models[0], "--port", "0", "--name", "other").code == 0
    second = paddock("serve", *models[1:3], "--port", "0", "--name", "more", "--budget", "200")
    assert second.code == 2 and "error: two is already served" in second.err
    kept = paddock("run", models[0], "hi", "--keep", "--ctx", "64")
    assert kept.code == 2 and "error: one is already served" in kept.err
    assert paddock("stop", "--all").code == 0 and state.servers(places()) == []


def test_gateway_whose_port_is_taken_says_so(paddock, models):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = paddock("serve", *models[:2], "--port", str(port), "--budget", "200")
    assert done.code == 2 and f"error: gateway cannot be served: cannot listen on 127.0.0.1 port {port}: it is in use (--port 0 takes a free one)\n" in done.err


def test_further_hosts_and_origins_are_let_in_as_told(paddock, models):
    page, more = "https://chat.example", ("--runner", "allow-host=models.example", "--runner", "allow-host=two.example", "--runner", "allow-origin=https://chat.example")
    server = serve(paddock, models[:2], "--budget", "200", *more)
    for host in ("models.example", "two.example:1", "host.docker.internal", "localhost"):
        assert ask(server, "GET", "/v1/models", Host=host)[0] == 200
    assert ask(server, "GET", "/v1/models", Origin=page)[2]["access-control-allow-origin"] == page
    status, body, _ = ask(server, "GET", "/v1/models", Host="evil.example")
    assert status == 403 and "--runner allow-host=NAME" in body["error"]["hint"]
    assert ask(server, "GET", "/v1/models", Origin="https://evil.example")[0] == 403


def test_api_is_described_before_a_model_is_loaded(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    status, body, _ = ask(server, "GET", "/openapi.json")
    assert status == 200 and body == json.loads(openapi.description())
    assert ask(server, "GET", "/api/ps")[1] == {"models": []}
    assert ask(server, "GET", "/v1/models/")[1]["error"]["hint"] == "did you mean /v1/models?"


def test_numbers_of_the_gateway_and_of_its_runners_are_for_admins(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    assert call(server, "one")[0] == 200 and ask(server, "POST", "/v1/chat/completions", {"model": "x"})[0] == 404
    status, text, headers = ask(server, "GET", "/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert status == 200 and headers["content-type"].startswith("text/plain")
    assert values['paddock_gateway_http_requests_total{route="/v1/chat/completions",status="200"}'] == "1"
    assert values['paddock_gateway_http_requests_total{route="/v1/chat/completions",status="404"}'] == "1"
    assert [values[f'paddock_gateway_model_loaded{{model="{m}"}}'] for m in ("one", "two")] == ["1", "0"]
    assert values['paddock_gateway_model_starts_total{model="one"}'] == "1" and values["paddock_gateway_memory_held_bytes"] == "100"
    assert values['paddock_http_requests_total{model="one",route="/v1/chat/completions",status="200"}'] == "1"
    kinds = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    assert ask({**server, "key": ""}, "GET", "/metrics")[0] == 401


def test_key_for_inference_is_passed_on_and_sees_no_numbers(paddock, models):
    phone = paddock("key", "add", "phone", "--json").json["key"]
    server = {**serve(paddock, models[:2], "--budget", "200"), "key": phone}
    assert call(server, "one") == (200, "1: hi")
    assert ask(server, "GET", "/metrics")[0] == 403


def test_head_that_is_too_large_and_body_over_the_limit_that_was_set_are_refused(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200", "--runner", "max-body-mib=0.01")
    status, body, headers = ask(server, "POST", "/v1/chat/completions", {"model": "one", "messages": [{"role": "user", "content": "x" * 20_000}]})
    assert status == 413 and body["error"]["code"] == "request_too_large" and headers["connection"] == "close" and loaded() == set()
    assert ask(server, "GET", "/health", None, X="y" * 70_000)[0] == 431
    done = paddock("serve", *models[2:], "--port", "0", "--name", "other", "--runner", "max-body-mib=much")
    assert done.code == 2 and "max-body-mib=much: 'much' is not a number" in done.err


def test_answer_has_the_name_that_its_request_had(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    assert ask(server, "POST", "/v1/chat/completions", {"model": "x"}, x_request_id="mine-7")[2]["x-request-id"] == "mine-7"
    assert ask(server, "GET", "/v1/models")[2]["x-request-id"].startswith("req_")


def test_page_whose_sdk_sends_headers_of_its_own_may_call(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    wanted = "authorization,x-stainless-os,x-stainless-lang"
    headers = ask(server, "OPTIONS", "/v1/chat/completions", Origin="http://localhost:5173", Access_Control_Request_Headers=wanted)[2]
    assert headers["access-control-allow-headers"] == wanted and headers["access-control-allow-private-network"] == "true"


def test_runners_variables_hold_for_the_port_of_several_models(paddock, models, monkeypatch):
    monkeypatch.setenv("PADDOCK_ALLOW_HOST", "models.example, two.example")
    monkeypatch.setenv("PADDOCK_MAX_BODY_MIB", "0.01")
    server = serve(paddock, models[:2], "--budget", "200")
    assert ask(server, "GET", "/v1/models", Host="two.example")[0] == 200
    assert ask(server, "POST", "/v1/chat/completions", {"model": "x" * 20_000})[0] == 413
    monkeypatch.setenv("PADDOCK_MAX_BATCH", "many")
    done = paddock("serve", models[2], "--on-demand", "--port", "0", "--name", "other")
    assert done.code == 2 and "PADDOCK_MAX_BATCH: 'many' is not a whole number" in done.err


def test_key_with_a_weight_is_listed_and_kept(paddock, models):
    assert paddock("key", "add", "ci", "--weight", "3").code == 0
    serve(paddock, models[:2], "--budget", "200")
    rows = {r["name"]: (r["scope"], r["weight"]) for r in paddock("key", "ls", "--json").json["keys"]}
    assert rows == {"this-machine": ("admin", 1), "ci": ("inference", 3)}
    assert paddock("key", "--weight", "3").code == 2


def test_path_that_no_model_answers_is_unknown_before_a_model_is_asked_for(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    assert ask(server, "POST", "/v1/moderations", {"input": "x"})[0] == 404
    status, body, _ = ask(server, "POST", "/v1/v1/messages", {"model": "one"})
    assert status == 404 and "it is at /v1/messages" in body["error"]["message"]
    status, body, headers = ask(server, "POST", "/v1/messages", {"model": "x"}, x_request_id="r-1")
    assert status == 404 and body["request_id"] == headers["request-id"] == "r-1" and "there are one, two" in body["error"]["message"]
    status, body, _ = ask(server, "GET", "/v1/responses/resp_1")
    assert status == 404 and body["error"]["code"] == "response_not_found"


def test_keep_alive_of_ollamas_clients_unloads_a_model_or_keeps_it(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200", "--idle", "0.2")
    assert ask(server, "POST", "/api/chat", {"model": "one", "keep_alive": "1h", "messages": [{"role": "user", "content": "hi"}]})[0] == 200
    assert call(server, "two")[0] == 200
    wait_for(lambda: loaded() == {"one"})
    expires = ask(server, "GET", "/api/ps")[1]["models"][0]["expires_at"]
    assert 3500 < datetime.fromisoformat(expires).timestamp() - time.time() <= 3600
    status, body, _ = ask(server, "POST", "/api/generate", {"model": "one:latest", "keep_alive": 0})
    assert (status, body["done_reason"], body["response"]) == (200, "unload", "") and loaded() == set()
    status, body, _ = ask(server, "POST", "/api/generate", {"model": "one", "prompt": "x", "keep_alive": "soon"})
    assert status == 400 and "a duration such as 5m" in body["error"] and loaded() == set()


def test_model_with_an_odd_name_is_found_by_it(paddock, models, tmp_path):
    path = tmp_path / "per%41 cent\x1b[31m.gguf"
    path.write_bytes(tiny_gguf())
    server = serve(paddock, [str(path), models[0]], "--budget", "200")
    assert ask(server, "GET", "/v1/models/per%2541%20cent%1b[31m")[1]["id"] == path.stem
    assert call(server, path.stem)[0] == 200
    assert 'model_loaded{model="per%41 cent\x1b[31m"} 1' in ask(server, "GET", "/metrics")[1]
    assert "\x1b" not in paddock("ps").out + paddock("stop", "--all").out


def test_agent_is_led_to_the_gateway_not_to_a_runner_that_may_be_unloaded(paddock, models):
    server = serve(paddock, models[:2], "--budget", "200")
    assert call(server, "one")[0] == 200
    for word in ("one", "two", models[0]):
        told = paddock("launch", "env", word, "--print").out
        assert f"export OPENAI_BASE_URL=http://127.0.0.1:{server['port']}/v1\n" in told and f"export OPENAI_MODEL={Path(word).stem}\n" in told
    assert {s.name for s in state.servers(places())} == {"gateway", "one"}


def test_model_that_is_served_on_demand_is_not_removed(paddock, models):
    assert paddock("add", models[0]).code == 0
    serve(paddock, ["one"], "--on-demand", "--budget", "200")
    done = paddock("rm", "one")
    assert done.code == 13 and "error: one is being served\nhint:  `paddock stop gateway` first\n" in done.err
    assert paddock("stop", "gateway").code == 0 and paddock("rm", "one").code == 0
