"""The pack as a library: opening, levels, memory, and programs that are refused when they are loaded, in one sentence."""

from __future__ import annotations

import ctypes
import os
import subprocess

import numpy as np
import pytest
from conftest import pack_path
from harness import Bench
from paddock_runner.errors import PackError, UnsupportedError
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device, count_devices
from paddock_runner.pack.program import Heads, Program
from paddock_runner.pack.tensor import S, T, Tensor

F32 = abi.PK_F32
MIB = 1 << 20


HOST = pytest.mark.usefixtures("host_pack")
"""What is said of the CPU pack alone: host memory, levels, threads, its own sentences."""


@pytest.fixture
def host_pack(pack):
    if pack.description["pack"] != "cpu":
        pytest.skip("said of the CPU pack")


@pytest.fixture
def device(pack):
    d = Device(pack, 0, 2)
    yield d
    d.close()


def status_and_sentence(pack, name, *arguments):
    return pack.function(name)(*arguments), pack.last_error()


@HOST
def test_description_lists_what_the_pack_does(pack):
    d = pack.description
    assert d["pack"] == "cpu" and len(d["archs"]) == 3 and {"f32", "f16", "bf16"} <= set(d["formats"])
    ops = {name[len("PK_OP_") :].lower() for name in vars(abi) if name.startswith("PK_OP_")}
    assert set(d["ops"]) == ops


@HOST
def test_facts_are_those_of_a_host_pack(device, pack):
    f = device.facts
    assert f.is_host and f.run_ahead == 0 and f.activation == F32 and f.n_threads == 2 and f.is_validated
    assert f.arch in pack.description["archs"] and 0 < f.free_bytes <= f.memory_bytes and f.name and abi.DIGEST in f.build
    assert count_devices(pack) == 1


@HOST
def test_threads_default_to_the_affinity_mask(pack):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        d = Device(pack)
        assert d.facts.n_threads == 1
        d.close()
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("fields", "sentence"), [((1, 0, 0, 0), "device 0 only, not 1"), ((0, -1, 0, 0), "n_threads is -1"), ((0, 0, 4, 0), "max_isa is 4"), ((0, 0, 0, 2), "is_invariant is 2")])
@HOST
def test_open_refuses_what_does_not_exist(pack, fields, sentence):
    if fields[0] and pack.description["pack"] != "cpu":
        fields, sentence = (99, *fields[1:]), "device 99 of"
    out = ctypes.c_void_p(7)
    status, said = status_and_sentence(pack, "pk_open", ctypes.byref(abi.pk_open_config(*fields)), ctypes.byref(out))
    assert status == abi.PK_BAD_ARG and sentence in said and not out.value


@HOST
def test_levels_are_capped_by_max_isa(pack):
    archs = []
    for level in (1, 2, 3, 0):
        d = Device(pack, 0, 1, level)
        archs.append(d.facts.arch)
        d.close()
    assert archs[0] == "cpu:avx2" and archs[2] == archs[3] and archs[1] in pack.description["archs"]


def test_objects_of_a_level_leak_no_code_into_others():
    """Linkers keep one copy of an inline function: were it the AVX-512 one, an AVX2 machine would die of it."""
    path = pack_path()
    objects = [o for o in path.parent.glob("CMakeFiles/paddock_cpu.dir/**/*.o") if any(x in o.name for x in ("_avx2.", "_avx512.", "_amx."))]
    if not objects:
        pytest.skip("no object files beside the pack")
    for o in objects:
        listing = subprocess.run(["nm", "-C", str(o)], capture_output=True, text=True, check=True).stdout
        assert not [line for line in listing.splitlines() if line[17:18] in "VWu"], o.name


@HOST
def test_only_the_abi_is_exported():
    listing = subprocess.run(["nm", "-D", "--defined-only", str(pack_path())], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in listing.splitlines()} == set(abi.PROTOTYPES)


@HOST
def test_pack_needs_nothing_but_the_c_library():
    listing = subprocess.run(["readelf", "-d", str(pack_path())], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].split("]")[0].split(".")[0] for line in listing.splitlines() if "NEEDED" in line}
    assert needed <= {"libc", "libm", "libpthread", "ld-linux-x86-64"}


