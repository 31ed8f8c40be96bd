"""Layers with states in the forward pass, up to their last product: gated delta net, gated short convolution, Mamba 2."""

from __future__ import annotations

from dataclasses import replace

from ..blueprint.blueprint import Delta, Mamba, ShortConv
from ..errors import UnsupportedError
from ..pack import abi
from ..pack.program import DeltaShape, DeltaWeights, Kept, MambaShape, MambaWeights, Program
from ..pack.tensor import Tensor
from .site import Site


def delta_net(program: Program, x: Delta, i: int, site: Site, eps: float, max_guesses: int = 0) -> Tensor:
    """The layer's output before its last projection, [T, H*Dv]. max_guesses: that it must be able to take back."""
    w, at, buffers = site.weights, f"layers.{i}.", site.buffers
    offsets = site.state_offsets[i]
    if offsets is None:
        raise UnsupportedError(f"layer {i} has no recurrent state")
    mixed = replace(buffers["delta_mixed"], cols=x.n_channels + x.n_values)
    qkv, z = mixed.columns(0, x.n_channels), mixed.columns(x.n_channels, x.n_values)
    numbers = replace(buffers["delta_numbers"], cols=2 * x.n_v_heads)
    b, a = numbers.columns(0, x.n_v_heads), numbers.columns(x.n_v_heads, x.n_v_heads)
    out = replace(buffers["attention_out"], cols=x.n_values)
    if at + "delta_qkv.weight" in w:
        program.matmul(buffers["normed"], [w[f"{at}delta_{name}.weight"] for name in ("qkv", "z")], mixed)
    else:
        program.matmul(buffers["normed"], [w[f"{at}delta_{name}.weight"] for name in "qkv"], qkv)
        program.matmul(buffers["normed"], [w[at + "delta_z.weight"]], z)
    program.matmul(buffers["normed"], [w[at + "delta_b.weight"], w[at + "delta_a.weight"]], numbers)
    weights = DeltaWeights(*(w[f"{at}delta_{name}.weight"] for name in ("conv", "a_log", "dt", "scale")))
    shape = DeltaShape(x.n_k_heads, x.n_v_heads, x.k_width, x.v_width, x.conv_width, *offsets, x.is_tiled)
    if kept := _kept(site, i, max_guesses):
        program.keep(qkv, (b, a), offsets[0], kept)
    program.delta((qkv, z, b, a), weights, out, shape, eps, x.gate_act)
    return out


def _kept(site: Site, i: int, max_guesses: int) -> Kept | None:
    place = site.kept[i] if max_guesses else None
    return Kept(place[2], place[0], place[1], max_guesses + 1) if place is not None else None


def settle(program: Program, site: Site, max_guesses: int) -> None:
    """After the draws: every layer with a state takes back what was guessed wrong."""
    layers = (i for i, place in enumerate(site.kept) if place is not None)
    records = [r for r in program.records if isinstance(r, (abi.pk_op_delta, abi.pk_op_mamba, abi.pk_op_conv))]
    for i, record in zip(layers, records, strict=True):
        kept, offsets = _kept(site, i, max_guesses), site.state_offsets[i]
        if kept is not None and offsets is not None:
            program.settle(record, offsets[0], kept)


def short_conv(program: Program, x: ShortConv, i: int, site: Site, max_guesses: int = 0) -> Tensor:
    """The layer's output before its last projection, [T, M]."""
    w, at, buffers = site.weights, f"layers.{i}.", site.buffers
    offsets = site.state_offsets[i]
    if offsets is None:
        raise UnsupportedError(f"layer {i} has no recurrent state")
    mixed, out = replace(buffers["conv_mixed"], cols=3 * x.width), replace(buffers["attention_out"], cols=x.width)
    program.matmul(buffers["normed"], [w[at + "conv_in.weight"]], mixed, [w.get(at + "conv_in.bias")])
    if kept := _kept(site, i, max_guesses):
        program.keep(mixed, (None, None), offsets[0], kept)
    program.conv(mixed, (w[at + "conv.weight"], w.get(at + "conv.bias")), out, x.conv_width, offsets[1])
    return out


def mamba(program: Program, x: Mamba, i: int, site: Site, eps: float, max_guesses: int = 0) -> Tensor:
    """The layer's output before its last projection, [T, H*P]."""
    w, at, buffers = site.weights, f"layers.{i}.", site.buffers
    offsets = site.state_offsets[i]
    if offsets is None:
        raise UnsupportedError(f"layer {i} has no recurrent state")
    mixed = replace(buffers["mamba_mixed"], cols=x.n_values + x.n_channels)
    z, xbc = mixed.columns(0, x.n_values), mixed.columns(x.n_values, x.n_channels)
    dt, out = replace(buffers["mamba_steps"], cols=x.n_heads), replace(buffers["attention_out"], cols=x.n_values)
    for name, part in (("z", z), ("xbc", xbc), ("dt", dt)):
        program.matmul(buffers["normed"], [w[f"{at}mamba_{name}.weight"]], part, [w.get(f"{at}mamba_{name}.bias")])
    weights = MambaWeights(
        w[at + "mamba_conv.weight"], w.get(at + "mamba_conv.bias"), *(w[f"{at}mamba_{name}.weight"] for name in ("a_log", "dt_bias", "d", "scale"))
    )
    shape = MambaShape(x.n_heads, x.head_width, x.n_groups, x.state_width, x.conv_width, x.n_norms, *offsets, *x.step)
    if kept := _kept(site, i, max_guesses):
        program.keep(xbc, (dt, None), offsets[0], kept)
    program.mamba((xbc, z, dt), weights, out, shape, eps)
    return out
