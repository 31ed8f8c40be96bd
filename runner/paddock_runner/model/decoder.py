"""The forward pass, once, for every family: blueprint and weights in, a recorded program out.

embed -> layers (attention, feed-forward) -> norm -> head -> sample. Knows no family names and no requests.
"""

from __future__ import annotations

from dataclasses import replace

from ..blueprint.blueprint import Attention, Blueprint, Experts, Layer, Rope
from ..errors import UnsupportedError
from ..pack import abi
from ..pack.device import Device, f32_tensor
from ..pack.program import PLAIN, Epilogue, Heads, Program, Rotation, View
from ..pack.tensor import Tensor
from .draft import draft_token
from .inputs import input_branch, layer_inputs
from .latent import latent_attention
from .moe import experts, experts_beside, weigh_shared
from .pooled import pooled_rows
from .recurrent import delta_net, mamba, settle, short_conv
from .site import Site, norm
from .sparse import sparse_attention
from .streams import join_streams, mixed_last, ngrams, read_streams, start_streams


def rotations(device: Device, blueprint: Blueprint, max_ctx_tokens: int = 0) -> dict[Rope, Rotation]:
    """One frequency vector on the device per distinct rope. frequency[i] = theta^(-2i/width) / factor[i]. Source: Su et al. 2021, eq. 15.

    max_ctx_tokens: of the runner: a rope with long factors has them for all tokens when a sequence may outgrow its original context.
    """
    found: dict[Rope, Rotation] = {}
    for rope in dict.fromkeys(layer.attention.rope for layer in blueprint.layers):
        if rope is not None:
            n = rope.width // 2
            is_long = bool(rope.long_factors) and max_ctx_tokens > rope.original_ctx_tokens
            factors = (rope.long_factors if is_long else rope.factors) or (1.0,) * n
            values = [rope.theta ** (-2.0 * i / rope.width) / factors[i] for i in range(n)]
            found[rope] = Rotation(f32_tensor(device, values, "vectors"), rope.width, rope.layout, rope.magnitude)
    return found


def trace(blueprint: Blueprint, site: Site) -> Program:
    """The program of one step: any mix of prefill and decode rows."""
    program, buffers, weights = Program(), site.buffers, site.weights
    program.prepare()
    if blueprint.n_streams > 1:
        return _trace_streams(program, blueprint, site)
    added = (_table(site, "positions.table", blueprint), _table(site, "token_types.table", blueprint))
    program.embed(weights["embed.weight"], buffers["residual"], blueprint.embed_scale, added, blueprint.position_offset)
    if blueprint.embed_norm:
        norm(program, blueprint, site, "embed_norm", buffers["residual"], buffers["residual"])
    if blueprint.input_width:
        layer_inputs(program, blueprint, site)
    _read(program, blueprint, _norms(blueprint)[0], site)
    norms, n_done = _norms(blueprint), 0
    for i, layer in enumerate(blueprint.layers):
        if layer.kind not in ("attention", "delta", "conv", "mamba", "none"):
            raise UnsupportedError(
                f"layer {i} of {blueprint.family} is a {layer.kind} layer, which the decoder does not know"
            )
        at = f"layers.{i}."
        if layer.kind != "none":
            _attention(program, blueprint, layer, i, site)
            n_done += 1
            _join(program, blueprint, layer, at + "attn_post_norm", norms[n_done], site, n_done + 1 == len(norms))
        if layer.has_feed_forward:
            _feed_forward(program, blueprint, layer, at, site)
            n_done += 1
            _join(program, blueprint, layer, at + "ffn_post_norm", norms[n_done], site, n_done + 1 == len(norms))
        if blueprint.input_width:
            input_branch(program, blueprint, i, site)
            n_done += 1
            _join(program, blueprint, layer, at + "input_post_norm", norms[n_done], site, n_done + 1 == len(norms))
    if blueprint.pooling is not None:
        pooled_rows(program, blueprint, site)
    else:
        _head(program, blueprint, site)
    if blueprint.max_guesses:
        settle(program, site, blueprint.max_guesses)
    if blueprint.draft is not None:
        draft_token(program, blueprint, blueprint.draft, site, (_attention, _feed_forward))
    return program


def _trace_streams(program: Program, blueprint: Blueprint, site: Site) -> Program:
    """The forward pass of a model with several residual streams."""
    start_streams(program, blueprint, site)
    for i, layer in enumerate(blueprint.layers):
        at = f"layers.{i}."
        if layer.ngram is not None:
            ngrams(program, blueprint, layer.ngram, i, site)
        read_streams(program, blueprint, at + "attn", site)
        _attention(program, blueprint, layer, i, site)
        join_streams(program, blueprint, site)
        read_streams(program, blueprint, at + "ffn", site)
        _feed_forward(program, blueprint, layer, at, site)
        join_streams(program, blueprint, site)
    mixed_last(program, blueprint, site)
    _logits(program, blueprint, site)
    return program


