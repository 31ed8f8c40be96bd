"""A ring loses, splits and reorders nothing, says when it is full, and wakes a parked reader."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterator

import pytest
from paddock_runner.errors import TooLarge
from paddock_runner.wire.ring import HEADER_BYTES, PARKED, Reader, Writer


@pytest.fixture
def ends() -> Iterator[tuple[Writer, Reader, bytearray]]:
    header, data = bytearray(HEADER_BYTES), bytearray(256)
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield Writer(memoryview(header), memoryview(data), fd), Reader(memoryview(header), memoryview(data), fd), header
    os.close(fd)


def read(reader: Reader) -> list[tuple[int, bytes]]:
    records = []
    while (payload := reader.next()) is not None:
        records.append((reader.kind, bytes(payload)))
    reader.done()
    return records


def test_records_arrive_in_order_only_after_publish(ends: tuple[Writer, Reader, bytearray]) -> None:
    writer, reader, _ = ends
    assert writer.push(1, b"a" * 8) and writer.push(2, b"")
    assert reader.is_empty and read(reader) == []
    writer.publish()
    assert read(reader) == [(1, b"a" * 8), (2, b"")]
    assert writer.used_bytes == 0


def test_a_full_ring_says_so_and_takes_more_after_reading(ends: tuple[Writer, Reader, bytearray]) -> None:
    writer, reader, _ = ends
    n = 0
    while writer.push(3, bytes([n]) * 24):
        n += 1
    assert n == 8
    writer.publish()
    assert not writer.push(3, b"x" * 24)
    assert [p[0] for _, p in read(reader)] == list(range(8))
    assert writer.push(3, b"x" * 24)


def test_a_record_larger_than_half_the_ring_is_refused_with_both_sizes(ends: tuple[Writer, Reader, bytearray]) -> None:
    writer, _, _ = ends
    assert writer.push(1, bytes(writer.max_payload_bytes))
    with pytest.raises(TooLarge) as caught:
        writer.push(1, bytes(writer.max_payload_bytes + 8))
    assert caught.value.facts == {"size_bytes": 136, "max_bytes": 128}


def test_random_traffic_arrives_as_a_queue_would_deliver_it(ends: tuple[Writer, Reader, bytearray]) -> None:
    writer, reader, _ = ends
    random.seed(1)
    model: deque[tuple[int, bytes]] = deque()
    for i in range(5000):
        if random.random() < 0.6:
            record = (1 + i % 9, random.randbytes(8 * random.randrange(0, 15)))
            if writer.push(*record):
                model.append(record)
            else:
                writer.publish()
                assert writer.used_bytes > 0
        else:
            writer.publish()
            for record in read(reader):
                assert record == model.popleft()
    writer.publish()
    assert read(reader) == list(model)


def test_only_a_parked_reader_is_woken_and_only_once(ends: tuple[Writer, Reader, bytearray]) -> None:
    writer, reader, _ = ends
    writer.push(1, b"")
    writer.publish()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(reader.event_fd)
    assert not reader.park()
    read(reader)
    assert reader.park()
    for _ in range(2):
        writer.push(1, b"")
        writer.publish()
    assert os.eventfd_read(reader.event_fd) == 1
    reader.unpark()
    assert memoryview(ends[2]).cast("Q")[PARKED] == 0


def test_the_head_moves_without_wake_when_nothing_was_pushed(ends: tuple[Writer, Reader, bytearray]) -> None:
    writer, reader, _ = ends
    assert reader.park()
    writer.publish()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(reader.event_fd)
