"""An engine without a model: answers a front's ring with tokens that a test (or the bench) chooses. A thread, or a process of its own.

    python -m tests.fakes.engine CHANNEL [--ids FIRST LAST] [--every MS]    endless tokens for bench/front.py, as fast as the front reads
"""

from __future__ import annotations

import argparse
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paddock_runner.wire import messages as m
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.port import EnginePort

N_SLOTS = 1024
MAX_RING_BYTES = 256 << 10
FOREVER = 1 << 30


@dataclass
class Running:
    """An ask that runs."""

    ask: m.AskView
    slot: int
    tokens: Sequence[int]
    stop: frozenset[int]
    n_top: int
    limit: int
    cached_tokens: int = 0
    miss: m.Miss = m.Miss.NONE
    known_tokens: int = 0
    n_done: int = 0
    is_masked: bool = False


@dataclass
class Script:
    """What the engine does. reply: prompt ids to answer ids. n_tokens: how many each ask may get for now. Changed by tests."""

    reply: Callable[[list[int]], Sequence[int]]
    starts: bool = True
    n_tokens: int = FOREVER
    max_queue: int = FOREVER
    dies: bool = False
    refusal: m.Refused | None = None
    error: m.ErrorCode = m.ErrorCode.NONE
    cached_tokens: int = 0
    miss: m.Miss = m.Miss.NONE
    known_tokens: int = 0
    cache: set[bytes] = field(default_factory=set)
    draw: Callable[[bytes], int] | None = None
    """Draws a token under a mask: then asks with masks wait for theirs, as with the real engine."""


