"""The shared memory and file descriptors between one front and the engine.

One anonymous memory file holds both rings, so that nothing outlives the processes; a socket pair tells each side when the other
has died, however it died. Descriptors travel by inheritance (`pass_fds`) and are named by `Channel.text`.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from dataclasses import astuple, dataclass

from .ring import HEADER_BYTES, Reader, Writer

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Channel:
    """File descriptors and sizes of one front's channel. Made by `create`, closed by whoever holds it and no longer needs it."""

    memory_fd: int
    ask_fd: int
    """eventfd that wakes the engine."""
    result_fd: int
    """eventfd that wakes the front."""
    front_life_fd: int
    engine_life_fd: int
    ask_bytes: int
    result_bytes: int

    @classmethod
    def create(cls, ask_bytes: int = 8 << 20, result_bytes: int = 4 << 20) -> Channel:
        """A new channel with rings of these sizes (rounded up to pages). Pages of memory are taken when touched."""
        ask_bytes = -(-ask_bytes // PAGE_BYTES) * PAGE_BYTES
        result_bytes = -(-result_bytes // PAGE_BYTES) * PAGE_BYTES
        memory_fd = os.memfd_create("paddock-ring")
        os.ftruncate(memory_fd, PAGE_BYTES + ask_bytes + result_bytes)
        front, engine = socket.socketpair()
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        return cls(
            memory_fd,
            os.eventfd(0, flags),
            os.eventfd(0, flags),
            front.detach(),
            engine.detach(),
            ask_bytes,
            result_bytes,
        )

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors a child needs (for `pass_fds`); they keep their numbers there."""
        return (self.memory_fd, self.ask_fd, self.result_fd, self.front_life_fd, self.engine_life_fd)

    @property
    def text(self) -> str:
        """The channel as a word for a command line; `parse` reads it."""
        return ",".join(str(n) for n in astuple(self))

    @classmethod
    def parse(cls, text: str) -> Channel:
        """The channel that `text` names."""
        return cls(*(int(word) for word in text.split(",")))

    def close(self) -> None:
        """Closes every descriptor of this process. The peers' copies live on."""
        for fd in self.fds:
            _close(fd)


class End:
    """One side's mapping of a channel: a writer, a reader, and the peer's life.

    `is_front` says which side. The other side's life descriptor is closed here unless `shares_process` (tests, one process).
    """

    __slots__ = ("_fds", "_memory", "_peer_poll", "life_fd", "reader", "writer")

    def __init__(self, channel: Channel, is_front: bool, shares_process: bool = False) -> None:
        memory = mmap.mmap(channel.memory_fd, PAGE_BYTES + channel.ask_bytes + channel.result_bytes)
        self._memory = memory
        view = memoryview(memory)
        asks = (view[:HEADER_BYTES], view[PAGE_BYTES : PAGE_BYTES + channel.ask_bytes], channel.ask_fd)
        results = (view[HEADER_BYTES : 2 * HEADER_BYTES], view[PAGE_BYTES + channel.ask_bytes :], channel.result_fd)
        self.writer = Writer(*(asks if is_front else results))
        self.reader = Reader(*(results if is_front else asks))
        self.life_fd = channel.front_life_fd if is_front else channel.engine_life_fd
        other = channel.engine_life_fd if is_front else channel.front_life_fd
        self._fds = [channel.memory_fd, channel.ask_fd, channel.result_fd, self.life_fd]
        if shares_process:
            self._fds = [self.life_fd]
        else:
            _close(other)
        self._peer_poll = select.poll()
        self._peer_poll.register(self.life_fd, select.POLLIN)

    def peer_is_alive(self) -> bool:
        """False once the process at the other side has ended or closed its end. One system call."""
        return not self._peer_poll.poll(0)

    def close(self) -> None:
        """Unmaps the rings and closes this side's descriptors: the peer sees this as death."""
        self.writer.release()
        self.reader.release()
        try:
            self._memory.close()
        except BufferError:  # a payload that someone still holds keeps the mapping until it goes
            pass
        for fd in self._fds:
            _close(fd)


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass
