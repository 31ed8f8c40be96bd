"""Ops that few families need against float64 numpy; a pack that has none says so when a program is loaded."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.errors import PackError
from paddock_runner.pack.program import Program
from paddock_runner.pack.tensor import T
from test_ops import close


@pytest.mark.parametrize("cols", [1, 4, 32])
def test_softplus_gates_rows_heads_or_elements(bench, rng, cols):
    b = bench()
    x, x64 = b.activations(rng.normal(size=(9, 32)), T, 2)
    g, g64 = b.activations(rng.normal(size=(9, cols)) * 6, T, 1)
    program = Program()
    program.softplus(x, g, x)
    if "softplus" not in b.pack.description["ops"]:
        with pytest.raises(PackError, match=r"op 0 \(softplus\): the \w+ pack has no kernel for it"):
            b.load(program)
        return
    b.run(program, 9)
    close(b.download(x, 9), x64 * np.repeat(np.log1p(np.exp(g64)), 32 // cols, axis=1), b.activation)


def test_softplus_gates_that_do_not_divide_the_row_are_refused(bench, rng):
    b = bench()
    x, _ = b.activations(rng.normal(size=(9, 32)), T, 2)
    g, _ = b.activations(rng.normal(size=(9, 4)), T, 1)
    program = Program()
    program.softplus(x, g, x)
    program.records[0].g.cols = 5
    with pytest.raises(PackError, match=r"op 0 \(softplus\)"):
        b.load(program)
