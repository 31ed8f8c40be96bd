"""GGUF files of models whose layers differ in kind: what a layer is follows from the arrays and the tensors."""

from __future__ import annotations

import pytest
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.errors import FileError, UnsupportedError

from tests.checkpoint_bytes import LLAMA, checkpoint, gguf_model

EMBED = {"token_embd.weight": (40, 64), "output_norm.weight": (64,)}


def read(arch, shapes, **more):
    keys = {k.replace("llama", arch): (arch if v == "llama" else v) for k, v in LLAMA.items()}
    keys.update({f"{arch}.{k.replace('__', '.')}": v for k, v in more.items()})
    return read_blueprint(checkpoint(gguf_model(keys, {**EMBED, **shapes})))


def test_layers_without_key_value_heads_are_convolutions_or_mamba():
    b = read("lfm2", {}, attention__head_count_kv=[0, 2], shortconv__l_cache=3)
    assert [x.kind for x in b.layers] == ["conv", "attention"] and b.layers[0].conv.conv_width == 3 and b.layers[1].attention.n_kv_heads == 2
    ssm = {"ssm__time_step_rank": 8, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__conv_kernel": 4, "ssm__group_count": 2}
    b = read("granitehybrid", {"blk.0.ssm_conv1d.bias": (192,)}, attention__head_count_kv=[0, 2], rope__scaling__finetuned=False, **ssm)
    assert [x.kind for x in b.layers] == ["mamba", "attention"] and b.layers[1].attention.rope is None
    m = b.layers[0].mamba
    assert (m.n_heads, m.head_width, m.n_groups, m.state_width, m.conv_width, m.conv_bias) == (8, 16, 2, 16, 4, True)
    with pytest.raises(FileError, match=r"ssm.time_step_rank is 7 heads for 128 values and 2 groups"):
        read("granitehybrid", {}, attention__head_count_kv=[0, 2], **{**ssm, "ssm__time_step_rank": 7})


def test_blocks_of_nemotron_are_what_their_tensors_are():
    shapes = {"blk.0.attn_q.weight": (64, 64), "blk.1.ffn_up.weight": (96, 64)}
    b = read("nemotron_h", shapes, attention__head_count_kv=[2, 0], feed_forward_length=[0, 96])
    assert [(x.kind, x.feed_forward.width, x.feed_forward.is_gated) for x in b.layers] == [("attention", 0, True), ("none", 96, False)]
    with pytest.raises(FileError, match=r"block 1 has no tensors"):
        read("nemotron_h", {"blk.0.attn_q.weight": (64, 64)}, attention__head_count_kv=[2, 0], feed_forward_length=[0, 96])
    with pytest.raises(UnsupportedError, match=r"latent space"):
        read("nemotron_h_moe", {"blk.0.ffn_latent_down.weight": (8, 64)}, attention__head_count_kv=[2, 0], feed_forward_length=[0, 96])


@pytest.mark.parametrize("suffix", ["", "_mla"])
def test_latent_attention_is_read_from_old_and_new_keys(suffix):
    widths = {f"attention__key_length{suffix}": 24, f"attention__value_length{suffix}": 12}
    b = read("deepseek2", {}, attention__kv_lora_rank=32, rope__dimension_count=8, **({"attention__key_length": 40, "attention__value_length": 32} if suffix else {}), **widths)
    a = b.layers[0].attention
    assert (a.n_kv_heads, a.head_width, a.values_width) == (1, 40, 32)
    assert (a.latent.rank, a.latent.rope_width, a.latent.nope_width, a.latent.v_width, a.latent.q_rank) == (32, 8, 16, 12, 0)
    assert a.rope.width == 8 and a.scale == 24**-0.5