# ---- memory ----


@pytest.mark.parametrize("n_bytes", [1, 63, 4096, MIB - 1, MIB, 5 * MIB + 12345])
def test_allocated_memory_is_zeroed_aligned_and_writable(device, n_bytes):
    for is_pinned in (False, True):
        address = device.alloc(n_bytes, "x", is_pinned)
        assert address % 64 == 0 and not any(device.read(address, n_bytes))
        device.fill(address, 0xAB, n_bytes)
        device.write(address, b"paddock"[:n_bytes])
        assert device.read(address, n_bytes) == (b"paddock" + b"\xab" * n_bytes)[:n_bytes].ljust(n_bytes, b"\xab")


@HOST
def test_more_memory_than_there_is_is_refused_with_the_numbers(device):
    with pytest.raises(PackError, match=rf"{1 << 50} bytes were asked for, \d+ of \d+ are free"):
        device.alloc(1 << 50, "x")


@HOST
def test_freeing_twice_is_refused(device, pack):
    address = ctypes.c_uint64()
    pack.call("pk_alloc", device._ctx, 0, 100, ctypes.byref(address))
    pack.call("pk_free", device._ctx, 0, address.value)
    status, said = status_and_sentence(pack, "pk_free", device._ctx, 0, address.value)
    assert status == abi.PK_BAD_ARG and "nothing was allocated" in said


@HOST
def test_reserved_range_takes_memory_piece_by_piece_and_gives_it_back(device, pack):
    granule = device.facts.granule_bytes
    at = ctypes.c_uint64()
    pack.call("pk_reserve", device._ctx, 8 * granule, ctypes.byref(at))
    base = at.value
    pack.call("pk_attach", device._ctx, base, 2 * granule)
    pack.call("pk_attach", device._ctx, base + 2 * granule, granule)
    device.fill(base, 1, 3 * granule)
    pack.call("pk_detach", device._ctx, base + granule, granule)
    pack.call("pk_attach", device._ctx, base + granule, granule)
    assert device.read(base + granule - 1, 2) == b"\x01\x00" and device.read(base + 2 * granule, 1) == b"\x01"
    for address, n, sentence in ((base + 5, granule, "multiples"), (base + 7 * granule, 2 * granule, "leave the reserved range"), (4096, granule, "no reserved range")):
        status, said = status_and_sentence(pack, "pk_attach", device._ctx, address, n)
        assert status == abi.PK_BAD_ARG and sentence in said
    pack.call("pk_release", device._ctx, base)


def test_attaching_that_fails_leaves_nothing_attached(device, pack):
    if device.facts.is_host:
        pytest.skip("memory is attached to the CPU pack's ranges as often as one likes")
    granule = device.facts.granule_bytes
    at = ctypes.c_uint64()
    pack.call("pk_reserve", device._ctx, 8 * granule, ctypes.byref(at))
    pack.call("pk_attach", device._ctx, at.value + 2 * granule, granule)
    status, said = status_and_sentence(pack, "pk_attach", device._ctx, at.value, 4 * granule)
    assert status == abi.PK_BAD_ARG and "attached" in said
    status, said = status_and_sentence(pack, "pk_attach", device._ctx, at.value + 6 * granule, 4 * granule)
    assert status != abi.PK_OK and "attach" in said  # past the range's end
    for first, n in ((0, 2), (3, 5)):
        pack.call("pk_attach", device._ctx, at.value + first * granule, n * granule)
    device.fill(at.value, 7, 8 * granule)
    assert device.read(at.value + 8 * granule - 1, 1) == b"\x07"
    pack.call("pk_release", device._ctx, at.value)


@HOST
def test_attached_memory_is_really_there(device, pack):
    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    at = ctypes.c_uint64()
    pack.call("pk_reserve", device._ctx, 1 << 40, ctypes.byref(at))
    before = resident()
    pack.call("pk_attach", device._ctx, at.value, 64 * MIB)
    during = resident()
    pack.call("pk_detach", device._ctx, at.value, 64 * MIB)
    assert during - before > 60 * MIB and resident() - before < 4 * MIB
    pack.call("pk_release", device._ctx, at.value)


# ---- programs ----


