"""A turn that is ready to run, whatever becomes of its answers: streamed as they come, or collected and sent whole."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..turns.collect import Answer, Collector
from ..turns.turn import PLAIN, Reading, Sink, Turn
from ..turns.wish import Wish
from .http import Exchange
from .service import Front, caller, run_stream, run_turn
from .sse import EventStream


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, what is wanted of their answers, and how these are read. salt: apart from whom prefixes are shared."""

    front: Front
    exchange: Exchange
    prompts: Sequence[array[int]]
    wish: Wish
    reading: Reading = PLAIN
    salt: str | None = None

    def turn(self, sink: Sink) -> Turn:
        """The turn, its answers going to `sink`."""
        whose = caller(self.exchange, self.exchange.client, self.salt)
        return Turn(self.front.desk, self.front.served, self.prompts, self.wish, sink, whose, self.reading)

    async def stream(self, stream: EventStream, turn: Turn, close: Callable[[], None]) -> None:
        """Runs a turn whose sink writes to `stream`, has the last events written by `close`, and ends the answer."""
        await run_stream(self.front, self.exchange, turn, stream)
        close()
        await stream.finish()

    async def collect(self) -> tuple[Turn, list[Answer]]:
        """Runs the turn; gives its answers when all are there."""
        collector = Collector(self.wish.n * len(self.prompts))
        turn = self.turn(collector)
        await run_turn(self.front, self.exchange, turn)
        return turn, collector.answers