def _norms(blueprint: Blueprint) -> list[str]:
    """Names of the norms before every branch, in order; at the end one that does not exist."""
    found = []
    for i, layer in enumerate(blueprint.layers):
        found += [f"layers.{i}.attn_norm"] if layer.kind != "none" else []
        found += [f"layers.{i}.ffn_norm"] if layer.has_feed_forward else []
        found += [f"layers.{i}.input_norm"] if blueprint.input_width else []
    return [*found, "end"]


def _table(site: Site, name: str, blueprint: Blueprint) -> Tensor | None:
    """Rows that the embedding adds, [n, M] f32; None when there are none."""
    flat = site.weights.get(name)
    return Tensor(flat.data, flat.cols // blueprint.model_width, blueprint.model_width, flat.format) if flat is not None else None


def _attention(program: Program, blueprint: Blueprint, layer: Layer, i: int, site: Site) -> None:
    a, w, at, buffers = layer.attention, site.weights, f"layers.{i}.", site.buffers
    if layer.kind != "attention" or a.latent is not None:
        if a.latent is not None:
            out = latent_attention(program, a, i, site)
        elif layer.delta is not None:
            out = delta_net(program, layer.delta, i, site, blueprint.norm_eps, blueprint.max_guesses)
        elif layer.conv is not None:
            out = short_conv(program, layer.conv, i, site, blueprint.max_guesses)
        elif layer.mamba is not None:
            out = mamba(program, layer.mamba, i, site, blueprint.norm_eps, blueprint.max_guesses)
        _project(program, layer, out, w[at + "o.weight"], w.get(at + "o.bias"), site, blueprint.residual_scale)
        return
    qkv, q = _qkv_and_queries(a, i, site)
    parts = [at + "qkv"] if at + "qkv.weight" in w else [at + "q", at + "k", at + "k" if a.values_are_keys else at + "v"]
    if a.kv_from is not None:
        parts = [at + "q"]
    program.matmul(buffers["normed"], [w[p + ".weight"] for p in parts], qkv, [w.get(p + ".bias") for p in parts])
    gate = _narrow(buffers["attention_gate"], a.gate_width) if a.out_gate else None
    if gate is not None:  # beside what else reads the norm
        program.matmul(buffers["normed"], [w[at + "q_gate.weight"]], gate)
    heads = Heads(
        a.n_heads, a.n_kv_heads, a.head_width, a.values_width, *site.kv_offsets[i], site.kv_formats[i],
        abi.PK_PARTS_QKV if a.kv_from is None else abi.PK_PARTS_Q, site.gains.get(i),
    )  # fmt: skip
    if a.qk_norm_all:
        k = qkv.columns(q.cols, a.n_kv_heads * a.head_width)
        for part, name in ((qkv.columns(0, q.cols), "q_norm.weight"), (k, "k_norm.weight")):
            program.norm(part, w[at + name], part, blueprint.norm_eps)
    norms = [w.get(f"{at}{name}_norm.weight") if has else None for name, has in (("q", a.qk_norm), ("k", a.qk_norm), ("v", a.v_norm))]
    site.use_pool(program, i, True)
    program.qkv(qkv, q, heads, norms, site.rotations[a.rope] if a.rope else None, blueprint.norm_eps)
    heads = replace(heads, parts=abi.PK_PARTS_QKV)
    out = _narrow(buffers["attention_out"], a.n_heads * a.values_width)
    if a.index is not None:
        sparse_attention(program, blueprint, a, a.index, heads, (q, out), i, site)
    else:
        program.attention(q, out, heads, a.scale, View(a.window, not a.causal), a.softcap, w[at + "sinks.weight"] if a.sinks else None)
    site.use_pool(program, i, False)
    if gate is not None:
        (program.softplus if a.gate_act == "softplus" else program.sigmoid)(out, gate, out)
    _project(program, layer, out, w[at + "o.weight"], w.get(at + "o.bias"), site, blueprint.residual_scale)


def _qkv_and_queries(a: Attention, i: int, site: Site) -> tuple[Tensor, Tensor]:
    """Where the projections of layer i go, and its queries once they are rotated: into the same rows, but for those whose keys are kept in F16 beside activations of 16 bits (memory/arena.py)."""
    qkv, n = _narrow(site.buffers["qkv"], a.qkv_width), a.n_heads * a.head_width
    if "queries" not in site.buffers:
        return qkv, qkv.columns(0, n)
    if site.kv_formats[i] == abi.PK_F16 and a.index is None:
        return qkv, _narrow(site.buffers["queries"], n)
    rows = replace(qkv, format=site.buffers["normed"].format)
    return rows, rows.columns(0, n)


def _feed_forward(program: Program, blueprint: Blueprint, layer: Layer, at: str, site: Site) -> None:
    f, w, buffers = layer.feed_forward, site.weights, site.buffers
    x = layer.experts
    is_added = x is not None and not x.is_beside
    if is_added:
        experts(program, layer, at, site, blueprint.residual_scale, _later_experts(blueprint, at, site))
        if not f.width:
            return
    hidden = _narrow(buffers["feed_forward"], f.width)
    biases = [w.get(at + "gate.bias"), w.get(at + "up.bias")]
    if f.is_gated:
        program.matmul(buffers["normed"], [w[at + "gate.weight"], w[at + "up.weight"]], hidden, biases, Epilogue(act=f.activation))
    else:
        program.matmul(buffers["normed"], [w[at + "up.weight"]], hidden, biases[1:])
        program.gate(hidden, hidden, f.activation)
    if x is not None and x.shared_gate:
        weigh_shared(program, hidden, at, site)
    _project(
        program, layer, hidden, w[at + "down.weight"], w.get(at + "down.bias"), site, blueprint.residual_scale, is_added
    )
    if x is not None and x.is_beside:
        experts_beside(program, x, at, site, blueprint.norm_eps)


def _later_experts(blueprint: Blueprint, at: str, site: Site) -> tuple[str, Experts] | None:
    """The next layer with experts, when both this one's and its own lie in host memory. Experts beside a feed-forward have a router of their own kind."""
    for i in range(int(at.split(".")[1]) + 1, blueprint.n_layers) if at + "experts." in site.caches else ():
        x, later = blueprint.layers[i].experts, f"layers.{i}."
        if x is not None:
            return (later, x) if later + "experts." in site.caches and not x.is_beside else None
    return None


def _project(
    program: Program,
    layer: Layer,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    site: Site,
    scale: float,
    is_added: bool = False,
) -> None:
    """The product that ends a branch: straight onto the residual, or (with post norms) into the branch buffer, or onto what is there."""
    residual, branch = site.buffers["residual"], site.buffers["branch"]
    if layer.joins_later:
        program.matmul(x, [weight], branch, [bias], Epilogue(add=branch) if is_added else PLAIN)
    else:
        program.matmul(x, [weight], residual, [bias], Epilogue(add=residual, scale=scale))


def _read(program: Program, blueprint: Blueprint, name: str, site: Site) -> None:
    """What a branch reads: the residual, normed, or (layers without norms before branches) as it is."""
    if name + ".weight" in site.weights:
        norm(program, blueprint, site, name, site.buffers["residual"], site.buffers["normed"])
    else:
        program.copy(site.buffers["residual"], site.buffers["normed"])


def _join(
    program: Program,
    blueprint: Blueprint,
    layer: Layer,
    post: str,
    next_norm: str,
    site: Site,
    is_last: bool = False,
) -> None:
    """Adds a post-normed branch to the residual, and prepares what follows (after the last layer, the head norms its own rows)."""
    following = site.weights.get(next_norm + ".weight")
    if layer.residual_norms:
        norm(program, blueprint, site, post, site.buffers["residual"], site.buffers["residual"])
    if not layer.post_norms:
        if not is_last:
            _read(program, blueprint, next_norm, site)
        return
    residual, normed, branch = site.buffers["residual"], site.buffers["normed"], site.buffers["branch"]
    out = normed if following is not None else None
    post_eps, w = blueprint.post_norm_eps or blueprint.norm_eps, site.weights[post + ".weight"]
    is_end = layer.out_scale != 1.0 and post.endswith(".input_post_norm" if blueprint.input_width else ".ffn_post_norm")
    if post_eps == blueprint.norm_eps and not is_end:
        program.norm(branch, following, out, post_eps, residual, w, blueprint.residual_scale)
    else:
        program.norm(branch, None, None, post_eps, residual, w, blueprint.residual_scale)
        if is_end:
            # residual + residual * (scale - 1): the norm's own sum, so that it costs no pass of its own.
            program.norm(residual, following, out, blueprint.norm_eps, residual, None, layer.out_scale - 1.0)
        elif out is not None:
            program.norm(residual, following, out, blueprint.norm_eps)
    if following is None and not is_last:
        program.copy(residual, normed)


def _head(program: Program, blueprint: Blueprint, site: Site) -> None:
    w, buffers = site.weights, site.buffers
    program.gather(buffers["residual"], buffers["last"])
    program.norm(buffers["last"], w["out_norm.weight"], buffers["last_normed"], blueprint.norm_eps)
    _logits(program, blueprint, site)


def _logits(program: Program, blueprint: Blueprint, site: Site) -> None:
    """From the last rows, normed, to the tokens drawn."""
    w, buffers = site.weights, site.buffers
    head = w["embed.weight"] if blueprint.tied_head else w["head.weight"]
    after = Epilogue(scale=blueprint.logit_scale, softcap=blueprint.logit_softcap)
    program.matmul(buffers["last_normed"], [head], buffers["logits"], (), after)
    program.sample(buffers["logits"])
    program.commit()


def _narrow(buffer: Tensor, cols: int) -> Tensor:
    """The buffer with fewer columns, rows packed densely."""
    return Tensor(buffer.data, buffer.rows, cols, buffer.format)
