"""Vectors of a model without a head, from the device to the fronts that asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..wire.messages import Kind, Vector
from ..wire.port import EnginePort
from .request import Phase, Request

ReadVectors = Callable[[int], bytes]
"""The f32 vectors of the n sequences that the last step ended, one after the other."""


def send_vectors(read: ReadVectors, ended: Sequence[Request], ports: Sequence[EnginePort]) -> None:
    """Sends what a step made of the sequences that it ended: their rows are the sampled ones, in this order."""
    raw = read(len(ended))
    size = len(raw) // len(ended)
    for i, request in enumerate(ended):
        if request.phase != Phase.ENDED:
            ports[request.port].send(Kind.VECTOR, Vector(request.ask_id, raw[i * size : (i + 1) * size]).encode())
