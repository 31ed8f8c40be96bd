"""Makes tests/golden/mtp: a draft layer (MTP) for some tiny models, and what it says along a greedy answer.

A tool for people: needs torch and transformers. Usage: python tests/golden/make_mtp.py
Each folder: mtp.safetensors (f32, the layer's tensors alone) and golden.npz: ids [n] (a prompt of 25 tokens, then the model's own greedy
tokens), logits [n - 1, V]: after position p, of the token two places on, given the token one place on. The layer is transformers' MtpLayer.
"""

from __future__ import annotations

import copy
import pathlib
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer

HERE = pathlib.Path(__file__).resolve().parent
N_PROMPT, N_NEW = 25, 16
NAMES = {"eh_proj.weight": "mtp.fc.weight", "enorm.weight": "mtp.pre_fc_norm_embedding.weight", "hnorm.weight": "mtp.pre_fc_norm_hidden.weight", "post_norm.weight": "mtp.norm.weight"}
BEHIND = {"post_norm.weight": "shared_head.norm.weight"}


def stored(layer: MtpLayer, behind: int) -> dict[str, torch.Tensor]:
    """By the names of published checkpoints, experts one by one. behind: the number of a layer behind the model's own (GLM), or 0 (Qwen)."""
    out: dict[str, torch.Tensor] = {}
    for name, p in (*layer.named_parameters(), *((n, b) for n, b in layer.named_buffers() if n.endswith("correction_bias"))):
        theirs = NAMES.get(name) or name.replace("mtp_block.", "mtp.layers.0.")
        if behind:
            theirs = f"model.layers.{behind}." + BEHIND.get(name, name.removeprefix("mtp_block."))
        if name.endswith("experts.gate_up_proj"):
            for e, w in enumerate(p.data):
                gate, up = w.chunk(2)
                at = theirs.removesuffix("gate_up_proj")
                out[f"{at}{e}.gate_proj.weight"], out[f"{at}{e}.up_proj.weight"] = gate.contiguous().clone(), up.contiguous().clone()
        elif name.endswith("experts.down_proj"):
            at = theirs.removesuffix("down_proj")
            out.update({f"{at}{e}.down_proj.weight": w.contiguous().clone() for e, w in enumerate(p.data)})
        else:
            out[theirs] = p.data.contiguous()
    return out


def make(name: str) -> None:
    """Writes one folder."""
    model = AutoModelForCausalLM.from_pretrained(HERE / "tiny" / name, dtype=torch.float32, attn_implementation="eager").eval()
    config = copy.deepcopy(model.config)
    is_behind = model.config.model_type in ("glm4_moe", "deepseek_v3")
    if is_behind:
        config.first_k_dense_replace = 0
    else:
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
    norm = type(model.model.norm)
    layer = MtpLayer(config, type(model.model.layers[-1]), norm, 0).eval()
    generator = torch.Generator().manual_seed(20261130)
    for key, p in layer.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.data = p.data + 0.2 * noise if "norm" in key and p.ndim == 1 else noise * p.shape[-1] ** -0.5 * 1.5
    ids = np.load(HERE / "tiny" / name / "golden.npz")["ids"][:N_PROMPT].tolist()
    with torch.no_grad():
        for _ in range(N_NEW):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        tokens = torch.tensor([ids])
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        n = hidden.shape[1]
        positions = torch.arange(1, n + 1)[None]
        turns = model.model.rotary_emb(hidden, positions if is_behind else positions[None].expand(3, 1, n))
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        out = layer(model.model.embed_tokens(tokens[:, 1:]), hidden, turns, mask, positions, None)
        logits = model.lm_head(out)[0].numpy()
    folder = HERE / "mtp" / name
    folder.mkdir(parents=True, exist_ok=True)
    tensors = stored(layer, model.config.num_hidden_layers if is_behind else 0)
    save_file(tensors, folder / "mtp.safetensors", {"format": "pt"})
    np.savez_compressed(folder / "golden.npz", ids=np.array(ids, np.int32), logits=logits)
    print(name, f"{logits.std():.3f}", len(tensors))


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ("qwen3.5", "qwen3.5-moe", "glm4-moe"):
        make(wanted)
