"""nomic-bert: Nomic Embed 1 and 1.5: a BERT with rotary positions, gated feed-forwards and no biases but the norms'.

Source: https://github.com/huggingface/transformers, models/nomic_bert/modeling_nomic_bert.py; older folders have GPT-2's field names.
"""

from __future__ import annotations

from ...errors import FileError, UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Attention, Blueprint, FeedForward, Layer, Rope
from ..sizes import MAX_LAYERS, rope_base

OLD_NAMES = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
}  # fmt: skip
THETA = 1000.0


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "nomic-bert.*" keys. Raises: FileError, UnsupportedError."""
    f = checkpoint.fields
    if f.integer(f"{arch}.expert_count", 0):
        raise UnsupportedError(f"{checkpoint.path}: {arch} with experts is not supported", what="nomic-bert experts")
    rows = {name: view.shape[0] for name, view in checkpoint.tensors.items() if len(view.shape) == 2}
    if "token_embd.weight" not in rows:
        raise FileError(f"{checkpoint.path}: tensor token_embd.weight is missing", path=str(checkpoint.path), field="token_embd.weight")
    settings = {
        "vocab_size": rows["token_embd.weight"], "type_vocab_size": rows.get("token_types.weight", 0), "rope_theta": f.number(f"{arch}.rope.freq_base", THETA),
        "layer_norm_eps": f.number(f"{arch}.attention.layer_norm_epsilon"),
    }  # fmt: skip
    names = {"hidden_size": "embedding_length", "num_attention_heads": "attention.head_count", "num_hidden_layers": "block_count"}
    names |= {"intermediate_size": "feed_forward_length", "max_position_embeddings": "context_length"}
    settings |= {ours: f.integer(f"{arch}.{theirs}", low=1) for ours, theirs in names.items()}
    return _blueprint(Fields(settings, f.where), f.text("general.name", ""))


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type nomic_bert. Raises: FileError, UnsupportedError."""
    fields = Fields({**config, **{new: config[old] for old, new in OLD_NAMES.items() if old in config}}, config.where, "field")
    for key, wanted in (("prenorm", False), ("qkv_proj_bias", False), ("use_rms_norm", False), ("rotary_emb_interleaved", False)):
        if fields.flag(key, wanted) != wanted:
            raise UnsupportedError(f"{config.where}: field {key} is {not wanted}, which is not supported", what=key)
    if fields.integer("moe_every_n_layers", 0) > 0 or fields.integer("num_experts", 0) > 0:
        raise UnsupportedError(f"{config.where}: nomic_bert with experts is not supported", what="nomic-bert experts")
    if fields.number("rotary_emb_fraction", 1.0) != 1.0:
        raise UnsupportedError(f"{config.where}: partial rotary positions are not supported in nomic_bert", what="rotary_emb_fraction")
    fields.choice("activation_function", "swiglu", ("swiglu", "silu"))
    if "rope_parameters" in fields:
        fields = fields.with_defaults({"rope_theta": fields.section("rope_parameters").number("rope_theta", THETA)})
    return _blueprint(fields.with_defaults({"type_vocab_size": 2}), checkpoint.path.name)


def _blueprint(f: Fields, name: str) -> Blueprint:
    width, n_heads = f.integer("hidden_size", low=1, high=1 << 20), f.integer("num_attention_heads", low=1, high=4096)
    if width % n_heads or width // n_heads % 2:
        raise FileError(f"{f.where}: a width of {width} does not give {n_heads} heads of even width", field="num_attention_heads")
    d = width // n_heads
    attention = Attention(n_heads, n_heads, d, d**-0.5, Rope(rope_base(f, "rope_theta", THETA), d), d, causal=False)
    layer = Layer(attention, FeedForward(f.integer("intermediate_size", low=1, high=1 << 24)), pre_norms=False, residual_norms=True)
    return Blueprint(
        "nomic-bert", f.integer("vocab_size", low=1, high=1 << 24), width, f.integer("max_position_embeddings", low=1, high=1 << 31),
        (layer,) * f.integer("num_hidden_layers", low=1, high=MAX_LAYERS), f.number("layer_norm_eps", 1e-12), False, norm="layer", norm_bias=True,
        embed_norm=True, has_out_norm=False, n_token_types=f.integer("type_vocab_size", high=64), name=name,
    )  # fmt: skip
