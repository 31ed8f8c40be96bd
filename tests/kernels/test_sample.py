"""Sampling: every stage against a numpy model of it, draws against their distribution, seeds, log-probabilities, NaN."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Program
from paddock_runner.pack.tensor import S, Tensor

NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0, "top_k": 0, "seed": 1, "prompt_length": 0, "min_length": 0, "max_length": 1000, "n_logprobs": -1,
    "n_bias": 0, "use_mask": 0, "n_stop": 0,
}  # fmt: skip


def sampling(**fields):
    p = abi.pk_sampling()
    stop = fields.pop("stop", ())
    for name, value in (NEUTRAL | fields).items():
        setattr(p, name, value)
    p.n_stop = len(stop)
    p.stop[: len(stop)] = list(stop)
    return p


class Sampler:
    """Rows with chosen logits and parameters; one slot per row; position = the number that seeds the draw."""

    def __init__(self, bench, n_vocab, n_rows=8):
        sizes = StateSizes(n_rows, 4096, 16, 2, n_vocab, 64, n_rows, 8, 20, 3)
        self.b, self.n_vocab, self.n_rows = bench(sizes=sizes), n_vocab, n_rows
        self.logits = self.b.output(n_rows, n_vocab, S, 3, abi.PK_F32)
        self.program = Program()
        self.program.sample(self.logits)
        self.b.load(self.program)

    def draw(self, logits, params, position=None, history=None):
        """Tokens, flags, log-probabilities of one run; logits [n, V], params: one per row."""
        b, n = self.b, len(logits)
        position = [5 + i for i in range(n)] if position is None else position
        b.set_rows([(i, p - 1, 1) for i, p in enumerate(position)])
        for i, p in enumerate(params):
            b.set_sampling(i, p)
            if history is not None:
                b.set("tokens", history[i], at=i * (b.sizes.max_ctx_tokens + 1))
        padded = b.upload(np.asarray(logits), abi.PK_F32, None, 3)
        b.device.write(self.logits.data, b.device.read(padded.data, n * padded.row_bytes))
        b.device.run(n, n)
        return b.get("sample_token", n), b.get("sample_flags", n), b.get("sample_logprob", n, np.float32)

    def histogram(self, logits, params, n_draws):
        """Share of each token over n_draws draws at different positions."""
        counts = np.zeros(self.n_vocab)
        for at in range(0, n_draws, self.n_rows):
            rows = np.tile(logits, (self.n_rows, 1))
            tokens, _, _ = self.draw(rows, [params] * self.n_rows, [1 + at + i for i in range(self.n_rows)])
            counts += np.bincount(tokens, minlength=self.n_vocab)
        return counts / counts.sum()


def model(logits, p):
    """The distribution that the parameters describe: temperature, top-k, typical, top-p, min-p, each renormalised."""
    x = np.asarray(logits, np.float64) / p.temperature
    keep = np.isfinite(x)

    def probabilities():
        e = np.where(keep, np.exp(x - x[keep].max()), 0)
        return e / e.sum()

    def prefix(order, mass):
        q = probabilities()
        total = np.cumsum(q[order])
        n = int(np.searchsorted(total, mass - 1e-12)) + 1
        kept = np.zeros_like(keep)
        kept[order[:n]] = True
        return kept & keep

    if 0 < p.top_k < len(x):
        order = np.lexsort((np.arange(len(x)), -x))
        kept = np.zeros_like(keep)
        kept[order[: p.top_k]] = True
        keep = keep & kept
    if p.typical_p < 1:
        q = probabilities()
        log_q = np.log(np.where(q > 0, q, 1))
        entropy = -(q * log_q).sum()
        distance = np.where(q > 0, np.abs(-log_q - entropy), np.inf)
        keep = prefix(np.lexsort((np.arange(len(x)), distance)), p.typical_p)
    if p.top_p < 1:
        keep = prefix(np.lexsort((np.arange(len(x)), -np.where(keep, x, -np.inf))), p.top_p)
    if p.min_p > 0:
        q = probabilities()
        keep = keep & (q >= p.min_p * q.max() * (1 - 1e-9))
    return probabilities()


STAGES = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 5},
    {"top_k": 1, "temperature": 3.0},
    {"top_p": 0.6},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"typical_p": 0.9, "top_p": 0.8},
    {"top_k": 12, "top_p": 0.7, "min_p": 0.2, "temperature": 1.4},
    {"top_k": 9, "typical_p": 0.6},
]


def same_distribution(shares, wanted, n_draws):
    """No token outside the support; total variation within what n draws of that many tokens scatter."""
    assert not shares[wanted == 0].any(), "a token was drawn that the filters exclude"
    support = (wanted > 0).sum()
    assert 0.5 * np.abs(shares - wanted).sum() <= 0.02 + 1.2 * np.sqrt(support / n_draws)


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_draws_follow_the_distribution_of_every_stage(bench, rng, stage):
    s = Sampler(bench, 37)
    logits = np.zeros(37, np.float32)
    while len(np.unique(logits)) < 37:  # of equal ones at the border a GPU keeps all, the model the first
        logits = np.round(rng.normal(size=37) * 2, 3).astype(np.float32)
    n_draws = 1600
    same_distribution(s.histogram(logits, sampling(seed=int(rng.integers(2**63)), **stage), n_draws), model(logits, sampling(**stage)), n_draws)


@pytest.mark.parametrize("stage", [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"typical_p": 0.4}, {"top_p": 0.999, "temperature": 3.0}, {}], ids=str)
def test_support_in_a_large_vocabulary_is_what_the_filters_leave(bench, rng, stage):
    s = Sampler(bench, 50257)
    logits = (rng.normal(size=50257) * 3).astype(np.float32)
    wanted = model(logits, sampling(**stage))
    tokens, flags, _ = s.draw(np.tile(logits, (8, 1)), [sampling(seed=int(rng.integers(2**63)), **stage)] * 8)
    assert not flags.any() and (wanted[tokens] > 0).all()
    order = np.argsort(-wanted)
    kept = int((wanted > 0).sum())
    if kept < 50257 and "typical_p" not in stage:
        inside, outside = order[kept - 1], order[kept]
        assert logits[inside] >= logits[outside]


def test_flat_logits_are_drawn_evenly_in_every_path(bench, rng):
    s = Sampler(bench, 16)
    for stage in ({}, {"top_p": 0.999}, {"top_k": 15}, {"min_p": 0.5}):
        shares = s.histogram(np.zeros(16, np.float32), sampling(seed=int(rng.integers(2**63)), **stage), 1600)
        assert shares.max() < 0.11


def test_seed_and_position_alone_decide(bench, rng):
    s = Sampler(bench, 1000)
    logits = rng.normal(size=(1, 1000)).astype(np.float32)
    first, _, _ = s.draw(np.tile(logits, (8, 1)), [sampling(seed=77)] * 8, [9] * 8)
    assert (first == first[0]).all()
    again, _, _ = s.draw(np.tile(logits, (3, 1)), [sampling(seed=77), sampling(seed=78), sampling(seed=77)], [9, 9, 10])
    many = {int(s.draw(logits, [sampling(seed=77 + i)], [9])[0][0]) for i in range(20)}
    assert again[0] == first[0] and len(many) > 10


def test_greedy_takes_the_lowest_index_of_the_largest(bench, rng):
    s = Sampler(bench, 5003)
    logits = rng.normal(size=(4, 5003)).astype(np.float32)
    logits[0, [17, 4000, 5002]] = 9
    logits[1, 5002] = 9
    logits[2, 0] = 9
    tokens, flags, _ = s.draw(logits, [sampling(temperature=0.0)] * 4)
    assert tokens.tolist() == [17, 5002, 0, int(logits[3].argmax())] and not flags.any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 500, 1002])
def test_a_logit_that_is_no_number_flags_its_row_alone(bench, rng, value, at):
    s = Sampler(bench, 1003)
    logits = rng.normal(size=(3, 1003)).astype(np.float32)
    logits[1, at] = value
    tokens, flags, _ = s.draw(logits, [sampling(temperature=0.0)] * 3)
    assert flags.tolist() == [0, abi.PK_ROW_NAN, 0] and tokens[1] == -1 and tokens[0] == logits[0].argmax()


def test_mask_allows_set_bits_only_and_an_empty_mask_is_flagged(bench, rng):
    s = Sampler(bench, 77)
    logits = rng.normal(size=(3, 77)).astype(np.float32)
    words = np.zeros((3, 3), np.uint32)
    allowed = rng.choice(77, 9, replace=False)
    for token in allowed:
        words[0, token // 32] |= np.uint32(1 << (int(token) % 32))
    words[1, 2] = 1 << 12
    s.b.set("mask", words, np.uint32)
    tokens, flags, _ = s.draw(logits, [sampling(temperature=0.0, use_mask=1)] * 3)
    assert tokens[0] == allowed[logits[0, allowed].argmax()] and tokens[1] == 76
    assert flags.tolist() == [0, 0, abi.PK_ROW_NAN]


def test_bias_is_added_and_min_length_holds_stop_tokens_back(bench, rng):
    s = Sampler(bench, 50)
    logits = np.zeros((3, 50), np.float32)
    logits[:, 7] = 5
    bias = (abi.pk_bias * 3)(abi.pk_bias(3, 4.0), abi.pk_bias(3, 4.0), abi.pk_bias(7, -100.0))
    s.b.device.write(s.b.state.bias, bytes(bias))
    p = [sampling(temperature=0.0, n_bias=3), sampling(temperature=0.0, stop=(7, 9), min_length=7), sampling(temperature=0.0, stop=(7, 9), min_length=7)]
    tokens, _, _ = s.draw(logits, p, [5, 6, 7])
    assert tokens.tolist() == [3, 0, 7]


def test_penalties_count_prompt_and_output_as_documented(bench, rng):
    s = Sampler(bench, 40)
    logits = (rng.normal(size=(4, 40)) * 2).astype(np.float32)
    history = np.array([3, 3, 8, 3, 9, 9, 9, 21, 8, 30], np.int32)
    params = [
        sampling(n_logprobs=0, temperature=0.0, prompt_length=4, repetition_penalty=1.7),
        sampling(n_logprobs=0, temperature=0.0, prompt_length=4, frequency_penalty=0.5),
        sampling(n_logprobs=0, temperature=0.0, prompt_length=4, presence_penalty=0.9),
        sampling(n_logprobs=0, temperature=0.0, prompt_length=4, repetition_penalty=0.8, frequency_penalty=-0.4, presence_penalty=0.3),
    ]
    tokens, _, logprobs = s.draw(logits, params, [9] * 4, [history] * 4)
    for i, p in enumerate(params):
        x = logits[i].astype(np.float64)
        for token in set(history[:9].tolist()):
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
            count = int((history[4:9] == token).sum())
            x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        log_q = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert tokens[i] == x.argmax()
        np.testing.assert_allclose(logprobs[i], log_q.max(), atol=1e-5)


@pytest.mark.parametrize("n_vocab", [23, 3001])
def test_logprobs_and_the_best_of_them(bench, rng, n_vocab):
    s = Sampler(bench, n_vocab)
    logits = (rng.normal(size=(4, n_vocab)) * 4).astype(np.float32)
    logits[3, 1:] = -np.inf
    params = [sampling(n_logprobs=k, temperature=t, seed=5) for k, t in ((0, 1.0), (20, 0.5), (7, 0.0), (5, 1.0))]
    tokens, flags, logprobs = s.draw(logits, params)
    x = logits.astype(np.float64)
    log_q = x - x.max(1, keepdims=True) - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True))
    np.testing.assert_allclose(logprobs, log_q[np.arange(4), tokens], atol=2e-5)
    top = np.frombuffer(s.b.device.read(s.b.state.top, 4 * 20 * 8), [("token", "i4"), ("logprob", "f4")]).reshape(4, 20)
    assert (flags >> 16).tolist() == [0, 20, 7, 1]
    for row, k in ((1, 20), (2, 7), (3, 1)):
        order = np.lexsort((np.arange(n_vocab), -x[row]))[:k]
        assert top[row]["token"][:k].tolist() == order.tolist()
        np.testing.assert_allclose(top[row]["logprob"][:k], log_q[row, order], atol=2e-5)


def test_equal_logits_are_listed_by_index(bench):
    s = Sampler(bench, 300)
    s.draw(np.zeros((1, 300), np.float32), [sampling(n_logprobs=6, temperature=0.0)])
    top = np.frombuffer(s.b.device.read(s.b.state.top, 6 * 8), [("token", "i4"), ("logprob", "f4")])
    assert top["token"].tolist() == [0, 1, 2, 3, 4, 5]


def test_small_changes_of_logits_keep_the_token(bench, rng):
    s = Sampler(bench, 2000)
    logits = (rng.normal(size=2000) * 2).astype(np.float32)
    p = [sampling(seed=i, top_p=0.95, top_k=50) for i in range(8)]
    first, _, _ = s.draw(np.tile(logits, (8, 1)), p, [4] * 8)
    shaken = (logits + rng.normal(size=2000) * 1e-6).astype(np.float32)
    second, _, _ = s.draw(np.tile(shaken, (8, 1)), p, [4] * 8)
    assert (first == second).sum() >= 7


def test_width_that_is_not_the_vocabulary_is_refused_with_both_numbers(bench):
    from paddock_runner.errors import PackError

    b = bench()
    program = Program()
    program.sample(Tensor(4096, S, 99, abi.PK_F32))
    with pytest.raises(PackError, match="op 0 \\(sample\\): logits width is 99, n_vocab is 100"):
        b.device.workspace_bytes(program)
