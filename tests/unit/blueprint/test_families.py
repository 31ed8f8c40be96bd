"""Families read their numbers from GGUF and from Hugging Face, and refuse by name what is not theirs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from paddock_runner.blueprint.blueprint import Rope
from paddock_runner.blueprint.families import FAMILIES
from paddock_runner.blueprint.names import expected_shapes, tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.blueprint.rope import llama3_factors, yarn_factors
from paddock_runner.errors import FileError, UnsupportedError
from paddock_runner.files.checkpoint import open_checkpoint

from tests.checkpoint_bytes import LLAMA, checkpoint, gguf_model, llama_shapes, safetensors


def gguf_read(metadata, shapes=None):
    return read_blueprint(checkpoint(gguf_model(metadata, shapes or llama_shapes())))


def renamed(arch, **more):
    keys = {k.replace("llama", arch): (arch if v == "llama" else v) for k, v in LLAMA.items()}
    return {**keys, **{f"{arch}.{k.replace('__', '.')}": v for k, v in more.items()}}


def test_llama_gguf_has_interleaved_rope_and_defaults():
    b = gguf_read(LLAMA)
    a = b.layers[0].attention
    assert (b.family, b.n_vocab, b.model_width, b.n_layers, b.tied_head, b.norm_offset, b.embed_scale) == ("llama", 40, 64, 2, False, 0.0, 1.0)
    assert a.rope == Rope(10000.0, 16, "interleaved") and (a.n_heads, a.n_kv_heads, a.head_width, a.scale, a.window) == (4, 2, 16, 0.25, 0)
    assert not a.qkv_bias and not a.qk_norm and b.layers[0].feed_forward.activation == "silu"


def test_missing_output_matrix_means_a_tied_head():
    assert gguf_read(LLAMA, llama_shapes(tied=True)).tied_head


def test_biases_are_seen_by_their_tensors():
    shapes = {**llama_shapes(), **{f"blk.{i}.attn_{n}.bias": (w,) for i in range(2) for n, w in (("q", 64), ("k", 32), ("v", 32))}}
    opened = checkpoint(gguf_model(LLAMA, shapes))
    b = read_blueprint(opened)
    assert b.layers[0].attention.qkv_bias and not b.layers[0].attention.out_bias
    assert tensors_by_name(opened, b)["layers.1.k.bias"].shape == (32,)


def test_stored_rope_factors_are_read(tmp_path):
    data = bytearray(gguf_model(LLAMA, {**llama_shapes(), "rope_freqs.weight": (8,)}))
    opened = checkpoint(bytes(data))
    assert read_blueprint(opened).notes == ("rope factors are in a tensor that was not read",)
    view = opened.tensors["rope_freqs.weight"]
    data[view.offset : view.offset + 32] = np.arange(1, 9, dtype="<f4").tobytes()
    (tmp_path / "m.gguf").write_bytes(data)
    b = read_blueprint(open_checkpoint(tmp_path / "m.gguf"))
    assert b.layers[0].attention.rope.factors == tuple(range(1, 9)) and b.notes == ()
    data[view.offset : view.offset + 4] = bytes(4)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(FileError, match=r"rope_freqs.weight holds 0.0 to 8.0, expected positive"):
        read_blueprint(open_checkpoint(tmp_path / "m.gguf"))


def test_linear_and_yarn_scaling_become_factors():
    linear = gguf_read({**LLAMA, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert linear.layers[0].attention.rope.factors == (4.0,) * 8
    yarn = gguf_read({**LLAMA, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 64})
    rope = yarn.layers[0].attention.rope
    assert rope.factors == yarn_factors(10000.0, 16, 4.0, 64) and rope.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    with pytest.raises(UnsupportedError, match="rope scaling 'longrope' is not supported; supported: default, linear, llama3, yarn, longrope"):
        gguf_read({**LLAMA, "llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0})


def test_llama3_factors_equal_the_published_recipe():
    i = np.arange(0, 128, 2)
    wave = 2 * math.pi * 5e5 ** (i / 128)
    want = np.where(wave < 8192 / 4, 1.0, np.where(wave > 8192, 8.0, 1 / ((1 - (8192 / wave - 1) / 3) / 8 + (8192 / wave - 1) / 3)))
    assert np.allclose(llama3_factors(5e5, 128, 8.0, 1.0, 4.0, 8192), want, rtol=1e-12)


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones():
    factors = yarn_factors(1e6, 128, 4.0, 32768)
    assert factors[0] == 1.0 and factors[-1] == 4.0 and list(factors) == sorted(factors)


def test_qwen2_has_biases_and_neox_rope():
    a = gguf_read(renamed("qwen2")).layers[0].attention
    assert a.qkv_bias and not a.qk_norm and a.rope.layout == "neox"


def test_qwen3_has_norms_on_q_and_k_and_an_explicit_head_width():
    b = gguf_read(renamed("qwen3", attention__key_length=32, attention__value_length=32))
    a = b.layers[0].attention
    assert a.qk_norm and not a.qkv_bias and (a.head_width, a.v_width, a.rope.width, a.scale) == (32, 32, 32, 32**-0.5)
    assert expected_shapes(b)["layers.0.q_norm.weight"] == (32,) and expected_shapes(b)["layers.0.o.weight"] == (64, 128)


def gemma(**more):
    return gguf_read(renamed("gemma3", **{"attention__sliding_window": 8, "block_count": 12, **more}), llama_shapes(12, tied=True))


def test_gemma3_has_five_windows_to_one_global_layer():
    b = gemma()
    assert [x.attention.window for x in b.layers] == [8, 8, 8, 8, 8, 0] * 2
    assert {x.attention.rope.theta for x in b.layers if x.attention.window} == {10000.0}
    assert b.embed_scale == 8.0 and b.norm_offset == 0.0 and b.tied_head
    assert all(x.post_norms and x.attention.qk_norm and x.feed_forward.activation == "gelu_tanh" for x in b.layers)


def test_gemma3_scales_only_the_global_rope():
    b = gemma(rope__freq_base=1e6, rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert b.layers[0].attention.rope.factors == () and b.layers[5].attention.rope == Rope(1e6, 16, "neox", (8.0,) * 8)


def test_gemma3_pattern_may_be_a_period_or_flags():
    assert [x.attention.window for x in gemma(attention__sliding_window_pattern=2).layers[:4]] == [8, 0, 8, 0]
    flags = [True, False, False] * 4
    assert [x.attention.window > 0 for x in gemma(attention__sliding_window_pattern=flags).layers] == flags
    with pytest.raises(FileError, match="sliding_window_pattern"):
        gemma(attention__sliding_window_pattern=[True])


def test_widest_gemma3_takes_its_scale_from_the_model_width():
    b = gguf_read(renamed("gemma3", attention__sliding_window=8, block_count=62, attention__key_length=8), llama_shapes(62, tied=True))
    assert b.layers[0].attention.scale == 16**-0.5


def hf_read(config, names=("model.embed_tokens.weight",)):
    entries = {n: {"dtype": "BF16", "shape": [1], "data_offsets": [2 * i, 2 * i + 2]} for i, n in enumerate(names)}
    return read_blueprint(checkpoint(safetensors(entries, 2 * len(names)), "m.safetensors", config))


HF = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 40, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_hugging_face_llama_has_neox_rope_and_an_untied_head_by_default():
    b = hf_read(HF)
    assert b.layers[0].attention.rope == Rope(10000.0, 16) and not b.tied_head and b.n_vocab == 40


def test_rope_is_read_from_old_and_new_config_fields():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = hf_read({**HF, "rope_theta": 5e5, "rope_scaling": scaling})
    new = hf_read({**HF, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old.layers == new.layers and old.layers[0].attention.rope.factors == llama3_factors(5e5, 16, 8.0, 1.0, 4.0, 32)


def test_mistral_window_applies_to_every_layer():
    assert [x.attention.window for x in hf_read({**HF, "model_type": "mistral", "sliding_window": 9}).layers] == [9, 9]


def test_qwen2_window_applies_where_the_config_switches_it_on():
    on = {**HF, "model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
    assert [x.attention.window for x in hf_read(on).layers] == [0, 9]
    assert [x.attention.window for x in hf_read({**on, "use_sliding_window": False}).layers] == [0, 0]
    assert [x.attention.window for x in hf_read({**on, "layer_types": ["sliding_attention", "full_attention"]}).layers] == [9, 0]


def test_text_part_of_a_multimodal_gemma3_is_read_with_published_defaults():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    b = hf_read({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    a = b.layers[5].attention
    assert (a.n_heads, a.n_kv_heads, a.head_width, a.rope.theta, a.rope.factors[0], a.window) == (8, 4, 256, 1e6, 8.0, 0)
    assert (b.n_vocab, b.max_ctx_tokens, b.norm_offset, b.tied_head, b.embed_scale) == (262208, 131072, 1.0, True, math.sqrt(2560))
    assert b.layers[0].attention.window == 1024 and b.notes == ("the vision part is not loaded: text only",)


def test_bidirectional_gemma3_looks_half_its_window_to_each_side_and_gives_vectors():
    b = hf_read({**HF, "model_type": "gemma3_text", "use_bidirectional_attention": True, "sliding_window": 512})
    assert not b.is_causal and b.layers[0].attention.window == 257 and b.pooling.pool == "mean" and b.needs_whole_prompts
    assert "nothing says how vectors are pooled" in b.notes[-1]


def test_other_activation_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="hidden_act is 'relu'"):
        hf_read({**HF, "hidden_act": "relu"})


@pytest.mark.parametrize("arch, near", [("qwen3moes", "qwen3moe"), ("lama", "llama"), ("gemma4n", "gemma4"), ("mamba", ""), ("x" * 500, "")])
def test_unknown_architecture_names_the_nearest_and_the_list(arch, near):
    with pytest.raises(UnsupportedError) as caught:
        gguf_read({**LLAMA, "general.architecture": arch})
    assert ("the nearest is " + near in str(caught.value)) == bool(near)
    assert ", granitemoe, " in str(caught.value) and len(str(caught.value)) < 500


def test_experts_in_a_dense_family_are_refused():
    with pytest.raises(UnsupportedError, match="qwen3 with 8 experts"):
        gguf_read(renamed("qwen3", expert_count=8))


def test_llama_gguf_with_experts_is_mixtral():
    shapes = {k: v for k, v in llama_shapes().items() if ".ffn_" not in k or "norm" in k}
    for i in range(2):
        shapes |= {f"blk.{i}.ffn_gate_inp.weight": (4, 64), f"blk.{i}.ffn_down_exps.weight": (4, 64, 96)}
        shapes |= {f"blk.{i}.ffn_{name}_exps.weight": (4, 96, 64) for name in ("gate", "up")}
    opened = checkpoint(gguf_model({**LLAMA, "llama.expert_count": 4, "llama.expert_used_count": 2}, shapes))
    b = read_blueprint(opened)
    x = b.layers[0].experts
    assert (b.family, x.n_experts, x.n_used, x.width, x.score, x.is_normalised, b.layers[0].feed_forward.width) == ("mixtral", 4, 2, 96, "softmax", True, 0)
    assert b.layers[0].attention.rope.layout == "interleaved"
    found = tensors_by_name(opened, b)
    third = found["layers.1.experts.down.3.weight"]
    assert third.shape == (64, 96) and third.offset - found["layers.1.experts.down.0.weight"].offset == 3 * 64 * 96 * 4
    assert len(found) == len(expected_shapes(b)) == 3 + 2 * (6 + 1 + 12)


def test_more_experts_used_than_there_are_is_refused():
    with pytest.raises(FileError, match="num_experts_per_tok is 9 of 4 experts"):
        gguf_read({**LLAMA, "llama.expert_count": 4, "llama.expert_used_count": 9})


def test_families_are_listed_once():
    names = [n for f in FAMILIES for n in f.gguf]
    assert len(names) == len(set(names)) and all(f.examples for f in FAMILIES)


def test_missing_tensor_is_named_by_our_name():
    shapes = {k: v for k, v in llama_shapes().items() if k != "blk.1.ffn_up.weight"}
    opened = checkpoint(gguf_model(LLAMA, shapes))
    with pytest.raises(FileError, match=r"1 of 21 tensors are missing: layers.1.up.weight"):
        tensors_by_name(opened, read_blueprint(opened))


def test_extra_tensor_is_named_by_its_own_name():
    opened = checkpoint(gguf_model(LLAMA, {**llama_shapes(), "blk.0.ffn_gate_exps.weight": (4, 64)}))
    with pytest.raises(UnsupportedError, match=r"1 tensors have no place in a llama model, among them blk.0.ffn_gate_exps.weight"):
        tensors_by_name(opened, read_blueprint(opened))


def test_wrong_shape_is_named_with_both_shapes():
    opened = checkpoint(gguf_model(LLAMA, {**llama_shapes(), "blk.0.attn_k.weight": (64, 64)}))
    with pytest.raises(FileError, match=r"blk.0.attn_k.weight has the shape \[64, 64\], expected \[32, 64\]"):
        tensors_by_name(opened, read_blueprint(opened))


def test_fused_qkv_takes_the_place_of_three():
    shapes = {k: v for k, v in llama_shapes().items() if not k.startswith("blk.0.attn_") or k.endswith(("norm.weight", "output.weight"))}
    opened = checkpoint(gguf_model(LLAMA, {**shapes, "blk.0.attn_qkv.weight": (128, 64)}))
    found = tensors_by_name(opened, read_blueprint(opened))
    assert found["layers.0.qkv.weight"].shape == (128, 64) and "layers.0.q.weight" not in found and "layers.1.q.weight" in found


def test_both_file_kinds_of_the_same_model_have_the_same_names(tmp_path):
    opened = checkpoint(gguf_model(LLAMA, llama_shapes()))
    ours = tensors_by_name(opened, read_blueprint(opened))
    hf = {"embed": "model.embed_tokens", "out_norm": "model.norm", "head": "lm_head", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    parts = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    entries, at = {}, 0
    for name, view in ours.items():
        pieces = name.removesuffix(".weight").split(".")
        theirs = hf[pieces[0]] if len(pieces) == 1 else f"model.layers.{pieces[1]}.{hf.get(pieces[2]) or parts[pieces[2]]}"
        entries[f"{theirs}.weight"] = {"dtype": "F32", "shape": list(view.shape), "data_offsets": [at, at + view.n_bytes]}
        at += view.n_bytes
    (tmp_path / "model.safetensors").write_bytes(safetensors(entries, at))
    (tmp_path / "config.json").write_text(json.dumps(HF))
    folder = open_checkpoint(tmp_path)
    again = tensors_by_name(folder, read_blueprint(folder))
    assert {n: v.shape for n, v in again.items()} == {n: v.shape for n, v in ours.items()}
    prefixed = {n.replace("model.", "language_model.model.", 1) if n.startswith("model.") else f"language_model.{n}": e for n, e in entries.items()}
    prefixed["vision_tower.patch.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [at, at]}
    nested = checkpoint(safetensors(prefixed, at), "m.safetensors", HF)
    assert tensors_by_name(nested, read_blueprint(nested)).keys() == ours.keys()


@pytest.mark.models
@pytest.mark.parametrize("file, family, n_layers", [("SmolLM2-135M-Instruct.Q4_1.gguf", "llama", 30), ("gemma3-270m-q4_k_m.gguf", "gemma3", 18), ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2", 24)])
def test_real_models_have_all_their_tensors(file, family, n_layers, models_dir):
    opened = open_checkpoint(models_dir / file)
    b = read_blueprint(opened)
    assert (b.family, b.n_layers) == (family, n_layers)
    assert len(tensors_by_name(opened, b)) == len(opened.tensors)
