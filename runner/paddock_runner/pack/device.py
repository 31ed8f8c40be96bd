"""Device: one open context of a pack: memory, the step state, a loaded program, and steps. Thin and complete."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PackError
from . import abi
from .fetched import Cold
from .library import Pack
from .program import Pages, Program
from .tensor import Tensor

ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Facts:
    """What an open context says of itself. run_ahead: steps that may be in flight before the first is read."""

    arch: str
    name: str
    build: str
    is_host: bool
    run_ahead: int
    activation: int
    n_threads: int
    n_processors: int
    memory_bytes: int
    free_bytes: int
    granule_bytes: int
    is_validated: bool
    has_drafts: bool


class Device:
    """An open context. Everything allocated through it is freed by close(). max_isa, is_invariant: as in pk_open_config. ctx: one that is open."""

    def __init__(
        self, pack: Pack, ordinal: int = 0, n_threads: int = 0, max_isa: int = 0, is_invariant: bool = False, ctx: ctypes.c_void_p | None = None
    ) -> None:
        self.pack = pack
        self._ctx = ctx or ctypes.c_void_p()
        config = abi.pk_open_config(ordinal, n_threads, max_isa, int(is_invariant))
        if ctx is None:
            pack.call("pk_open", ctypes.byref(config), ctypes.byref(self._ctx))
        self._n_threads, self.is_invariant = n_threads, is_invariant
        self._owned: list[tuple[int, int]] = []
        self._reserved: list[int] = []
        self._program: Any = None
        self.state: Any = abi.pk_state()
        self._step = pack.function("pk_step")
        self._finish = pack.function("pk_finish")
        self._wait = pack.function("pk_wait")
        self._copy = pack.function("pk_copy")
        self._copied = pack.function("pk_copied")
        self._attach = pack.function("pk_attach")
        self._n_copies = (ctypes.c_uint64 * 2)()
        self._n_copies_at = ctypes.addressof(self._n_copies)
        self._snapshots = self._host_pages = self._host_states = self.n_host_pages = 0
        self.kv_format = ""
        """Of pages: what their bytes mean, with whatever they are scaled by."""
        self.facts = self._read_facts()
        self.allocated: dict[str, int] = {}
        self.kv_bytes = self.kv_page_bytes = 0
        self.kv_address = self._attached_bytes = 0
        self.aside: Device | None = None
        """The part of it that reads long prompts beside its steps."""
        self._n_aside = 0
        self.windows: Pages | None = None
        """Pages of layers with a window, where these have their own."""
        self._host_windows = 0
        self.vectors: Tensor | None = None
        """Where a program without a head leaves its rows."""

    def _read_facts(self) -> Facts:
        raw = abi.pk_facts()
        self.pack.call("pk_get_facts", self._ctx, ctypes.byref(raw))
        text = {k: getattr(raw, k).decode(errors="replace") for k in ("arch", "name", "build")}
        ints = {k: getattr(raw, k) for k in ("run_ahead", "activation", "n_threads", "n_processors", "memory_bytes", "free_bytes", "granule_bytes")}
        return Facts(**text, **ints, is_host=bool(raw.is_host), is_validated=bool(raw.is_validated), has_drafts=bool(raw.has_drafts))

    def free_bytes(self) -> int:
        """Memory of the device that nobody has taken, now."""
        raw = abi.pk_facts()
        self.pack.call("pk_get_facts", self._ctx, ctypes.byref(raw))
        return int(raw.free_bytes)

    # ---- memory ----

    def alloc(self, n_bytes: int, name: str, is_pinned: bool = False) -> int:
        """Address of n_bytes of zeroed memory, counted under `name`. Raises: PackError when there is not enough."""
        memory = abi.PK_MEMORY_PINNED if is_pinned else abi.PK_MEMORY_DEVICE
        address = ctypes.c_uint64()
        self.pack.call("pk_alloc", self._ctx, memory, n_bytes, ctypes.byref(address))
        self._owned.append((memory, address.value))
        self.allocated[name] = self.allocated.get(name, 0) + n_bytes
        return address.value

    def free(self, address: int, name: str, is_pinned: bool = False) -> None:
        """Gives back everything that `alloc` counted under `name`, one address of it."""
        memory = abi.PK_MEMORY_PINNED if is_pinned else abi.PK_MEMORY_DEVICE
        self._owned.remove((memory, address))
        self.allocated.pop(name, None)
        self.pack.call("pk_free", self._ctx, memory, address)

    def host_bytes(self, address: int, n_bytes: int) -> memoryview:
        """Pinned memory as Python sees it."""
        return _host_view(address, n_bytes)

    def write(self, address: int, data: bytes | memoryview | ctypes.Array[Any], n_bytes: int | None = None) -> None:
        """Copies host bytes to the device."""
        if isinstance(data, memoryview) and data.readonly:
            data = bytes(data)
        if isinstance(data, bytes):
            self.pack.call("pk_write", self._ctx, address, data, len(data) if n_bytes is None else n_bytes)
        else:
            view = memoryview(data).cast("B")
            raw = (ctypes.c_char * len(view)).from_buffer(view)
            self.pack.call("pk_write", self._ctx, address, ctypes.addressof(raw), len(view) if n_bytes is None else n_bytes)

    def read(self, address: int, n_bytes: int) -> bytes:
        """Copies device bytes to the host."""
        raw = ctypes.create_string_buffer(n_bytes)
        self.pack.call("pk_read", self._ctx, ctypes.addressof(raw), address, n_bytes)
        return raw.raw

    def fill(self, address: int, byte: int, n_bytes: int) -> None:
        """Sets n_bytes to one value."""
        self.pack.call("pk_fill", self._ctx, address, byte, n_bytes)

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """Copies between device memory and device or pinned memory, in order with the steps. Raises: PackError."""
        status = self._copy(self._ctx, to, source, n_bytes)
        if status:
            raise self.pack.failure("pk_copy", status)

    def copied(self) -> tuple[int, int]:
        """Copies between device and pinned memory given so far, and how many of them are made with all before them. Raises: PackError."""
        status = self._copied(self._ctx, self._n_copies_at, self._n_copies_at + 8)
        if status:
            raise self.pack.failure("pk_copied", status)
        given, made = self._n_copies
        return given, made

    def open_cold(self, takes_all: bool) -> None:
        """Threads of the host compute experts that the device lacks, in programs that are loaded from here on. Raises: UnsupportedError, PackError."""
        self.pack.call("pk_cold_open", self._ctx, ctypes.byref(abi.pk_cold_config(self._n_threads, int(takes_all))))

    def cold(self) -> Cold:
        """What is known of those threads."""
        raw = abi.pk_cold()
        self.pack.call("pk_cold_facts", self._ctx, ctypes.byref(raw))
        return Cold(raw.n_threads, raw.n_layers, raw.n_computed, raw.copy_us, raw.expert_us, raw.row_us, raw.ask_us, raw.isa.decode())

    def alloc_snapshots(self, n_places: int) -> None:
        """Memory for n_places copies of a slot's recurrent states."""
        if n_places:
            self._snapshots = self.alloc(n_places * self.state.recurrent_stride, "snapshots")

    def save_state(self, slot: int, place: int) -> None:
        """Copies a slot's recurrent states to a place of the snapshots, in order with the steps. Raises: PackError."""
        size = self.state.recurrent_stride
        self.copy(self._snapshots + place * size, self.state.recurrent + slot * size, size)

    def load_state(self, slot: int, place: int) -> None:
        """Copies them back, to whatever slot. Raises: PackError."""
        size = self.state.recurrent_stride
        self.copy(self.state.recurrent + slot * size, self._snapshots + place * size, size)

    # ---- pages in host memory ----

    def alloc_host_pages(self, n: int) -> None:
        """Pinned memory for n pages."""
        self.n_host_pages = n
        if n:
            self._host_pages = self.alloc(n * self.kv_page_bytes, "page cache", is_pinned=True)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.kv_page_bytes

    @property
    def page_facts(self) -> tuple[str, ...]:
        """What a page's bytes depend on besides model and sizes: the pack, its build and what it runs on."""
        return abi.DIGEST, self.facts.arch, self.facts.build, self.kv_format

    def page_out(self, page: int, place: int) -> None:
        """Copies a page to a place in host memory, in order with the steps. Raises: PackError."""
        size = self.kv_page_bytes
        self.copy(self._host_pages + place * size, self.kv_address + page * size, size)

    def page_in(self, place: int, page: int) -> None:
        """Copies it back. Raises: PackError."""
        size = self.kv_page_bytes
        self.copy(self.kv_address + page * size, self._host_pages + place * size, size)

    def host_page(self, place: int) -> memoryview:
        """The bytes of a place in host memory."""
        return _host_view(self._host_pages + place * self.kv_page_bytes, self.kv_page_bytes)

    def alloc_host_states(self, n: int) -> None:
        """Pinned memory for n copies of a slot's recurrent states."""
        self._host_states = self.alloc(n * self.state_bytes, "state cache", is_pinned=True)

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot's recurrent states."""
        return int(self.state.recurrent_stride)

    def state_out(self, place: int, host_place: int) -> None:
        """Copies a snapshot to a place in host memory, in order with the steps. Raises: PackError."""
        size = self.state_bytes
        self.copy(self._host_states + host_place * size, self._snapshots + place * size, size)

    def state_in(self, host_place: int, slot: int) -> None:
        """Copies it to a slot. Raises: PackError."""
        size = self.state_bytes
        self.copy(self.state.recurrent + slot * size, self._host_states + host_place * size, size)

    def host_state(self, host_place: int) -> memoryview:
        """The bytes of a place in host memory."""
        return _host_view(self._host_states + host_place * self.state_bytes, self.state_bytes)

    # ---- pages of layers with a window ----

    def alloc_host_windows(self, n: int) -> None:
        """Pinned memory for n such pages."""
        self._host_windows = self.alloc(n * self.window_bytes, "window cache", is_pinned=True)

    @property
    def window_bytes(self) -> int:
        """Bytes of such a page; 0: there are none."""
        return self.windows.kv_page_stride if self.windows is not None else 0

    def window_out(self, page: int, place: int) -> None:
        """Copies such a page to a place in host memory, in order with the steps. Raises: PackError."""
        self.copy(self._host_windows + place * self.window_bytes, self._window_at(page), self.window_bytes)

    def window_in(self, place: int, page: int) -> None:
        """Copies it back. Raises: PackError."""
        self.copy(self._window_at(page), self._host_windows + place * self.window_bytes, self.window_bytes)

    def host_window(self, place: int) -> memoryview:
        """The bytes of a place in host memory."""
        return _host_view(self._host_windows + place * self.window_bytes, self.window_bytes)

    def _window_at(self, page: int) -> int:
        assert self.windows is not None
        return self.windows.kv + page * self.windows.kv_page_stride

    def host_view(self, address: int, n_bytes: int) -> memoryview:
        """Bytes of pinned memory."""
        return _host_view(address, n_bytes)

    def settle(self) -> None:
        """Waits until every copy and step that was given is done. Raises: PackError."""
        self.read(self.state.length, 4)

    def reserve_kv(self, n_pages: int, page_bytes: int) -> int:
        """Reserves the address range of the page pool; no memory yet. Returns its address."""
        granule = max(self.facts.granule_bytes, 1)
        self.kv_page_bytes = page_bytes
        self.kv_bytes = -(-n_pages * page_bytes // granule) * granule
        address = ctypes.c_uint64()
        self.pack.call("pk_reserve", self._ctx, self.kv_bytes, ctypes.byref(address))
        self._reserved.append(address.value)
        self.kv_address = address.value
        return address.value

    def grow_pages(self, n_pages: int) -> int:
        """Puts memory behind at least the first n_pages pages, as far as the device has it. Returns how many pages have memory now. Raises: PackError."""
        granule = max(self.facts.granule_bytes, 1)
        wanted = min(-(-n_pages * self.kv_page_bytes // granule) * granule, self.kv_bytes)
        size = wanted - self._attached_bytes
        while size > 0:
            status = self._attach(self._ctx, self.kv_address + self._attached_bytes, size)
            if status == abi.PK_OOM:  # and nothing was attached
                if size <= granule:
                    break
                size = size // granule // 2 * granule
                continue
            if status:
                raise self.pack.failure("pk_attach", status)
            self._attached_bytes += size
            self.allocated["kv"] = self._attached_bytes
            size = min(size, wanted - self._attached_bytes)
        return self._attached_bytes // self.kv_page_bytes

    def need_pages(self, n_pages: int) -> None:
        """Puts memory behind the first n_pages pages. Raises: PackError when the device has too little."""
        n = self.grow_pages(n_pages)
        if self._attached_bytes < min(n_pages * self.kv_page_bytes, self.kv_bytes):
            raise PackError(f"{n_pages} pages of {self.kv_page_bytes} bytes are wanted, the device has memory for {n}", f"kernel pack {self.pack.path.name}: other programs have taken it")

    def shrink_pages(self, n_pages: int) -> int:
        """Takes the memory from behind pages after the first n_pages, in whole granules. Returns how many pages have memory now."""
        granule = max(self.facts.granule_bytes, 1)
        wanted = -(-n_pages * self.kv_page_bytes // granule) * granule
        if wanted < self._attached_bytes:
            self.pack.call("pk_detach", self._ctx, self.kv_address + wanted, self._attached_bytes - wanted)
            self._attached_bytes = self.allocated["kv"] = wanted
        return self._attached_bytes // self.kv_page_bytes

    def text_token(self, slot: int, position: int) -> int:
        """What stands in a slot's text when all that was given has run. Raises: PackError."""
        address = self.state.tokens + 4 * (slot * (self.state.max_ctx_tokens + 1) + position)
        return int.from_bytes(self.read(address, 4), "little", signed=True)

    def copy_page(self, source: int, to: int) -> None:
        """Copies a page to another, in order with the steps. Raises: PackError."""
        size = self.kv_page_bytes
        self.copy(self.kv_address + to * size, self.kv_address + source * size, size)

    # ---- weights ----

    def packed_bytes(self, source: abi.pk_source) -> int:
        """Bytes of a weight after repacking. Raises: UnsupportedError for a format without kernels."""
        n_bytes = ctypes.c_int64()
        self.pack.call("pk_packed_bytes", self._ctx, ctypes.byref(source), ctypes.byref(n_bytes))
        return n_bytes.value

    def repack(self, source: abi.pk_source, address: int, n_bytes: int) -> None:
        """Converts a weight from checkpoint layout to kernel layout at `address`."""
        self.pack.call("pk_repack", self._ctx, ctypes.byref(source), address, n_bytes)

    # ---- state and program ----

    def set_state(
        self, fields: Mapping[str, int], device_arrays: Mapping[str, int], pinned_arrays: Mapping[str, int], whole: Device | None = None
    ) -> None:
        """Allocates the arrays of pk_state (name -> bytes) and fills in its scalar fields; `kv` must have been reserved. whole: whose part this is, and whose arrays it shares but for these."""
        owner = whole or self
        state = abi.pk_state() if whole is None else abi.pk_state.from_buffer_copy(whole.state)
        for name, value in fields.items():
            setattr(state, name, value)
        state.kv = owner.kv_address
        for arrays, group in ((device_arrays, "state"), (pinned_arrays, "pinned")):
            base = owner.alloc(sum(aligned(n) for n in arrays.values()), group, group == "pinned")
            for name, n_bytes in arrays.items():
                setattr(state, name, base)
                base += aligned(n_bytes)
        self.state = state
        self.results = _host_view(state.results, pinned_arrays["results"])
        self.top = _host_view(state.top, pinned_arrays["top"])
        self.done = _host_view(state.done, 8).cast("Q")

    def workspace_bytes(self, program: Program) -> int:
        """Scratch bytes that the pack wants for this program."""
        records, n_bytes = program.bytes(), ctypes.c_int64()
        self.pack.call("pk_workspace_bytes", self._ctx, ctypes.byref(self.state), records, len(records), ctypes.byref(n_bytes))
        return n_bytes.value

    def load(self, program: Program, buckets: Sequence[int], workspace: tuple[int, int]) -> None:
        """Checks and prepares the program. workspace: address and bytes. Raises: UnsupportedError, PackError naming the op at fault."""
        records = program.bytes()
        self.state.workspace, self.state.workspace_bytes = workspace
        array = (ctypes.c_int32 * max(1, len(buckets)))(*buckets)
        handle = ctypes.c_void_p()
        self.pack.call(
            "pk_load", self._ctx, ctypes.byref(self.state), records, len(records), ctypes.addressof(array), len(buckets), ctypes.byref(handle)
        )
        self.unload()
        self._program = handle
        self.n_records = len(program.records)

    def unload(self) -> None:
        """Drops the loaded program, and the part's."""
        if self.aside is not None:
            self.aside.unload()
        if self._program is not None:
            self.pack.function("pk_unload")(self._program)
            self._program = None

    def step(self, input_address: int) -> None:
        """Runs (or enqueues) one step. Raises: PackError."""
        status = self._step(self._program, input_address)
        if status:
            raise self.pack.failure("pk_step", status)

    def part(self, n_processors: int) -> Device:
        """Parts it: so many of its processors, as nearly as can be, run steps of their own from now on. Closed with it; the same part when it is asked again. Raises: UnsupportedError, PackError."""
        if self.aside is not None and n_processors == self._n_aside:
            return self.aside
        ctx = ctypes.c_void_p()
        self.pack.call("pk_part", self._ctx, n_processors, ctypes.byref(ctx))
        self.aside, self._n_aside = Device(self.pack, ctx=ctx), n_processors
        return self.aside

    def give_way(self, is_on: bool) -> None:
        """From the next step on steps run on what the part leaves, or on all processors again. Raises: PackError."""
        self.pack.call("pk_give_way", self._ctx, int(is_on))

    def finish(self, input_address: int) -> None:
        """Runs (or enqueues) the second half of a step with held rows. Raises: PackError."""
        status = self._finish(self._program, input_address)
        if status:
            raise self.pack.failure("pk_finish", status)

    def wait(self, seq: int, timeout_us: int) -> bool:
        """Waits until step `seq` is done; False when the time is up. Raises: PackError."""
        status = self._wait(self._program, seq, timeout_us)
        if status == abi.PK_TIMEOUT:
            return False
        if status:
            raise self.pack.failure("pk_wait", status)
        return True

    def times(self, n: int = abi.PK_TIMES) -> list[tuple[int, int]]:
        """When the last finished steps began and ended, in nanoseconds of the device's clock, oldest first."""
        raw, count = (ctypes.c_uint64 * (2 * max(1, n)))(), ctypes.c_int32()
        self.pack.call("pk_times", self._program, ctypes.addressof(raw), n, ctypes.byref(count))
        return [(raw[2 * i], raw[2 * i + 1]) for i in range(count.value)]

    def read_vectors(self, n: int) -> bytes:
        """The first n rows that the last step left, f32. Raises: PackError when the program gives none."""
        if self.vectors is None:
            raise PackError("the program gives no vectors")
        return self.read(self.vectors.data, n * self.vectors.row_bytes)

    def run(self, n_tokens: int, n_samples: int, n_repeats: int = 1, is_timed: bool = False) -> list[float]:
        """Runs the records once as they are; timed: median microseconds per record."""
        us = (ctypes.c_float * self.n_records)()
        self.pack.call("pk_run", self._program, n_tokens, n_samples, n_repeats, ctypes.addressof(us) if is_timed else None)
        return list(us)

    def counters(self) -> dict[str, int]:
        """The pack's own counters: allocations, bytes, steps."""
        raw = abi.pk_counters()
        self.pack.call("pk_get_counters", self._ctx, ctypes.byref(raw))
        return {field[0]: getattr(raw, field[0]) for field in raw._fields_}

    def close(self) -> None:
        """Frees everything. Safe to call twice."""
        if not self._ctx:
            return
        if self.aside is not None:
            self.aside.close()
        self.unload()
        for memory, address in self._owned:
            self.pack.function("pk_free")(self._ctx, memory, address)
        for address in self._reserved:
            self.pack.function("pk_release")(self._ctx, address)
        self._owned.clear()
        self._reserved.clear()
        self.pack.function("pk_close")(self._ctx)
        self._ctx = ctypes.c_void_p()


def count_devices(pack: Pack) -> int:
    """Devices this pack can see. Raises: PackError with the driver's reason when it cannot ask."""
    n = pack.function("pk_n_devices")()
    if n < 0:
        raise PackError(pack.last_error() or "the driver does not answer", "run paddock doctor")
    return int(n)


def f32_tensor(device: Device, values: Sequence[float], name: str) -> Tensor:
    """A [1, n] f32 vector in device memory."""
    data = (ctypes.c_float * len(values))(*values)
    address = device.alloc(4 * len(values), name)
    device.write(address, bytes(data))
    return Tensor(address, 1, len(values), abi.PK_F32)


def aligned(n_bytes: int) -> int:
    """Rounded up to where the next array may begin."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _host_view(address: int, n_bytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * n_bytes).from_address(address)).cast("B")
