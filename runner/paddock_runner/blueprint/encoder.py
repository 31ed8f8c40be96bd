"""Tensor names of encoders, as Hugging Face and GGUF have them."""

from __future__ import annotations

import re

HF_PREFIXES = ("bert.", "roberta.", "nomic_bert.", "model.")
HF = {
    "embeddings.word_embeddings": "embed", "embeddings.LayerNorm": "embed_norm", "emb_ln": "embed_norm", "embeddings.norm": "embed_norm",
    "pooler.dense": "dense.0", "classifier": "dense.1", "classifier.dense": "dense.0", "classifier.out_proj": "dense.1", "score": "dense.0",
}  # fmt: skip
TABLES = {"embeddings.position_embeddings": "positions.table", "embeddings.token_type_embeddings": "token_types.table"}
HF_LAYER = {
    "attention.self.query": "q", "attention.self.key": "k", "attention.self.value": "v", "attention.output.dense": "o",
    "attention.output.LayerNorm": "attn_post_norm", "intermediate.dense": "up", "output.dense": "down", "output.LayerNorm": "ffn_post_norm",
    "attn.Wqkv": "qkv", "attn.out_proj": "o", "norm1": "attn_post_norm", "norm2": "ffn_post_norm", "mlp.fc11": "up", "mlp.fc12": "gate",
    "mlp.fc2": "down", "mlp.fc1": "up",
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "o", "post_attention_layernorm": "attn_post_norm",
    "post_mlp_layernorm": "ffn_post_norm", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip
OTHERS = ("cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids")
KINDS = {"gamma": "weight", "beta": "bias"}
"""Of old checkpoints."""
LAYER = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.(.+)")
GGUF = {"token_embd": "embed", "token_embd_norm": "embed_norm", "cls": "dense.0", "cls.output": "dense.1"}
GGUF_TABLES = {"position_embd.weight": "positions.table", "token_types.weight": "token_types.table"}
GGUF_LAYER = {
    "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_qkv": "qkv", "attn_output": "o", "attn_output_norm": "attn_post_norm",
    "ffn_up": "up", "ffn_gate": "gate", "ffn_down": "down", "layer_output_norm": "ffn_post_norm",
}  # fmt: skip


def hf_name(name: str, has_classifier: bool) -> str | None:
    """Our name of an encoder's tensor; "" for one that nobody needs; None when it has no translation."""
    within = next((name.removeprefix(p) for p in HF_PREFIXES if name.startswith(p)), name)
    if within.startswith(OTHERS) or (within.startswith("pooler.") and not has_classifier):
        return ""
    stem, _, kind = within.rpartition(".")
    kind = KINDS.get(kind, kind)
    if stem in TABLES:
        return TABLES[stem]
    if match := LAYER.fullmatch(stem):
        return f"layers.{int(match[1])}.{HF_LAYER[match[2]]}.{kind}" if match[2] in HF_LAYER else None
    return f"{HF[stem]}.{kind}" if stem in HF else None


def gguf_name(name: str) -> str | None:
    """Our name of an encoder's tensor in a GGUF file; None when it has no translation."""
    if name in GGUF_TABLES:
        return GGUF_TABLES[name]
    stem, _, kind = name.rpartition(".")
    root, _, rest = stem.partition(".")
    number, _, within = rest.partition(".")
    if root == "blk" and number.isdecimal():
        return f"layers.{int(number)}.{GGUF_LAYER[within]}.{kind}" if within in GGUF_LAYER else None
    return f"{GGUF[stem]}.{kind}" if stem in GGUF else None