def t(rows=T, cols=64, format=F32, data=1 << 20, **fields):
    return Tensor(data, rows, cols, format, **fields)


def vector(n=64, format=F32):
    return t(1, n, format)


HEADS = Heads(4, 2, 32, 32, 0, 2048, abi.PK_F16)


def raw(method, *arguments, **changes):
    """A program whose last record is changed by hand, past the checks of program.py."""
    program = Program()
    getattr(program, method)(*arguments)
    record = program.records[-1]
    for path, value in changes.items():
        target = record
        *parents, last = path.split("__")
        for name in parents:
            target = target[int(name)] if name.isdigit() else getattr(target, name)
        setattr(target, last, value)
    return program


PACKED = Tensor(1 << 20, 96, 64, F32, 0, abi.PK_PACKED)
REFUSALS = [
    ("op 0 (norm): x is absent", raw("norm", t(data=0), vector(), t(), 1e-5)),
    ("op 0 (norm): x has 64 columns, out has 32", raw("norm", t(), vector(), t(), 1e-5, out__cols=32)),
    ("op 0 (norm): x has T rows, out has S", raw("norm", t(), vector(), t(S), 1e-5)),
    ("op 0 (norm): w is 32, its wanted width is 64", raw("norm", t(), vector(), t(), 1e-5, w__cols=32)),
    ("op 0 (norm): rows of x have 256 bytes, the stride is 100", raw("norm", t(), vector(), t(), 1e-5, x__stride=100)),
    ("op 0 (norm): x at 0x100001, stride 256, is not aligned to 4 bytes", raw("norm", t(data=(1 << 20) + 1), vector(), t(), 1e-5)),
    ("op 0 (norm): both out and residual are absent", raw("norm", t(), vector(), None, 1e-5)),
    ("op 0 (norm): the cpu pack has no kernel for x in format f16", raw("norm", t(format=abi.PK_F16), vector(), t(), 1e-5)),
    ("op 0 (gate): the cpu pack has no kernel for out in format format 99", raw("gate", t(cols=128), t(), "silu", out__format=99)),
    ("op 0 (gate): act is 9, it must be 0 to 3", raw("gate", t(cols=128), t(), "silu", act=9)),
    ("op 0 (matmul): w[0] is 32, x width is 64", raw("matmul", t(), [PACKED], t(cols=96), w__0__cols=32)),
    ("op 0 (matmul): y width is 95, rows of the weights is 96", raw("matmul", t(), [PACKED], t(cols=96), y__cols=95)),
    ("op 0 (matmul): w[0] is not packed (layout 0)", raw("matmul", t(), [PACKED], t(cols=96), w__0__layout=0)),
    ("op 0 (matmul): n_w is 4, it must be 1 to 3", raw("matmul", t(), [PACKED], t(cols=96), n_w=4)),
    ("op 0 (matmul): n_w is 1, weights of a gated product is 2", raw("matmul", t(), [PACKED], t(cols=96), act=1)),
    ("op 0 (matmul): the cpu pack has no kernel for w[0] in format i32", raw("matmul", t(), [PACKED], t(cols=96), w__0__format=abi.PK_I32)),
    ("op 0 (embed): table rows is 96, n_vocab is 100", raw("embed", PACKED, t())),
    ("op 0 (embed): out has S rows, it must have T", raw("embed", PACKED, t(S))),
    ("op 0 (qkv): qkv width is 255, width of the heads is 256", raw("qkv", t(cols=256), t(cols=128), HEADS, (None, None), None, 1e-5, qkv__cols=255)),
    ("op 0 (qkv): the cpu pack has no kernel for keys and values in format q8_0", raw("qkv", t(cols=256), t(cols=128), HEADS, (None, None), None, 1e-5, kv_format=8)),
    ("op 0 (qkv): values end at byte 4097 of a page of 4096", raw("qkv", t(cols=256), t(cols=128), HEADS, (None, None), None, 1e-5, v_offset=2049)),
    ("op 0 (attention): n_heads modulo n_kv_heads is 1, wanted is 0", raw("attention", t(cols=128), t(cols=128), HEADS, 1.0, n_heads=5)),
    ("op 0 (attention): n_kv_heads is 0, it must be 1 to 4", raw("attention", t(cols=128), t(cols=128), HEADS, 1.0, n_kv_heads=0)),
    ("op 0 (attention): sinks is 3, its wanted width is 4", raw("attention", t(cols=128), t(cols=128), HEADS, 1.0, 0, 0.0, vector(3))),
    ("op 0 (attention): window is -1", raw("attention", t(cols=128), t(cols=128), HEADS, 1.0, window=-1)),
    ("op 0 (gather): out has T rows, it must have S", raw("gather", t(), t())),
    ("op 0 (copy): x width is 64, out width is 63", raw("copy", t(), t(), out__cols=63)),
    ("op 0 (prepare): size is 16, the record has 8 bytes", raw("prepare", size=16)),
    ("op 0: this pack has no op number 99", raw("commit", op=99)),
    ("op 0 (commit): size is -8", raw("commit", size=-8)),
]


