"""Experts in host memory: the same bits as experts on the device, whatever was where; and who lies where is what the rule says."""

from __future__ import annotations

import time

import numpy as np
import pytest
from harness import POISON, Bench, rounded
from paddock_runner.errors import PackError, UnsupportedError
from paddock_runner.formats.table import by_name
from paddock_runner.pack import abi
from paddock_runner.pack.fetched import Ahead, ExpertCache
from paddock_runner.pack.program import Epilogue, Program, Stacks
from paddock_runner.pack.tensor import T, Tensor
from weights import Weight, random_weight, scaled_fp8


def random_experts(kind: str, n: int, m: int, f: int, rng: np.random.Generator) -> list[list[Weight]]:
    """Gate, up and down matrices of n experts. kind: a format; "fp8_e4m3 block", "fp8_e4m3 row": with scales; "q4_k and q6_k": down in the second."""
    name, _, more = kind.partition(" ")
    names = [name, name, "q6_k" if more.startswith("and") else name]
    shapes = ((f, m), (f, m), (m, f))
    if more in ("block", "row"):
        return [[scaled_fp8(name, *shape, more, rng) for _ in range(n)] for shape in shapes]
    return [[random_weight(one, *shape, rng) for _ in range(n)] for one, shape in zip(names, shapes, strict=True)]


