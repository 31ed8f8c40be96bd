"""A runner without a model: takes the runner's flags, writes the state file, answers health, models and chat. Run as a script.

It echoes the last message, word by word; `use NAME {...}` calls that tool where there are tools. Words in the model's file name make it misbehave:
`dies` (exit 7 with a sentence), `crash` (SIGSEGV), `busy` (says that it is), `slowstart` (ready at the second health check), `neverready` (never), `breaks` (drops the stream), `endless` (streams until the client hangs up).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WITH_VALUE = {
    "--model", "--name", "--kernel-pack", "--device", "--host", "--port", "--max-batch", "--max-ctx", "--kv-dtype", "--window-kv-dtype", "--threads",
    "--api-key-file", "--state-file", "--tls-cert", "--tls-key", "--gpu", "--task", "--host-cache-gib",
}  # fmt: skip


def read_flags(words: list[str]) -> dict[str, str]:
    """The flags by name; anything unknown ends the program as the real one would."""
    found: dict[str, str] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--no-auth":
            found[word] = "yes"
        elif word in WITH_VALUE:
            found[word] = queue.pop(0)
        else:
            sys.exit(f"error: no option {word}")
    return found


class Handler(BaseHTTPRequestHandler):
    """The few endpoints that the manager uses."""

    protocol_version = "HTTP/1.1"
    flags: dict[str, str]
    n_ready = 0

    def log_message(self, form: str, *args: object) -> None:
        """To the log, flushed."""
        sys.stderr.write(form % args + "\n")
        sys.stderr.flush()

    def reply(self, status: int, body: object) -> None:
        """A JSON answer."""
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        """Health and models."""
        if self.path == "/health/ready":
            Handler.n_ready += 1
            name = Path(self.flags["--model"]).name
            late = "neverready" in name or ("slowstart" in name and Handler.n_ready < 2)
            self.reply(503 if late else 200, {"ready": not late})
        elif self.path.startswith("/health"):
            self.reply(200, {"live": True})
        elif self.is_allowed() and self.path == "/v1/paddock/state" and "busy" in Path(self.flags["--model"]).name:
            engine = {"slots": {"all": 8, "free": 5}, "queue": {"waiting": 2}, "counters": {"output_tokens": 77}}
            self.reply(200, {"engine": engine, "facts": {"kv_format": "fp8"}})
        elif self.path == "/metrics" and self.is_allowed():
            self.metrics()
        elif self.is_allowed():
            self.reply(200, {"object": "list", "data": [{"id": self.flags["--name"]}]})

    def metrics(self) -> None:
        """A counter and a gauge."""
        lines = ["# TYPE paddock_http_requests_total counter", 'paddock_http_requests_total{route="/v1/chat/completions",status="200"} 1', "# TYPE paddock_engine_up gauge", "paddock_engine_up 1"]
        raw = "\n".join(lines).encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def is_allowed(self) -> bool:
        """The key."""
        sent = hashlib.sha256(self.headers.get("Authorization", "").removeprefix("Bearer ").encode()).hexdigest()
        keys = Path(self.flags["--api-key-file"]).read_text().split() if "--api-key-file" in self.flags else []
        if not keys or f"sha256:{sent}" in keys:
            return True
        self.reply(401, {"error": {"message": "no key, or a wrong one", "code": "invalid_api_key", "hint": "send the key"}})
        return False

    def do_POST(self) -> None:
        """Chat: an echo."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_allowed():
            return
        if self.path == "/v1/completions" and asked.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for text, end in ((f"[{asked['prompt']}]", None), ("", "stop")):
                self.event({"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": end}]})
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True
            return
        if self.path == "/v1/completions":
            worse = 0.5 * (self.flags.get("--kv-dtype") == "fp8") + 0.25 * (self.flags.get("--window-kv-dtype") == "fp8")
            entries = [None, *({str(i): {"logprob": -1.0 - worse, "rank": None, "decoded_token": "x"}} for i in range(9))]
            self.reply(200, {"choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]})
            return
        text = asked["messages"][-1]["content"]
        if text == "too long":
            self.reply(400, {"error": {"message": "the prompt has 9 tokens, the context 8", "code": "context_length_exceeded"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if "reasoning_effort" in asked:
            self.send_header("x-paddock-ignored-fields", "reasoning_effort")
        self.send_header("Connection", "close")
        self.end_headers()
        if "endless" in Path(self.flags["--model"]).name:
            self.go_on()
            return
        if text.startswith("use ") and asked.get("tools") and asked["messages"][-1]["role"] == "user":
            _, name, arguments = text.split(" ", 2)
            self.event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}]}, "finish_reason": None}]})
            for half in (arguments[:3], arguments[3:]):
                self.event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": half}}]}, "finish_reason": None}]})
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True
            return
        words = [f"{len(asked['messages'])}:", *text.split()]
        for number, word in enumerate(words):
            self.event({"choices": [{"index": 0, "delta": {"content": word + (" " if number + 1 < len(words) else "")}, "finish_reason": None}]})
            if "breaks" in Path(self.flags["--model"]).name and number == 1:
                self.close_connection = True
                return
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": len(text.split()), "completion_tokens": len(words), "total_tokens": 0}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def go_on(self) -> None:
        """Stream until the client hangs up, and say so."""
        self.close_connection = True
        try:
            while True:
                self.event({"choices": [{"index": 0, "delta": {"content": "and "}, "finish_reason": None}]})
                threading.Event().wait(0.01)
        except OSError:
            self.log_message("%s", "client gone")

    def event(self, body: dict[str, object]) -> None:
        """One chunk."""
        self.wfile.write(b"data: " + json.dumps({"object": "chat.completion.chunk", "model": self.flags["--name"], **body}).encode() + b"\n\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    """Says nothing about clients that hang up: its log is compared word by word."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Not a word."""


def main() -> None:
    """Serve until SIGTERM, or tell of the API as the real one does."""
    if sys.argv[1:] == ["openapi"]:
        from paddock_runner.front.openapi import description

        sys.stdout.write(description().decode())
        return
    flags = read_flags(sys.argv[1:])
    model = flags["--model"]
    name = Path(model).name
    if "crash" in name:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "dies" in name:
        sys.stderr.write(f"loading {model}\nerror: {model}: truncated, need 10 bytes, have 9\n")
        sys.exit(7)
    Handler.flags = flags
    try:
        server = Server((flags["--host"], int(flags["--port"])), Handler)
    except OSError as error:
        sys.stderr.write(f"error: port {flags['--port']}: {error.strerror}\n")
        sys.exit(2)
    if "--tls-cert" in flags:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(flags["--tls-cert"], flags["--tls-key"])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    state = {
        "pid": os.getpid(), "host": flags["--host"], "port": server.server_port, "model": flags["--name"],
        "max_ctx_tokens": int(flags.get("--max-ctx", 4096)), "max_batch": int(flags.get("--max-batch", 8)), "device": "cpu",
    }  # fmt: skip
    if "busy" in name:
        state["memory_bytes"] = 1 << 30
    sys.stderr.write(f"ready on {server.server_port}\n")
    sys.stderr.flush()
    path = Path(flags["--state-file"])
    path.with_suffix(".part").write_text(json.dumps(state))
    os.replace(path.with_suffix(".part"), path)
    server.serve_forever()


if __name__ == "__main__":
    main()
