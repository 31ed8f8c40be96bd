"""A live server for the conformance tests: the real front on a port of its own, with an engine whose answers a test chooses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import uvloop
from paddock_runner.edge.auth import Guard
from paddock_runner.edge.listen import bind
from paddock_runner.front.server import Server
from paddock_runner.front.service import Front
from paddock_runner.text.answer import AnswerFormat
from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf
from paddock_runner.text.template import ChatTemplate
from paddock_runner.turns.desk import Desk
from paddock_runner.turns.served import Served
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.port import FrontPort

from tests.fakes.engine import FakeEngine, Script
from tests.unit.text.small import byte_level_metadata

KEY = "pk-test-key"
MODEL = "fake"
MAX_CTX_TOKENS = 4096
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("assistant\\n{% endif", "assistant\\n{% endif") + "{# <think> </think> #}"
TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>\n"
    "For each call return <tool_call>\n{\"name\": ..., \"arguments\": ...}\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Live:
    """A running server. `say`: what the engine answers from now on, as text or as pieces that become tokens of their own."""

    def __init__(self, template: str = CHATML, keys: Sequence[str] = (KEY,), **front: Any) -> None:
        self.tokenizer = tokenizer_from_gguf(byte_level_metadata(), None)
        self.script = Script(lambda prompt: self.answer)
        self.answer: list[int] = []
        self.say("Hello there, general.")
        self._channel = Channel.create()
        self.engine = FakeEngine(self._channel, self.script)
        chat = ChatTemplate(template)
        served = Served(MODEL, self.tokenizer, chat, AnswerFormat(template, self.tokenizer), MAX_CTX_TOKENS, self.tokenizer.n_vocab)
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.front: Front
        self.loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(served, keys, front), daemon=True)

    def say(self, *texts: str, ends: bool = True) -> None:
        """The next answers: each piece is tokenized alone, so that pieces are token borders."""
        ids: list[int] = []
        for text in texts:
            ids += self.tokenizer.encode(text, add_special=False)
        self.answer = [*ids, *([self.tokenizer.eos_id] if ends else [])]

    def say_bytes(self, text: str) -> None:
        """The next answers, one token a byte."""
        by_piece = {piece: i for i, piece in reversed(list(enumerate(self.tokenizer.pieces)))}
        self.answer = [*(by_piece[bytes([b])] for b in text.encode()), self.tokenizer.eos_id]

    def client(self, **more: Any) -> httpx.Client:
        """A plain HTTP client with the key."""
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=10, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """One request."""
        with self.client() as client:
            return client.post(path, json=body, **more) if body is not None else client.post(path, **more)

    def _run(self, served: Served, keys: Sequence[str], front: dict[str, Any]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(served, keys, front))

    async def _serve(self, served: Served, keys: Sequence[str], front: dict[str, Any]) -> None:
        self.loop = asyncio.get_running_loop()
        desk = Desk(FrontPort(self._channel, True))
        guard = Guard(keys, front.pop("hosts", ()), front.pop("origins", ()))
        self.front = Front(served, desk, guard, **front)
        desk.on_dead = lambda: setattr(self.front, "phase", "failed")
        desk.listen(self.loop)
        await desk.state()
        self.front.phase = "ready"
        self._server = Server(self.front, 75, 1)
        self._ready.set()
        await self._server.serve(self._listener)
        served.close()
        desk.close()

    def start(self) -> None:
        """Starts engine and server."""
        self.engine.start()
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        """Ends both."""
        self.loop.call_soon_threadsafe(self._server.stop, True)
        self._thread.join(10)
        self.engine.stop()
        self.engine.join(10)
        self._channel.close()
        assert not self._thread.is_alive() and not self.engine.is_alive()


@contextmanager
def live(template: str = CHATML, **more: Any) -> Iterator[Live]:
    """A server for the time of a with block."""
    server = Live(template, **more)
    server.start()
    try:
        yield server
    finally:
        server.stop()
