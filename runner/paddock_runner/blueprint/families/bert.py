"""bert: BERT, RoBERTa and XLM-RoBERTa encoders, and what is made of them (MiniLM, bge, e5, cross-encoders).

Source: https://github.com/huggingface/transformers, models/bert/modeling_bert.py; GGUF keys as in llama.cpp, llm_build_bert.
"""

from __future__ import annotations

from ...errors import FileError, UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Attention, Blueprint, FeedForward, Layer
from ..sizes import MAX_LAYERS

ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "", "silu": "silu"}
ROBERTA_OFFSET = 2
"""RoBERTa counts positions from the padding token's id, 1, on."""


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "bert.*" keys. Raises: FileError, UnsupportedError."""
    f = checkpoint.fields
    rows = {name: view.shape[0] for name, view in checkpoint.tensors.items() if len(view.shape) == 2}
    if "token_embd.weight" not in rows:
        raise FileError(f"{checkpoint.path}: tensor token_embd.weight is missing", path=str(checkpoint.path), field="token_embd.weight")
    n_heads = f.integer(f"{arch}.attention.head_count", low=1, high=4096)
    n_layers = f.integer(f"{arch}.block_count", low=1, high=MAX_LAYERS)
    width = f.integer(f"{arch}.embedding_length", low=1, high=1 << 20)
    layer = _layer(width, n_heads, f.integer(f"{arch}.feed_forward_length", low=1, high=1 << 24), "gelu_erf", checkpoint.path.name)
    ctx = f.integer(f"{arch}.context_length", low=1, high=1 << 31)
    types = rows.get("token_types.weight", 0)
    return _blueprint(rows["token_embd.weight"], width, ctx, (layer,) * n_layers, f.number(f"{arch}.attention.layer_norm_epsilon"), (ctx, 0), types, f.text("general.name", ""))


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type bert, roberta or xlm-roberta. Raises: FileError, UnsupportedError."""
    config.choice("position_embedding_type", "absolute", ("absolute",))
    if config.flag("is_decoder", False):
        raise UnsupportedError(f"{config.where}: a BERT decoder is not supported; encoders are", what="bert decoder")
    act = config.choice("hidden_act", "gelu", tuple(k for k, v in ACTIVATIONS.items() if v))
    width, n_heads = config.integer("hidden_size", low=1, high=1 << 20), config.integer("num_attention_heads", low=1, high=4096)
    layer = _layer(width, n_heads, config.integer("intermediate_size", low=1, high=1 << 24), ACTIVATIONS[act], config.where)
    offset = 0 if config.text("model_type", "bert") == "bert" else ROBERTA_OFFSET
    rows = config.integer("max_position_embeddings", low=offset + 1, high=1 << 24)
    return _blueprint(
        config.integer("vocab_size", low=1, high=1 << 24), width, rows - offset, (layer,) * config.integer("num_hidden_layers", low=1, high=MAX_LAYERS),
        config.number("layer_norm_eps", 1e-12), (rows, offset), config.integer("type_vocab_size", 2, high=64), checkpoint.path.name,
    )  # fmt: skip


def _layer(width: int, n_heads: int, ff_width: int, activation: str, where: str) -> Layer:
    if width % n_heads:
        raise FileError(f"{where}: a width of {width} is no multiple of {n_heads} heads", field="num_attention_heads")
    d = width // n_heads
    attention = Attention(n_heads, n_heads, d, d**-0.5, None, d, qkv_bias=True, out_bias=True, causal=False)
    return Layer(attention, FeedForward(ff_width, activation, True, is_gated=False), pre_norms=False, residual_norms=True)


def _blueprint(
    n_vocab: int, width: int, ctx: int, layers: tuple[Layer, ...], eps: float, positions: tuple[int, int], n_types: int, name: str
) -> Blueprint:
    return Blueprint(
        "bert", n_vocab, width, ctx, layers, eps, False, norm="layer", norm_bias=True, embed_norm=True, has_out_norm=False,
        n_positions=positions[0], position_offset=positions[1], n_token_types=n_types, name=name,
    )  # fmt: skip
