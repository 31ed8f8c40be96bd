"""Muse Glimmer's and Kolibri's configs: published sizes by default, windows and ropes per layer, how experts are chosen, and what is refused."""

from __future__ import annotations

import pytest
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.errors import FileError, UnsupportedError
from paddock_runner.memory.state import page_layout
from paddock_runner.text.reasoning import marks_of, messages_of
from paddock_runner.text.tools import dialect_of

from tests.checkpoint_bytes import checkpoint, safetensors


def read(config):
    entry = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    return read_blueprint(checkpoint(safetensors(entry, 2), "m.safetensors", config))


def muse(**more):
    return read({"model_type": "muse_glimmer", "text_config": {"model_type": "muse_glimmer_text", **more}, "vision_config": {}})


def test_muse_glimmer_as_published_turns_only_where_it_has_windows():
    b = muse()
    wide, local = b.layers[51].attention, b.layers[0].attention
    assert (b.n_layers, b.model_width, b.n_vocab, wide.n_heads, wide.n_kv_heads, wide.head_width) == (52, 6656, 202048, 32, 2, 128)
    assert [x.attention.window for x in b.layers[:4]] == [2048, 2048, 2048, 0]
    assert wide.rope is None and local.rope.theta == 10000.0 and local.unit_qk_norm and local.out_gate
    assert local.scale == pytest.approx(3.87 / 128**0.5)
    assert (b.norm_eps, b.post_norm_eps, b.norm_offset, b.out_norm_offset, b.logit_softcap) == (1e-5, 1e-8, 1.0, 0.0, 20.0)
    assert b.logit_scale == pytest.approx(26**-0.5) and b.unit_embed_norm
    assert page_layout(b, "bf16", 32).page_bytes // 32 == 52 * 2 * 2 * 128 * 2
    assert b.notes == ("the vision part is not loaded: text only",)


def test_muse_glimmer_says_which_layers_turn():
    layers = muse(num_hidden_layers=3, layer_rope_theta=[0, 10000.0, 10000.0], layer_types=["full_attention"] * 3).layers
    assert [x.attention.rope is None for x in layers] == [True, False, False] and layers[1].attention.window == 0


def test_kolibri_as_published_chooses_by_logit_and_turns_only_where_it_has_windows():
    b = read({"model_type": "kolibri1"})
    x, a = b.layers[0].experts, b.layers[0].attention
    assert (b.n_layers, b.model_width, a.n_heads, a.n_kv_heads, a.head_width, a.window) == (50, 2560, 48, 4, 128, 513)
    assert [x.attention.window == 0 for x in b.layers].count(True) == 10 and b.layers[4].attention.rope is None and a.rope is not None
    assert (x.n_experts, x.n_used, x.width, x.score, x.choice_by_logit, x.choice_bias, x.is_normalised) == (384, 6, 512, "sigmoid", True, True, False)
    assert b.layers[0].feed_forward.width == 512 and b.layers[0].post_norms
    # Full layers as published: ten of 4 heads of 128, 10 KiB a token in FP8.
    assert sum(2 * 4 * 128 for x in b.layers if not x.attention.window) == 10 << 10


@pytest.mark.parametrize(
    ("config", "error", "sentence"),
    [
        ({"model_type": "muse_glimmer_text", "layer_rope_theta": [0]}, FileError, r"layer_rope_theta has 1 entries, expected 52"),
        ({"model_type": "muse_glimmer_text", "hidden_activation": "gelu"}, UnsupportedError, r"hidden_activation is 'gelu'"),
        ({"model_type": "kolibri1", "num_experts_per_tok": 400}, FileError, r"is 400 of 384 experts"),
        ({"model_type": "kolibri1", "layer_types": ["linear"]}, FileError, r"layer_types has the wrong length"),
    ],
)
def test_what_cannot_be_is_one_sentence(config, error, sentence):
    with pytest.raises(error, match=sentence):
        read(config)


def test_their_templates_and_gemma4s_have_their_dialects(shared_dir):
    import json

    templates = json.loads((shared_dir / "golden/chat_templates.json").read_text())["templates"]
    gemma = templates["llamacpp/google-gemma-4-31B-it.jinja"]["template"]
    assert dialect_of(gemma).name == "gemma-4" and marks_of(gemma).end == "<channel|>"
    glimmer = templates["llamacpp/muse-glimmer.jinja"]["template"]
    assert dialect_of(glimmer).name == "muse" and messages_of(glimmer) is not None
