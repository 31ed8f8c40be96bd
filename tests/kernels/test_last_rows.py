"""Steps of many tokens of which few are sampled: the last layer's end is computed for those alone on the CUDA pack, and they say what they say in small steps."""

import numpy as np
import pytest
from paddock_runner.pack import abi
from test_parted import SIZES, Parted, only_once, tokens
from test_sample import sampling
from test_step import RESULT

LONGEST = {"bf16": 0.06, "fp8_e4m3": 0.2, "q4_k": 0.2}
"""How far log-probabilities may be apart that were computed by other kernels: weights or rows are rounded twice, 0.068 was seen for Q4_K. Another row's are apart by one or so."""


def results(m, **fields):
    """What a step's rows drew."""
    m.loop.wait(seq := m.loop.send(**fields))
    found = np.frombuffer(bytes(m.b.device.results), RESULT).reshape(-1, SIZES.max_step_rows)[seq % SIZES.n_results][: len(fields["rows"])].copy()
    return {int(r["slot"]): r for r in found if r["token"] >= 0}


def start(m, slot, prompt, n, flags=1):
    """As Parted.start, with the log-probability of what is drawn."""
    fields = m.start(slot, prompt, n, flags)
    fields["news"] = [(slot, 0, sampling(temperature=0.0, prompt_length=len(prompt), max_length=SIZES.max_ctx_tokens, n_logprobs=0), [])]
    return fields


def together(*steps):
    """One step of several."""
    return {name: [x for one in steps for x in one.get(name, [])] for name in ("news", "texts", "pages", "rows")}


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3", "q4_k"])
def test_few_sampled_rows_of_many_tokens_say_what_they_say_in_small_steps(bench, rng, level, kind):
    only_once(level)
    m = Parted(bench, rng, kind)
    prompts = {slot: tokens(rng, n) for slot, n in enumerate([150, 30, 31, 9, 1, 17])}
    wanted = {}
    for slot, prompt in prompts.items():
        for first in range(0, len(prompt), 100):
            n = min(100, len(prompt) - first)
            is_last = first + n == len(prompt)
            wanted |= results(m, **(start(m, slot, prompt, n, int(is_last)) if first == 0 else {"rows": [(slot, n, int(is_last))]}))
    small = results(m, rows=[(slot, 1, 1) for slot in prompts])
    found = results(m, **together(*(start(m, slot, prompt, len(prompt)) for slot, prompt in prompts.items())))
    assert sum(len(p) for p in prompts.values()) > 128 and len(found) == len(wanted) == 6
    # Beside rows that decode, in another order; part of a prompt that draws nothing yet, alone and beside them.
    long = tokens(rng, 300)
    mixed = results(m, **together({"rows": [(slot, 1, 1) for slot in reversed(prompts)]}, start(m, 6, long, 140, 0)))
    assert not results(m, rows=[(6, 140, 0)])
    rest = results(m, rows=[(6, 20, 1)])
    assert not results(m, **start(m, 7, long, 240, 0))
    again = results(m, rows=[(7, 60, 1)])
    same = 0
    # Where two tokens were as likely, and each way drew another one, what follows is another text.
    parted = {slot for slot in wanted if found[slot]["token"] != wanted[slot]["token"]}
    assert len(parted) <= 2
    for got, known in ((found, wanted), (mixed, {slot: row for slot, row in small.items() if slot not in parted}), ({6: again[7]}, rest)):
        for slot, row in known.items():
            assert row["flags"] & ~abi.PK_ROW_LENGTH == 0 and abs(got[slot]["logprob"] - row["logprob"]) <= LONGEST[kind], (slot, got[slot], row)
            same += got[slot]["token"] == row["token"]
    assert same >= 10 - len(parted)
