"""Several residual streams in the forward pass: how a branch reads them and joins them, and what n-grams add to them.

The norms' weights hold the mean over streams (weights.py), so that a sum is a mean here.
"""

from __future__ import annotations

from dataclasses import replace

from ..blueprint.blueprint import Blueprint, Ngram
from ..pack.program import NgramShape, Program
from ..pack.tensor import Tensor
from .site import Site


def _each(tensor: Tensor, blueprint: Blueprint) -> list[Tensor]:
    """A view of every stream's columns."""
    m = blueprint.model_width
    return [tensor.columns(j * m, m) for j in range(blueprint.n_streams)]


def _norms(program: Program, blueprint: Blueprint, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Every stream, normed apart."""
    for part, w, to in zip(*(_each(t, blueprint) for t in (x, weight, out)), strict=True):
        program.norm(part, w, to, blueprint.norm_eps)


def start_streams(program: Program, blueprint: Blueprint, site: Site) -> None:
    """Every stream begins with the token's embedding."""
    first, *others = _each(site.buffers["residual"], blueprint)
    program.embed(site.weights["embed.weight"], first, blueprint.embed_scale)
    for stream in others:
        program.copy(first, stream)


def _mix(program: Program, blueprint: Blueprint, name: str, site: Site, x: Tensor, work: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
    """out = the sum over streams of what is normed, each number times the sigmoid of its own gate. work: normed streams, gates, the gates' low rank."""
    w, (normed, gates, low) = site.weights, work
    _norms(program, blueprint, x, w[name + "_hyper_norm.weight"], normed)
    program.matmul(normed, [w[name + "_hyper_down.weight"]], low)
    program.gate(low, low, "silu")
    program.matmul(low, [w[name + "_hyper_up.weight"]], gates)
    program.sigmoid(normed, gates, gates)
    first, second, *others = _each(gates, blueprint)
    program.add(first, second, out)
    for stream in others:
        program.add(stream, out, out)


def read_streams(program: Program, blueprint: Blueprint, name: str, site: Site) -> None:
    """What a branch reads, into `normed`; and by how much its output will join each stream, into `stream_weights`."""
    buffers = site.buffers
    work = (buffers["streams"], buffers["stream_gates"], buffers["stream_low"])
    _mix(program, blueprint, name, site, buffers["residual"], work, buffers["normed"])
    program.matmul(buffers["streams"], [site.weights[name + "_hyper_inject.weight"]], buffers["stream_weights"])


def join_streams(program: Program, blueprint: Blueprint, site: Site) -> None:
    """Every stream += 2 sigmoid(its weight) * the branch's output."""
    branch, part, weights = (site.buffers[n] for n in ("branch", "stream_part", "stream_weights"))
    for j, stream in enumerate(_each(site.buffers["residual"], blueprint)):
        program.sigmoid(branch, weights.columns(j, 1), part)
        program.add(part, stream, stream, 2.0)


def mixed_last(program: Program, blueprint: Blueprint, site: Site) -> None:
    """What the head reads, of the rows that are sampled."""
    buffers = site.buffers
    program.gather(buffers["residual"], buffers["last"])
    work = (buffers["last_streams"], buffers["last_gates"], buffers["last_low"])
    _mix(program, blueprint, "out", site, buffers["last"], work, buffers["last_normed"])


def ngrams(program: Program, blueprint: Blueprint, x: Ngram, i: int, site: Site) -> None:
    """What the last few tokens say, onto every stream: weighed by the stream's own likeness to it, and convolved."""
    w, buffers, at = site.weights, site.buffers, f"layers.{i}."
    rows, keys, queries = replace(buffers["ngram"], cols=x.embedding_width), buffers["streams"], buffers["stream_gates"]
    shape = NgramShape(x.multipliers, x.sizes, x.n_each, x.end_token, x.n_pieces)
    program.ngram(w[at + "ngram.weight"], rows, shape)
    program.matmul(rows, [w[at + "ngram_key.weight"]], keys)
    _norms(program, blueprint, keys, w[at + "ngram_key_norm.weight"], keys)
    program.matmul(rows, [w[at + "ngram_value.weight"]], buffers["ngram_value"])
    _norms(program, blueprint, buffers["residual"], w[at + "ngram_query_norm.weight"], queries)
    program.streams(queries, keys, buffers["ngram_value"], queries)
    _norms(program, blueprint, queries, w[at + "ngram_conv_norm.weight"], keys)
    program.dilated(keys, w[at + "ngram_conv.weight"], queries, (x.conv_width, x.n_tokens), site.ngram_offsets[i])
    program.add(queries, buffers["residual"], buffers["residual"])