@pytest.mark.parametrize(("sentence", "program"), REFUSALS, ids=[r[0] for r in REFUSALS])
def test_wrong_record_is_refused_with_op_operand_and_both_numbers(pack, sentence, program):
    b = Bench(pack)
    with pytest.raises((PackError, UnsupportedError)) as caught:
        b.device.workspace_bytes(program)
    b.close()
    assert sentence.replace("the cpu pack", f"the {pack.description['pack']} pack") in str(caught.value)
    assert isinstance(caught.value, UnsupportedError) == ("no kernel" in sentence)


@HOST
def test_copy_between_integers_and_floats_is_refused_at_load(pack):
    b = Bench(pack)
    program = Program()
    program.copy(t(format=abi.PK_I32), t())
    with pytest.raises(UnsupportedError, match="converts between f32, f16 and bf16 only"):
        b.load(program)
    b.close()


@pytest.mark.parametrize("n", [4, 8, 12, 100])
def test_cut_or_torn_programs_are_refused(pack, n):
    b = Bench(pack)
    program = Program()
    program.norm(t(), vector(), t(), 1e-5)
    records, out = program.bytes()[:n], ctypes.c_int64()
    status, said = status_and_sentence(pack, "pk_workspace_bytes", b.device._ctx, ctypes.byref(b.state), records, len(records), ctypes.byref(out))
    assert status == abi.PK_BAD_ARG and ("multiple of 8" in said or "are left" in said)
    b.close()


@pytest.mark.parametrize(("field", "value", "sentence"), [("n_slots", 0, "n_slots is 0"), ("max_ctx_tokens", 255, "not max_ctx_tokens 255"), ("page_tokens", -1, "page_tokens is -1")])
def test_state_without_sense_is_refused(pack, field, value, sentence):
    b = Bench(pack)
    setattr(b.state, field, value)
    with pytest.raises(PackError, match=sentence):
        b.device.workspace_bytes(Program())
    b.close()


def test_absent_arguments_are_refused_not_followed(pack):
    for name, arguments in (("pk_open", (None, None)), ("pk_step", (None, None)), ("pk_finish", (None, None)), ("pk_wait", (None, 1, 0)), ("pk_run", (None, 1, 1, 1, None)), ("pk_repack", (None, None, 0, 0))):
        assert status_and_sentence(pack, name, *arguments)[0] == abi.PK_BAD_ARG


# ---- threads ----


@pytest.mark.parametrize("n_threads", [1, 2, 3, 7, 32])
def test_results_do_not_depend_on_the_number_of_threads(pack, n_threads):
    results = []
    for n in (1, n_threads):
        b = Bench(pack, 0, n)
        rng = np.random.default_rng(3)
        x, _ = b.activations(rng.normal(size=(200, 640)), T)
        out, w = b.output(200, 640, T), b.upload(rng.normal(size=640), F32)
        program = Program()
        for _ in range(50):
            program.norm(x, w, out, 1e-5)
            program.add(out, x, x, 0.5)
        b.run(program, 200)
        results.append(b.download(x, 200))
        b.close()
    np.testing.assert_array_equal(results[0], results[1])


def test_packs_can_be_opened_side_by_side_and_closed_in_any_order(pack):
    devices = [Device(pack, 0, 3) for _ in range(4)]
    for d in (devices[2], devices[0], devices[3], devices[1]):
        d.close()