class FakeEngine(threading.Thread):
    """Serves one channel until the front goes or `stop` is called."""

    def __init__(self, channel: Channel, script: Script, shares_process: bool = True, every_s: float = 0.0, idle_s: float = 0.002) -> None:
        super().__init__(daemon=True)
        self.port = EnginePort(channel, shares_process)
        self.script = script
        self.aborted: list[int] = []
        self.asked: list[m.AskView] = []
        self.changed = threading.Condition()
        self._waiting: list[m.AskView] = []
        self._running: dict[int, Running] = {}
        self._masks: dict[tuple[int, int], bytes] = {}
        self._free = list(range(N_SLOTS - 1, -1, -1))
        self._is_stopped = False
        self._seq, self._every_s, self._idle_s = 0, every_s, idle_s

    def stop(self) -> None:
        """Ends the thread."""
        self._is_stopped = True

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
        """Until something that a test waits for has happened here."""
        with self.changed:
            return self.changed.wait_for(condition, timeout_s)

    @property
    def n_running(self) -> int:
        """Asks that run."""
        return len(self._running)

    def run(self) -> None:
        """The loop: read, start, step, publish."""
        poll = select.poll()
        poll.register(self.port.reader.event_fd, select.POLLIN)
        poll.register(self.port.life_fd, select.POLLIN)
        due = time.monotonic()
        while not self._is_stopped and not self.script.dies and self.port.peer_is_alive():
            has_read = self._read()
            self._start()
            has_moved = False
            if not self._every_s:
                has_moved = self._step()
            elif self._running and time.monotonic() >= due:
                due = max(due + self._every_s, time.monotonic() - self._every_s)
                has_moved = self._step()
            self.port.publish()
            if has_read or has_moved:
                continue
            if self.port.reader.park():
                wait_s = self._idle_s if not self._running or not self._every_s else max(0.0, due - time.monotonic())
                poll.poll(wait_s * 1000 if self._running or self._waiting or self._idle_s else 100)
                self.port.reader.unpark()
        self.port.publish()
        self.port.close()

    def _read(self) -> bool:
        reader, has_read = self.port.reader, False
        while (payload := reader.next()) is not None:
            has_read = True
            if reader.kind == m.Kind.ASK:
                view = m.AskView(payload)
                self.asked.append(view)
                self._waiting.append(view)
            elif reader.kind == m.Kind.ABORT:
                self._abort(m.ABORT.unpack_from(payload)[0])
            elif reader.kind == m.Kind.MASK and self.script.draw is not None:
                ask_id, index, n_words, n_sure, _ = m.MASK.unpack_from(payload)
                begin = m.MASK.size + 4 * n_sure
                for i, token in enumerate(payload[m.MASK.size : begin].cast("i").tolist()):
                    self._masks[ask_id, index + i] = (1 << token).to_bytes(4 * n_words, "little")
                self._masks[ask_id, index + n_sure] = bytes(payload[begin : begin + 4 * n_words])
            elif reader.kind == m.Kind.QUERY:
                (query,) = m.QUERY.unpack_from(payload)
                self.port.send(m.Kind.STATE, m.State(query, {"slots": {"free": len(self._free)}, "counters": {"steps": self._seq}}).encode())
            payload.release()
        reader.done()
        if has_read:
            with self.changed:
                self.changed.notify_all()
        return has_read

    def _abort(self, ask_id: int) -> None:
        self.aborted.append(ask_id)
        self._waiting = [a for a in self._waiting if a.ask_id != ask_id]
        running = self._running.pop(ask_id, None)
        if running is not None:
            self._free.append(running.slot)
        self.port.send(m.Kind.DONE, m.Done(ask_id, m.Reason.ABORT).encode())

    def _start(self) -> None:
        script = self.script
        while len(self._waiting) > script.max_queue:
            view = self._waiting.pop()
            self._refuse(m.Refused(view.ask_id, m.RefusedCode.QUEUE_FULL, 250, len(self._waiting) + 1, script.max_queue))
        while self._waiting and script.starts and self._free:
            view = self._waiting.pop(0)
            if script.refusal is not None:
                refusal = script.refusal
                self._refuse(m.Refused(view.ask_id, refusal.code, refusal.retry_after_ms, refusal.need, refusal.have, refusal.asked))
                continue
            fields = m.SAMPLING.unpack(view.sampling)
            slot = self._free.pop()
            prompt = list(memoryview(view.prompt).cast("i"))
            stop = frozenset(fields[16 : 16 + fields[15]])
            running = Running(view, slot, script.reply(prompt), stop, fields[12], view.max_tokens or 8192 - len(prompt))
            self._running[view.ask_id] = running
            self.port.send(m.Kind.BIND, m.BIND.pack(view.ask_id, slot, 0))
            cached = script.cached_tokens if view.prompt not in script.cache else len(prompt) - 1
            script.cache.add(view.prompt)
            running.cached_tokens = cached
            running.is_masked = bool(fields[14]) and script.draw is not None
            self.port.send(m.Kind.STARTED, m.Started(view.ask_id, cached, len(prompt), 1000, -1, script.miss, script.known_tokens).encode())

            if view.is_scored:
                self._score(slot, prompt, max(0, fields[12]))

    def _score(self, slot: int, prompt: list[int], n_top: int) -> None:
        """The prompt's tokens but the first, each as likely as its place says."""
        rows = [m.ROW.pack(slot, token, m.ROW_SCORE, i + 1, -0.25 * i, n_top) for i, token in enumerate(prompt) if i]
        tops = [m.TOP.pack((token + k) % 256, -0.25 * i - k) for i, token in enumerate(prompt) if i for k in range(n_top)]
        self._seq += 1
        self.port.send_rows(self._seq, N_SLOTS, memoryview(b"".join(rows)), b"".join(tops))

    def _refuse(self, refused: m.Refused) -> None:
        self.port.send(m.Kind.REFUSED, refused.encode())

    def _step(self) -> bool:
        """One token for everybody who may have one; those whose answer is complete end."""
        if self.port.writer.used_bytes > MAX_RING_BYTES:
            time.sleep(0.0001)
            return True
        rows, tops, ended = [], [], []
        allowed, error = self.script.n_tokens, self.script.error
        for running in self._running.values():
            at = running.n_done
            if at >= allowed:
                continue
            if error:
                ended.append((running, m.Reason.ERROR))
                continue
            if running.is_masked:
                mask = self._masks.pop((running.ask.ask_id, at), None)
                if mask is None or self.script.draw is None:
                    continue
                token = self.script.draw(mask)
            else:
                token = running.tokens[at % len(running.tokens)]
            running.n_done = at + 1
            flags = m.ROW_STOP if token in running.stop else m.ROW_LENGTH if at + 1 >= running.limit else 0
            n_top = max(0, running.n_top)
            rows.append(m.ROW.pack(running.slot, token, flags, at + 1, -0.5, n_top))
            tops += [m.TOP.pack((token + k) % 256, -0.5 - k) for k in range(n_top)]
            if flags:
                ended.append((running, m.Reason.STOP if flags == m.ROW_STOP else m.Reason.LENGTH))
        if rows:
            self._seq += 1
            self.port.send_rows(self._seq, N_SLOTS, memoryview(b"".join(rows)), b"".join(tops))
        for running, reason in ended:
            del self._running[running.ask.ask_id]
            self._free.append(running.slot)
            done = m.Done(running.ask.ask_id, reason, error, running.ask.prompt_tokens, running.cached_tokens, running.n_done)
            self.port.send(m.Kind.DONE, done.encode())
        if ended:
            with self.changed:
                self.changed.notify_all()
        return bool(rows or ended)


def main() -> None:
    """A process that serves one channel with endless tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("channel")
    parser.add_argument("--ids", type=int, nargs=2, default=(40, 90), help="ids that are sent in turn")
    parser.add_argument("--every", type=float, default=0.0, help="milliseconds from step to step, 0: as fast as the front reads")
    arguments = parser.parse_args()
    ids = range(*arguments.ids)
    engine = FakeEngine(Channel.parse(arguments.channel), Script(lambda prompt: ids), False, arguments.every / 1000)
    engine.run()


if __name__ == "__main__":
    sys.exit(main())
