"""A client that goes away is aborted in every phase, streamed or not; one that reads slowly harms nobody."""

from __future__ import annotations

import json
import socket

import pytest
from paddock_runner.wire.messages import Refused, RefusedCode

from tests.conformance.live import KEY, Live

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def send(server: Live, body: dict, path: str = "/v1/chat/completions", n_bytes: int | None = None) -> socket.socket:
    """Sends a request (or the beginning of one) and leaves the answer unread."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    client.sendall((head + raw)[:n_bytes])
    return client


def read_until(client: socket.socket, mark: bytes) -> bytes:
    data = bytearray()
    while mark not in data[-70000:]:
        part = client.recv(65536)
        assert part, data
        data += part
    return bytes(data)


def unchunked(data: bytes) -> bytes:
    """The body of an answer in chunks."""
    out, at = [], 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        out.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(out)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_client_that_leaves_while_its_request_waits_is_aborted(server: Live, streams: bool, path: str) -> None:
    server.script.starts = False
    client = send(server, {**BODY, "prompt": "x", "stream": streams}, path)
    assert server.engine.wait_for(lambda: bool(server.engine.asked))
    client.close()
    assert server.engine.wait_for(lambda: len(server.engine.aborted) == 1)


@pytest.mark.parametrize("streams", [True, False])
def test_client_that_leaves_before_the_first_token_is_aborted(server: Live, streams: bool) -> None:
    server.script.n_tokens = 0
    client = send(server, {**BODY, "stream": streams})
    assert server.engine.wait_for(lambda: server.engine.n_running == 1 or bool(server.engine.asked))
    client.close()
    assert server.engine.wait_for(lambda: len(server.engine.aborted) == 1)
    assert server.engine.n_running == 0


@pytest.mark.parametrize("streams", [True, False])
def test_client_that_leaves_between_tokens_is_aborted_with_all_its_choices(server: Live, streams: bool) -> None:
    server.script.n_tokens = 2
    client = send(server, {**BODY, "n": 3, "stream": streams})
    if streams:
        read_until(client, b'"content":"e')
    assert server.engine.wait_for(lambda: len(server.engine.asked) == 3)
    client.close()
    assert server.engine.wait_for(lambda: len(server.engine.aborted) == 3)
    assert server.engine.n_running == 0 and server.front.desk.n_open == 0


def test_client_that_leaves_while_sending_its_body_asks_nothing(server: Live) -> None:
    client = send(server, BODY, n_bytes=150)
    client.close()
    assert server.post("/v1/chat/completions", BODY).status_code == 200
    assert len(server.engine.asked) == 1


def test_stop_string_aborts_the_ask_at_once(server: Live) -> None:
    server.say("one two three", ends=False)
    answer = server.post("/v1/chat/completions", {**BODY, "stop": [" two"]}).json()["choices"][0]
    assert answer["message"]["content"] == "one" and answer["finish_reason"] == "stop" and answer["stop_reason"] == " two"
    assert server.engine.wait_for(lambda: len(server.engine.aborted) == 1)


def test_client_that_does_not_read_gets_its_text_merged_and_slows_nobody(server: Live) -> None:
    server.say("abcdefghij", ends=False)
    lazy = send(server, {**BODY, "stream": True, "max_tokens": 4000, "n": 16})
    first = read_until(lazy, b"data: ")
    for _ in range(3):
        assert server.post("/v1/chat/completions", {**BODY, "max_tokens": 50}).json()["usage"]["completion_tokens"] == 50
    assert server.engine.wait_for(lambda: not server.engine.n_running, 20)
    texts, n_chunks = [""] * 16, 0
    data = first + read_until(lazy, b"[DONE]")
    lazy.close()
    for line in unchunked(data.partition(b"\r\n\r\n")[2]).split(b"\n"):
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content") or ""
            n_chunks += 1
    assert set(texts) == {"".join(server.tokenizer.pieces[i].decode() for i in (server.answer * 4000)[:4000])}
    assert n_chunks < 16 * 4000, "what piled up was merged"


def test_stream_that_waits_gets_comments_so_that_nobody_hangs_up(server: Live) -> None:
    server.script.starts = False
    client = send(server, {**BODY, "stream": True})
    data = read_until(client, b": keep-alive\n\n")
    assert data.startswith(b"HTTP/1.1 200") and b"text/event-stream" in data
    server.script.starts = True
    assert b"[DONE]" in read_until(client, b"[DONE]")
    client.close()


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": True, "n": 3}])
def test_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection(server: Live, more: dict) -> None:
    """Its answer would be read with the chunks' sizes in it: proxies speak 1.0 by default."""
    raw = json.dumps({**BODY, **more}).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(head + raw)
        data = b"".join(iter(lambda: client.recv(65536), b""))
    headers, _, body = data.partition(b"\r\n\r\n")
    assert b" 200 " in headers and b"connection: close" in headers and b"transfer-encoding" not in headers
    if not more:
        assert json.loads(body)["choices"][0]["message"]["content"] == "Hello there, general."
        return
    lines = [line for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"][0]["index"] == 0) == "Hello there, general."


def test_counted_are_the_prompts_that_were_read_and_not_those_that_were_refused(server: Live) -> None:
    def counted() -> int:
        with server.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("paddock_prompt_tokens_total "))

    before = counted()
    n = server.post("/v1/chat/completions", {**BODY, "n": 2}).json()["usage"]["prompt_tokens"]
    assert counted() == before + n
    assert server.post("/v1/completions", {"prompt": "xyz " * 20_000}).status_code == 400
    server.script.refusal = Refused(0, RefusedCode.QUEUE_FULL, 250, 5, 4)
    assert server.post("/v1/chat/completions", BODY).status_code == 429
    server.script.refusal, server.script.starts = None, False
    send(server, BODY).close()
    assert server.engine.wait_for(lambda: bool(server.engine.aborted))
    assert counted() == before + n
