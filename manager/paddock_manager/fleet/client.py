"""The few HTTP calls that the manager makes to a runner on this machine: health, models, chat as a stream."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paddock_runner import errors
from paddock_runner.errors import ContextTooLong, FileError, PaddockError, ShuttingDown, Unauthorized

from paddock_manager.fleet.state import Server

READY_S = 5.0


class Unreachable(ShuttingDown):
    """No server answers there (facts: url)."""

    code = "unreachable"


@dataclass(slots=True)
class Answer:
    """What came of one chat request; filled while it streams."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    model: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls in OpenAI's shape."""
    ignored: str = ""
    """Fields of the request that had no effect, with commas."""


def connect(host: str, port: int, timeout_s: float | None, tls_cert: str = "") -> http.client.HTTPConnection:
    """A connection to a server of ours. tls_cert: its certificate, which alone is trusted, whatever name it carries.

    Raises: OSError when the certificate cannot be read.
    """
    if not tls_cert:
        return http.client.HTTPConnection(_reachable(host), port, timeout=timeout_s)
    context = ssl.create_default_context(cafile=tls_cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    return http.client.HTTPSConnection(_reachable(host), port, timeout=timeout_s, context=context)


def is_ready(host: str, port: int, timeout_s: float = READY_S, tls_cert: str = "") -> bool:
    """Does GET /health/ready answer 200?"""
    try:
        connection = connect(host, port, timeout_s, tls_cert)
    except OSError:
        return False
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def state_of(server: Server, key: str) -> dict[str, Any]:
    """What the runner says of itself (GET /v1/paddock/state); {} when it says nothing that can be read."""
    try:
        connection = connect(server.host, server.port, READY_S, server.tls_cert)
        try:
            connection.request("GET", "/v1/paddock/state", headers={"Authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            body = json.loads(answer.read(1 << 20)) if answer.status == 200 else {}
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return body if isinstance(body, dict) else {}


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


class Chat:
    """One streamed request: a chat, or a text to go on with where the body has a prompt. `close` at any time: the runner aborts when its client goes away."""

    def __init__(self, server: Server, key: str, body: dict[str, Any]):
        self.server = server
        self.answer = Answer()
        self._connection = connect(server.host, server.port, None, server.tls_cert)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            raw = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
            self._connection.request("POST", "/v1/completions" if "prompt" in body else "/v1/chat/completions", raw.encode(), headers)
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise Unreachable(
                f"{server.name} does not answer at {server.url}: {error}",
                f"`paddock logs {server.name}` shows why",
                url=server.url,
            ) from None
        except BaseException:
            self._connection.close()
            raise
        if self._response.status != 200:
            trouble = error_of(self._response.status, self._response.read(1 << 20))
            self._connection.close()
            if isinstance(trouble, ContextTooLong):
                trouble.hint = "say less, ask for a shorter answer (--max-tokens), or take a larger context (--ctx)"
            if isinstance(trouble, Unauthorized):
                trouble.hint = f"{server.name} was started with other keys: `paddock stop {server.name}`, then start it again"
            raise trouble
        self.answer.ignored = self._response.getheader("x-paddock-ignored-fields", "")

    def pieces(self) -> Iterator[tuple[str, str]]:
        """(kind, text) as they come; kind: text or reasoning.

        Raises: FileError for a stream that is not ours, Unreachable when it breaks off, the runner's own error.
        """
        is_done = False
        try:
            for line in self._response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    is_done = True
                    break
                yield from self._event(data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._broken(str(error)) from None
        finally:
            self.close()
        if not is_done:
            raise self._broken("the stream ended early")

    def close(self) -> None:
        """Hang up."""
        self._response.close()
        self._connection.close()

    def _event(self, data: bytes) -> Iterator[tuple[str, str]]:
        try:
            event = json.loads(data)
        except ValueError:
            raise FileError(f"{self.server.url} sent an event that is not JSON") from None
        if "error" in event:
            raise error_of(int(event["error"].get("status", 500) or 500), data)
        self.answer.model = event.get("model") or self.answer.model
        self.answer.usage = event.get("usage") or self.answer.usage
        for choice in event.get("choices", []):
            delta = choice.get("delta") or {}
            self.answer.finish_reason = choice.get("finish_reason") or self.answer.finish_reason
            if delta.get("reasoning_content"):
                self.answer.reasoning += delta["reasoning_content"]
                yield "reasoning", delta["reasoning_content"]
            for call in delta.get("tool_calls") or ():
                self._call(call)
            if text := delta.get("content") or choice.get("text"):
                self.answer.text += text
                yield "text", text

    def _call(self, part: dict[str, Any]) -> None:
        """A new call, or more of one's arguments."""
        calls, function = self.answer.calls, part.get("function") or {}
        index = int(part.get("index", 0))
        if index >= len(calls):
            calls.append(
                {
                    "id": part.get("id") or "",
                    "type": "function",
                    "function": {"name": function.get("name") or "", "arguments": ""},
                }
            )
        calls[min(index, len(calls) - 1)]["function"]["arguments"] += function.get("arguments") or ""

    def _broken(self, reason: str) -> PaddockError:
        if not self.server.is_alive:
            return Unreachable(
                f"{self.server.name} died while it answered",
                f"`paddock logs {self.server.name}` shows why",
                url=self.server.url,
            )
        return Unreachable(
            f"{self.server.name} broke off the answer: {reason}",
            f"`paddock logs {self.server.name}` shows why",
            url=self.server.url,
        )


def error_of(status: int, raw: bytes) -> PaddockError:
    """The runner's error body as the error it was."""
    try:
        body = json.loads(raw)["error"]
        message, code = str(body.get("message", "")), str(body.get("code", ""))
        hint = str(body.get("hint", ""))
        message = message.removesuffix(f" ({hint})") if hint else message  # it stands in both, since most clients show one
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code, hint = raw[:200].decode("utf-8", "replace"), "", ""
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, PaddockError)]
    kind = next((k for k in kinds if k.code == code), None) or next(
        (k for k in kinds if k.http_status == status), PaddockError
    )
    return kind(message or f"the server answered HTTP {status}", hint, status=status)
