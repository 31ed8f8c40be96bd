"""The file layout of Qwen's official FP8 folders, by header alone: names, scales, what is left out, and what the plan says."""

from __future__ import annotations

import json
import struct

import pytest
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.files.checkpoint import open_remote
from paddock_runner.memory.plan import PlanRequest, cuda_facts, plan
from paddock_runner.memory.state import state_layout

MIB = 1 << 20
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
TEXT = {
    "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_parameters": ROPE,
    "model_type": "qwen3_5_text",
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def opened(tensors, config):
    """A checkpoint of which only this header is there. tensors: name -> (dtype, shape)."""
    entries, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        n = {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype]
        for d in shape:
            n *= d
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(entries).encode()
    head = struct.pack("<Q", len(text)) + text
    return open_remote("m", [("m.safetensors", lambda offset, n: head[offset : offset + n].ljust(n, b"\0"), len(head) + at)], json.dumps(config).encode())


def fp8(name, rows, cols):
    return {f"{name}.weight": ("F8_E4M3", (rows, cols)), f"{name}.weight_scale_inv": ("BF16", (-(-rows // 128), -(-cols // 128)))}


def mixer(at, i, m):
    """Attention with a gate in every fourth layer, gated delta net in the others."""
    if i % 4 == 3:
        a = f"{at}self_attn."
        out = {**fp8(a + "q_proj", 2 * 24 * 256, m), **fp8(a + "k_proj", 1024, m), **fp8(a + "v_proj", 1024, m), **fp8(a + "o_proj", m, 24 * 256)}
        return out | {f"{a}{x}_norm.weight": ("BF16", (256,)) for x in "qk"}
    a = f"{at}linear_attn."
    out = {**fp8(a + "in_proj_qkv", 10240, m), **fp8(a + "in_proj_z", 6144, m), **fp8(a + "out_proj", m, 6144)}
    out |= {f"{a}in_proj_{x}.weight": ("BF16", (48, m)) for x in "ab"}
    return out | {a + "conv1d.weight": ("BF16", (10240, 1, 4)), a + "A_log": ("BF16", (48,)), a + "dt_bias": ("BF16", (48,)), a + "norm.weight": ("BF16", (128,))}


def folder(feed_forward, config):
    text = {**TEXT, **config}
    m, root = text["hidden_size"], "model.language_model."
    out = {root + "embed_tokens.weight": ("BF16", (248320, m)), "lm_head.weight": ("BF16", (248320, m)), root + "norm.weight": ("BF16", (m,))}
    for i in range(text["num_hidden_layers"]):
        at = f"{root}layers.{i}."
        out |= {**mixer(at, i, m), **feed_forward(at + "mlp.", m)}
        out |= {f"{at}{x}_layernorm.weight": ("BF16", (m,)) for x in ("input", "post_attention")}
    out |= {"model.visual.blocks.0.attn.qkv.weight": ("BF16", (8, 8)), "mtp.fc.weight": ("BF16", (8, 8)), **fp8("mtp.layers.0.mlp.up_proj", 128, 128)}
    kind = "qwen3_5_moe" if "num_experts" in config else "qwen3_5"
    return opened(out, {"model_type": kind, "text_config": text, "vision_config": {}, "tie_word_embeddings": False, "quantization_config": FP8})


def dense(at, m):
    return {**fp8(at + "gate_proj", 17408, m), **fp8(at + "up_proj", 17408, m), **fp8(at + "down_proj", m, 17408)}


def mixture(at, m):
    out = {at + "gate.weight": ("BF16", (32, m)), at + "shared_expert_gate.weight": ("BF16", (1, m))}
    for name in ("shared_expert", *(f"experts.{e}" for e in range(32))):
        out |= {**fp8(f"{at}{name}.gate_proj", 512, m), **fp8(f"{at}{name}.up_proj", 512, m), **fp8(f"{at}{name}.down_proj", m, 512)}
    return out


@pytest.fixture(scope="module")
def headline():
    checkpoint = folder(dense, {})
    blueprint = read_blueprint(checkpoint)
    return checkpoint, blueprint, tensors_by_name(checkpoint, blueprint)


def test_layers_heads_and_notes_are_those_of_the_config(headline):
    _, b, _ = headline
    assert [x.kind for x in b.layers[:4]] == ["delta", "delta", "delta", "attention"] and b.n_layers == 64
    a = b.layers[3].attention
    assert (a.rope.width, a.rope.theta, a.out_gate, a.qk_norm, a.window) == (64, 1e7, True, True, 0)
    assert b.notes == ("the vision part is not loaded: text only",) and b.has_states and not b.tied_head and b.norm_offset == 1.0


def test_queries_and_gates_are_told_apart_with_their_scales(headline):
    _, _, views = headline
    q, gate = views["layers.3.q.weight"], views["layers.3.q_gate.weight"]
    assert q.shape == gate.shape == (6144, 5120) and q.weight_bytes * 2 == q.n_bytes
    assert (q.pick.first, gate.pick.first, q.pick.length, q.pick.period) == (0, 256, 256, 512)
    assert q.scales.view.shape == (48, 40) and (gate.scales.view.pick.first, gate.scales.view.pick.period) == (2, 4)


def test_formats_are_mixed_per_tensor(headline):
    _, _, views = headline
    assert {views[f"layers.0.{x}.weight"].format for x in ("delta_qkv", "delta_z", "o", "gate", "up", "down")} == {"fp8_e4m3"}
    assert {views[f"layers.0.{x}.weight"].format for x in ("delta_a", "delta_b", "delta_conv", "attn_norm")} == {"bf16"}


def test_plan_has_states_by_slot_and_keys_of_sixteen_layers(headline):
    _, b, views = headline
    found = plan(b, views, PlanRequest(32768, 8, cuda_facts(132), kv_format="f16"))
    assert found.kv_token_bytes == 64 << 10
    assert state_layout(b).slot_bytes / MIB == pytest.approx(149.625, abs=0.01)
    line = next(x for x in found.lines if x.name == "recurrent states")
    assert line.n_bytes == 8 * state_layout(b).slot_bytes
    assert 29e9 < sum(x.n_bytes for x in found.lines if x.group == "weights") < 31e9


def test_folder_with_experts_has_a_view_per_expert():
    config = {"num_hidden_layers": 4, "hidden_size": 2048, "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    checkpoint = folder(mixture, config)
    b = read_blueprint(checkpoint)
    views = tensors_by_name(checkpoint, b)
    x = b.layers[0].experts
    assert (x.n_experts, x.n_used, x.width, x.shared_gate, b.layers[0].feed_forward.width) == (32, 8, 512, True, 512)
    assert views["layers.2.experts.down.31.weight"].scales.view.shape == (16, 4) and views["layers.2.shared_gate.weight"].shape == (1, 2048)