class Layer:
    """A layer's experts twice: on the device, and in host memory with n_slots places on the device."""

    def __init__(self, b: Bench, parts: list[list[Weight]], n_slots: int) -> None:
        self.b, self.n, self.n_slots = b, len(parts[0]), n_slots
        sizes = [-(-b.device.packed_bytes(part[0].source()) // 256) * 256 for part in parts]
        self.n_bytes, self.stride = sum(sizes), sum(sizes) + 512
        home = b.device.alloc(self.n * self.stride, "home", is_pinned=True)
        whole = b.device.alloc(self.n * self.stride, "whole")
        b.device.fill(whole, POISON, self.n * self.stride)
        offset, far, near = 0, [], []
        for part, size in zip(parts, sizes, strict=True):
            for base, stack in ((home, far), (whole, near)):
                for e, matrix in enumerate(part):
                    b.device.repack(matrix.source(), base + e * self.stride + offset, b.device.packed_bytes(matrix.source()))
                stack.append(Tensor(base + offset, part[0].rows, part[0].cols, by_name(part[0].format).id, self.stride, abi.PK_PACKED))
            offset += size
        self.counts = b.device.alloc(40, "counts", is_pinned=True)
        # Slots of another layer lie between this one's and what is shared.
        n_places = n_slots + 2 + self.n - n_slots
        pool = b.device.alloc(n_places * self.stride, "slots")
        b.device.fill(pool, POISON, n_places * self.stride)
        self.words = abi.PK_CACHE_HEAD + 5 * self.n + 2 * n_slots
        cache = b.device.alloc(4 * self.words, "cache")
        b.device.fill(cache, 0, 4 * self.words)
        staging = pool + (n_slots + 2) * self.stride if self.n > n_slots else 0
        self.cache = ExpertCache(home, pool, staging, cache, self.counts, self.stride, self.n_bytes, n_slots, self.n - n_slots, self.n)
        self.far, self.near = far, near
        self.held: dict[int, int] = {}
        """The rule in Python: slot -> expert, and when it was used last."""
        self.used, self.clock, self.is_staged, self.balance, self.found = [0] * n_slots, 0, False, 0, [0, 0, 0, 0, 0]

    def stacks(self, is_far: bool, biases: tuple[Tensor | None, ...], ahead: Ahead | None = None) -> Stacks:
        return Stacks(*(self.far if is_far else self.near), self.n, biases, "silu", 0.0, 0.0, self.cache if is_far else None, ahead if is_far else None)

    def follow(self, ids: np.ndarray, n_cold: int = 0) -> None:
        """What a step with these choices does to the cache, n_cold of what is missing being the host's."""
        self.clock += 1
        chosen = sorted({int(e) for e in ids.reshape(-1) if 0 <= e < self.n})
        for s, e in self.held.items():
            if e in chosen:
                self.balance = min(64, self.balance + 2 * (self.used[s] == 0))
                self.used[s], self.found[0] = self.clock, self.found[0] + 1
        missing = [e for e in chosen if e not in self.held.values()]
        if self.is_staged:
            self.found[0], missing, self.is_staged = self.found[0] + len(missing), [], False
        first = self.clock % max(1, len(missing))
        cold = {missing[(first + i) % len(missing)] for i in range(n_cold)}
        missing = [e for e in missing if e not in cold]
        free = sorted((s for s in range(self.n_slots) if self.used[s] != self.clock), key=lambda s: (self.used[s], s))
        for e, s in zip(missing, free, strict=False):
            self.held[s], self.used[s] = e, self.clock
        n = min(len(missing), len(free))
        self.found = [self.found[0], self.found[1] + n, self.found[2] + len(missing) - n, self.found[3] + 1, self.found[4]]

    def expect(self, n_chosen: int, expected: np.ndarray, n_most: int) -> None:
        """What a step of the layer before does to the cache."""
        if n_chosen >= 4 * self.n:
            self.is_staged, self.found[4] = True, self.found[4] + self.n - len(self.held)
            away = [e for e in range(self.n) if e not in self.held.values()]
            self.held |= dict(zip([s for s in range(self.n_slots) if s not in self.held], away, strict=False))
            return
        if len(expected) > abi.PK_AHEAD_TOKENS or (self.balance < 0 and self.clock % 16):
            return
        named = [int(e) for e in expected.T.reshape(-1) if 0 <= e < self.n]
        picked = [e for i, e in enumerate(named) if e not in self.held.values() and e not in named[:i]][:n_most]
        free = sorted((s for s in range(self.n_slots) if self.held.get(s) not in named), key=lambda s: (self.used[s], s))
        for e, s in zip(picked, free, strict=False):
            self.held[s], self.used[s], self.found[4] = e, 0, self.found[4] + 1
        self.balance = max(-4, self.balance - min(len(picked), len(free)))

    def check(self) -> None:
        words = np.frombuffer(self.b.device.read(self.cache.cache, 4 * self.words), np.int32)
        assert (words[0], words[14]) == (self.clock, self.balance)
        words = words[abi.PK_CACHE_HEAD :]
        slot_of, expert_of, used = words[: self.n], words[5 * self.n :][: self.n_slots], words[5 * self.n + self.n_slots :]
        assert {s: int(e) - 1 for s, e in enumerate(expert_of) if e} == self.held
        assert {int(s) - 1: e for e, s in enumerate(slot_of) if s} == self.held
        assert used.tolist() == self.used
        assert np.frombuffer(self.b.device.read(self.counts, 40), np.uint64).tolist() == self.found


@pytest.mark.parametrize("kind, n_slots", [("bf16", 3), ("f16", 12), ("q4_k and q6_k", 1), ("fp8_e4m3 block", 5), ("mxfp4", 11), ("q8_0", 6)])
def test_fetched_experts_give_the_same_bits_as_resident_ones(bench, rng, kind, n_slots):
    b, m, f, n_experts, k = bench(), 512, 256, 12, 3
    if by_name(kind.split()[0]).name not in b.pack.description["formats"]:
        pytest.skip(f"this pack has no {kind}")
    layer = Layer(b, random_experts(kind, n_experts, m, f, rng), n_slots)
    biases = tuple(b.upload(rng.normal(size=(1, n_experts * n)), abi.PK_F32) for n in (f, f, m)) if kind == "mxfp4" else (None, None, None)
    for n in (1, 2, 1, 1, 40, 3, 150, 1, 2, 8):
        x, _ = b.activations(rng.normal(size=(n, m)) * 0.2, T, 8)
        ids64 = np.array([rng.permutation(n_experts)[:k] for _ in range(n)])
        if n == 3:
            ids64[1, 1] = n_experts  # is left out
        chosen = (b.upload(ids64, abi.PK_I32, T, 1), b.upload(rounded(rng.random((n, k)) + 0.1, abi.PK_F32), abi.PK_F32, T))
        out = []
        for is_far in (False, True):
            y = b.output(n, m, T, 3, abi.PK_F32)
            program = Program()
            program.experts(x, chosen, layer.stacks(is_far, biases), y, Epilogue(scale=0.5))
            b.run(program, n)
            out.append(b.download(y, n))
        assert np.isfinite(out[1]).all(), n
        np.testing.assert_array_equal(out[1], out[0], err_msg=f"{n} tokens")
        layer.follow(ids64)
        layer.check()


COLD = [("bf16", 3), ("q8_0", 6), ("q4_k and q6_k", 1), ("fp8_e4m3 block", 5), ("fp8_e4m3 row", 9), ("f16", 4)]


@pytest.mark.parametrize("takes_all", [True, False])
@pytest.mark.parametrize("kind, n_slots", COLD)
def test_experts_that_the_host_computes_change_roundings_alone(bench, rng, kind, n_slots, takes_all):
    b, m, f, n_experts, k = bench(n_threads=0), 512, 256, 12, 3
    if b.device.facts.is_host:
        pytest.skip("here the host computes all experts")
    b.device.open_cold(takes_all)
    layer = Layer(b, random_experts(kind, n_experts, m, f, rng), n_slots)
    total, most = 0, 0
    for n in (1, 2, 1, 1, 16, 3, 17, 1, 8, 40, 5, 1, 1, 16):
        x, _ = b.activations(rng.normal(size=(n, m)) * 0.2, T, 8)
        ids64 = np.array([rng.permutation(n_experts)[:k] for _ in range(n)])
        if n == 3:
            ids64[1, 1] = n_experts  # is left out
        chosen = (b.upload(ids64, abi.PK_I32, T, 1), b.upload(rounded(rng.random((n, k)) + 0.1, abi.PK_F32), abi.PK_F32, T))
        add = b.upload(rounded(rng.normal(size=(n, m)), abi.PK_F32), abi.PK_F32, T)
        out = []
        for is_far in (False, True):
            y = b.output(n, m, T, 3, abi.PK_F32)
            program = Program()
            program.experts(x, chosen, layer.stacks(is_far, (None, None, None)), y, Epilogue(scale=0.5, add=add))
            b.run(program, n)
            out.append(b.download(y, n))
        n_cold = b.device.cold().n_computed - total
        total += n_cold
        most = max(most, n_cold)
        assert np.isfinite(out[1]).all(), n
        scale = np.abs(out[0]).max()
        assert np.abs(out[1] - out[0]).max() <= 0.004 * scale, (n, n_cold)
        if not n_cold:
            np.testing.assert_array_equal(out[1], out[0], err_msg=f"{n} tokens")
        assert n <= abi.PK_COLD_TOKENS or not n_cold
        layer.follow(ids64, n_cold)
        layer.check()
    cold = b.device.cold()
    assert (cold.n_layers, cold.copy_us > 0) == ((0, False) if kind == "f16" else (1, True))
    assert most == 0 if kind == "f16" else most > 3 or not takes_all
    print(kind, "takes all" if takes_all else "auto", total, cold)


@pytest.mark.parametrize("m, f", [(64, 16384), (16384, 64)])
def test_rows_as_wide_as_may_be_are_the_hosts_too(bench, rng, m, f):
    """As wide as what rows lie in between a GPU and the threads of its host."""
    b, n_experts, k = bench(n_threads=0), 6, 3
    if b.device.facts.is_host:
        pytest.skip("here the host computes all experts")
    b.device.open_cold(True)
    layer, most = Layer(b, random_experts("bf16", n_experts, m, f, rng), 2), 0
    for n in (1, 2, 5, 1, 16):
        x, _ = b.activations(rng.normal(size=(n, m)) * 0.2, T, 8)
        chosen = (b.upload(np.array([rng.permutation(n_experts)[:k] for _ in range(n)]), abi.PK_I32, T, 1), b.upload(rounded(rng.random((n, k)) + 0.1, abi.PK_F32), abi.PK_F32, T))
        out, before = [], b.device.cold().n_computed
        for is_far in (False, True):
            y = b.output(n, m, T, 3, abi.PK_F32)
            program = Program()
            program.experts(x, chosen, layer.stacks(is_far, (None, None, None)), y, Epilogue(scale=0.5))
            b.run(program, n)
            out.append(b.download(y, n))
        most = max(most, b.device.cold().n_computed - before)
        assert np.isfinite(out[1]).all(), n
        assert np.abs(out[1] - out[0]).max() <= 0.004 * np.abs(out[0]).max(), n
    assert most > 0


def test_threads_of_the_host_sleep_between_steps(bench, rng):
    b = bench(n_threads=0)
    if b.device.facts.is_host:
        pytest.skip("here the host computes all experts")
    b.device.open_cold(True)
    layer = Layer(b, random_experts("bf16", 4, 64, 32, rng), 2)
    x, _ = b.activations(np.zeros((1, 64)), T)
    program = Program()
    chosen = (b.upload(np.array([[0, 1]]), abi.PK_I32, T), b.upload(np.ones((1, 2)), abi.PK_F32, T))
    program.experts(x, chosen, layer.stacks(True, (None, None, None)), b.output(1, 64, T))
    b.run(program, 1)
    assert b.device.cold().n_computed == 2
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.005


def test_contexts_that_cannot_share_experts_say_so(bench):
    b = bench(is_invariant=True)
    with pytest.raises(UnsupportedError, match="the CPU pack computes all experts" if b.device.facts.is_host else "depend on which experts were on the device"):
        b.device.open_cold(False)
    assert b.device.cold().n_threads == 0


@pytest.mark.parametrize("n_slots, knows", [(2, 0.7), (7, 0.7), (11, 0.9), (5, 0.0)])
def test_what_is_copied_ahead_changes_no_bits_and_follows_the_rule(bench, rng, n_slots, knows):
    b, m, f, n_experts, k = bench(), 64, 32, 12, 3
    first, second = (Layer(b, random_experts("bf16", n_experts, m, f, rng), n) for n in (3, n_slots))
    nothing = (None, None, None)
    for n in (40, 2, 1, 40, 1, 1, 16, 5, 7, 1, 250, 2) if n_slots > 2 else (1, 2, 1, 1, 4, 40, 1, 2, 16, 2):
        x, _ = b.activations(rng.normal(size=(n, m)) * 0.2, T)
        ids = [np.array([rng.permutation(n_experts)[:k] for _ in range(n)]) for _ in range(2)]
        expected = np.where(rng.random((n, k)) < knows, ids[1], rng.integers(0, n_experts + 1, (n, k)))
        factors = b.upload(rounded(rng.random((n, k)) + 0.1, abi.PK_F32), abi.PK_F32, T)
        chosen = [(b.upload(one, abi.PK_I32, T, 1), factors) for one in ids]
        n_most = int(rng.integers(1, 4))
        ahead = Ahead(second.cache, b.upload(expected, abi.PK_I32, T, 2), n_most)
        out = []
        for is_far in (False, True):
            y, z = b.output(n, m, T, 0, abi.PK_F32), b.output(n, m, T, 0, abi.PK_F32)
            program = Program()
            program.experts(x, chosen[0], first.stacks(is_far, nothing, ahead), y)
            program.experts(x, chosen[1], second.stacks(is_far, nothing), z)
            b.run(program, n)
            out.append((b.download(y, n), b.download(z, n)))
        np.testing.assert_array_equal(out[1], out[0], err_msg=f"{n} tokens")
        first.follow(ids[0])
        second.expect(n * k, expected, n_most)
        second.follow(ids[1])
        first.check()
        second.check()
    assert second.found[4] > 5 or not knows


def test_a_cache_whose_parts_do_not_fit_each_other_is_refused(bench, rng):
    b = bench()
    layer = Layer(b, random_experts("bf16", 4, 64, 32, rng), 2)
    x, _ = b.activations(np.zeros((1, 64)), T)
    chosen = (b.upload(np.array([[0, 1]]), abi.PK_I32, T), b.upload(np.ones((1, 2)), abi.PK_F32, T))
    wrong = [
        ("n_slots", 5, "n_slots is 5, it must be 1 to 4"), ("n_staging", 1, "n_slots and n_staging together is 3, n_experts is 4"), ("n_bytes", 1 << 30, "n_bytes is"),
        ("staging", layer.cache.staging + 64, "staging lies"), ("counts", 0, "home, slots, cache or counts are absent"), ("stride", layer.stride + 256, "bytes from expert to expert"),
        ("n_experts", 5, "experts of the cache is 5, n_experts is 4"),
    ]  # fmt: skip
    for name, value, sentence in wrong:
        program = Program()
        program.experts(x, chosen, layer.stacks(True, (None, None, None)), b.output(1, 64, T))
        setattr(program.records[0].here, name, value)
        with pytest.raises(PackError, match=sentence):
            b.load(program)
    program = Program()
    program.experts(x, chosen, layer.stacks(True, (None, None, None), Ahead(layer.cache)), b.output(1, 64, T))
    with pytest.raises(PackError, match="the next layer's staging is this one's"):
        b.load(program)
