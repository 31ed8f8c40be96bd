"""Recurrent states of running requests: loaded at a start, saved on the way, so that the prefix cache works for recurrent layers too.

Copies are made by the device in order with the steps, so a state saved after a step was given is the state after that step.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..cache.ledger import Ledger
from .device import StepDevice
from .request import Request
from .scheduler import Scheduler


class StateKeeper:
    """What the loop does about states; nothing for models without recurrent layers."""

    __slots__ = ("_device", "_ledger", "_page_tokens", "n_loaded", "n_saved")

    def __init__(self, ledger: Ledger, device: StepDevice) -> None:
        self._ledger = ledger
        self._device = device
        self._page_tokens = ledger.page_tokens
        self.n_loaded = self.n_saved = 0

    def start(self, request: Request) -> None:
        """A request has got its slot: its states become those of its cached prefix."""
        if self._ledger.states is not None and request.done_tokens:
            assert request.holding is not None
            if not self._ledger.bring_state(request.holding, request.slot):
                self._device.load_state(request.slot, request.holding.state)
            self.n_loaded += 1

    def save_planned(self, scheduler: Scheduler) -> None:
        """Saves what the scheduler wanted after the step that was just given; from now on others can start from it."""
        states = self._ledger.states
        assert states is not None
        for request, node, place in scheduler.saves:
            self._device.save_state(request.slot, place)
            states.attach(node, place)
        self.n_saved += len(scheduler.saves)
        scheduler.saves.clear()

    def keep(self, request: Request, n_tokens: int) -> None:
        """A decoding request stands at a page's border, n_tokens from its start: saves its states for whoever goes on from its answer.

        The one before is kept while there is room for both, because the request may have ended before this border, in a step that has
        not been read. Running requests hold half of the places at most: the others are for what is known to be shared.
        """
        states, kept = self._ledger.states, request.kept
        if states is None or n_tokens % self._page_tokens or (kept and kept[-1][0] == n_tokens):
            return
        while len(kept) > 1:
            states.give(kept.pop(0)[1])
        may_take = 2 * (states.n_places - states.n_free - states.n_kept) < states.n_places
        if kept:
            place = states.take() if states.n_free or may_take else kept.pop()[1]
        else:
            place = states.take() if may_take else -1
        if place >= 0:
            self._device.save_state(request.slot, place)
            kept.append((n_tokens, place))
            self.n_saved += 1

    def let_go(self, request: Request, n_tokens: int) -> list[tuple[int, int]]:
        """The states, as (pages, place), that a request leaves behind which has computed n_tokens; the others are free again.

        No step in flight has its slot, which still holds the states after n_tokens.
        """
        if n_tokens > 0 and request.slot >= 0:
            self.keep(request, n_tokens)
        kept, request.kept = request.kept, []
        good = [(at // self._page_tokens, place) for at, place in kept if at <= n_tokens]
        for at, place in kept:
            if at > n_tokens:
                assert self._ledger.states is not None
                self._ledger.states.give(place)
        return good

    def check(self, requests: Iterable[Request]) -> None:
        """No place is lost or has two owners. Raises: PageFault."""
        if self._ledger.states is not None:
            self._ledger.states.check(place for request in requests for _, place in request.kept)
