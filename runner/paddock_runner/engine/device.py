"""What the engine needs of a device: a few attributes and two calls. pack/device.py has them, tests bring their own."""

from __future__ import annotations

from typing import Protocol


class DeviceFacts(Protocol):
    """The facts that the engine reads."""

    @property
    def run_ahead(self) -> int:
        """Steps that may be in flight before the first is read; 0: `step` returns when the step is done."""
        ...

    @property
    def has_drafts(self) -> bool:
        """Rows may draw after each of their tokens (PK_ROW_DRAFT)."""
        ...


class PartDevice(Protocol):
    """A part of a device, whose steps run beside the device's own. They read prompts and draw nothing."""

    done: memoryview
    """u64 [1]: number of its last finished step."""

    @property
    def facts(self) -> DeviceFacts:
        """run_ahead: how many steps may be in flight beside the first."""
        ...

    def step(self, input_address: int) -> None:
        """Enqueues one step; the input has been read when this returns. Raises: PackError."""

    def wait(self, seq: int, timeout_us: int) -> bool:
        """Waits until step `seq` is done; False when the time is up. Raises: PackError, also of a step that failed."""
        ...


class StepDevice(Protocol):
    """A device with a loaded program. Steps run in the order in which they were given."""

    done: memoryview
    """u64 [1]: number of the last finished step."""
    results: memoryview
    """bytes of pk_result [n_results, max_step_rows]: the block of a step is seq % n_results."""
    top: memoryview
    """bytes of pk_top [n_results, max_step_rows, max_top]."""
    allocated: dict[str, int]
    """Bytes that are held, by what they are for; named as the plan's groups are."""
    kv_page_bytes: int

    @property
    def facts(self) -> DeviceFacts:
        """What the pack says of itself."""
        ...

    @property
    def aside(self) -> PartDevice | None:
        """The part of it that reads long prompts beside its steps."""
        ...

    def step(self, input_address: int) -> None:
        """Runs or enqueues one step; the input has been read when this returns. Raises: PackError."""

    def give_way(self, is_on: bool) -> None:
        """From the next step on steps run on what a part leaves, or on the whole device again. Raises: PackError."""

    def finish(self, input_address: int) -> None:
        """Runs or enqueues the second half of a step with held rows. Raises: PackError."""

    def wait(self, seq: int, timeout_us: int) -> bool:
        """Waits until step `seq` is done; False when the time is up. Raises: PackError."""
        ...

    def times(self, n: int) -> list[tuple[int, int]]:
        """(begin, end) of at most n last finished steps, in nanoseconds of the device's clock, oldest first."""
        ...

    def save_state(self, slot: int, place: int) -> None:
        """Copies a slot's recurrent states to a place of the snapshots, in order with the steps. Raises: PackError."""

    def load_state(self, slot: int, place: int) -> None:
        """Copies them back, to whatever slot. Raises: PackError."""

    def text_token(self, slot: int, position: int) -> int:
        """What stands in a slot's text when all that was given has run. Raises: PackError."""
        ...

    def grow_pages(self, n_pages: int) -> int:
        """Puts memory behind at least the first n_pages pages, as far as there is some; returns how many have it now. Raises: PackError."""
        ...

    def shrink_pages(self, n_pages: int) -> int:
        """Takes memory from behind pages after the first n_pages; returns how many have it now. Raises: PackError."""
        ...

    def copy_page(self, source: int, to: int) -> None:
        """Copies a page to another, in order with the steps. Raises: PackError."""
