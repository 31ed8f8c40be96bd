"""Models that give vectors, through the engine and the CPU pack, against Hugging Face transformers; real ones against their references."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.errors import FileError, UnsupportedError, UsageError
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.wire.messages import Refused, RefusedCode

from tests.golden.gguf_of import convert
from tests.golden.test_tiny import LEVELS, TINY
from tests.golden.vectors import ENCODERS, NAMES, TASKS, Vectors, golden_of


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NAMES)
def test_vectors_equal_transformers_alone_and_in_batches(name, level):
    prompts, want = golden_of(name)
    max_isa, tolerance = LEVELS[level]
    scale = max(1.0, np.abs(want).max())
    with Vectors(ENCODERS / name, TASKS.get(name, "auto"), max_isa=max_isa) as model:
        together = model.of(prompts + prompts[:2])
        for got, wanted in zip(together, [*want, *want[:2]], strict=True):
            np.testing.assert_allclose(got, wanted, atol=tolerance * scale)
        if level == "avx512":
            for prompt, got in zip(prompts, together, strict=False):
                assert np.array_equal(model.of([prompt])[0], got)


def test_embeddinggemma_as_a_gguf_file_gives_the_same_vectors(tmp_path):
    """Its dense layers have no activation there, nor have the published ones."""
    folder = shutil.copytree(ENCODERS / "gemma3-both-ways", tmp_path / "folder")
    for path in folder.glob("*_Dense/config.json"):
        path.write_text(path.read_text().replace("activation.Tanh", "linear.Identity"))
    prompts, _ = golden_of("gemma3-both-ways")
    with Vectors(folder, max_isa=2) as model:
        want = model.of(prompts)
    with Vectors(convert(folder, tmp_path / "model.gguf"), max_isa=2) as model:
        assert model.blueprint.pooling.pool == "mean" and [x.rows for x in model.blueprint.pooling.layers] == [72, 40]
        np.testing.assert_allclose(model.of(prompts), want, atol=1e-4 * max(1.0, np.abs(want).max()))


def test_a_causal_model_is_computed_in_chunks_and_from_a_known_prefix():
    prompts, want = golden_of("qwen3-embed")
    longest = max(prompts, key=len)
    with Vectors(ENCODERS / "qwen3-embed", step=8) as model:
        rig = model.rig()
        first = rig.ask(longest, 1)
        rig.run()
        second = rig.ask(longest, 1)
        rig.run()
        assert second.started.cached_tokens >= 16 and first.started.cached_tokens == 0
        rig.close()
        for answer in (first, second):
            np.testing.assert_allclose(np.frombuffer(answer.vector, np.float32), want[prompts.index(longest)], atol=2e-3 * np.abs(want).max())


def test_an_encoder_takes_its_whole_context_and_refuses_one_token_more():
    with Vectors(ENCODERS / "bert", ctx=64) as model:
        assert model.plan.sizes.max_step_tokens >= 64 and model.blueprint.max_ctx_tokens == 64
        rig = model.rig()
        full, more = rig.ask([5] * 64, 1), rig.ask([5] * 73, 1)
        rig.run()
        assert len(full.vector) == 4 * 48
        assert isinstance(more.end, Refused) and more.end.code == RefusedCode.CONTEXT
        rig.close()


def test_what_a_model_is_for_follows_from_its_files():
    kinds = {name: read_blueprint(open_checkpoint(ENCODERS / name)).pooling for name in NAMES}
    assert {name: p.task if p else "generate" for name, p in kinds.items()} == {
        name: "generate" if name == "qwen3-rank" else "rank" if name.endswith(("rank", "classifier")) else "embed" for name in NAMES
    }
    assert kinds["bert-cls"].pool == "first" and kinds["qwen3-embed"].pool == "last" and kinds["gemma3-both-ways"].layers[1].rows == 40


def test_a_generator_gives_vectors_when_asked_to():
    blueprint = read_blueprint(open_checkpoint(TINY / "llama"), "embed")
    assert blueprint.pooling.pool == "last" and blueprint.pooling.is_normalised and "last token" in blueprint.notes[-1]
    with Vectors(TINY / "llama", "embed") as model:
        (vector,) = model.of([[3, 4, 5]])
        assert vector.shape == (64,) and np.isfinite(vector).all()


@pytest.mark.parametrize(
    ("name", "task", "sentence"),
    [("bert", "generate", "generates no text"), ("bert", "rank", "no classifier in it"), ("qwen3-embed", "rank", "no tokens for yes and no"), ("bert", "sing", "is not one of")],
)
def test_a_task_that_a_model_cannot_do_is_refused(name, task, sentence):
    with pytest.raises((UsageError, UnsupportedError), match=sentence):
        read_blueprint(open_checkpoint(ENCODERS / name), task)


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("modules.json", "{", "not valid JSON"),
        ("modules.json", '[{"type": "x.Transformer"}, {"type": "x.WordWeights", "path": "1_Pooling"}]', "module WordWeights is not supported"),
        ("modules.json", '[{"type": "x.Pooling", "path": "../../etc"}]', "leads out of the folder"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "pooling max is not supported"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}', "pooling first and mean"),
        ("2_Dense/config.json", '{"in_features": 47, "out_features": 3}', "reads 47 numbers, it is given 48"),
        ("2_Dense/config.json", '{"in_features": 48, "out_features": 72, "bias": true, "activation_function": "x.Tanh"}', "linear.bias is missing"),
        ("2_Dense/config.json", '{"in_features": 48, "out_features": 72, "activation_function": "x.Softsign"}', "activation Softsign"),
    ],
)
def test_damaged_module_files_are_one_sentence(tmp_path, file, text, sentence):
    source = ENCODERS / "gemma3-both-ways"
    for path in source.rglob("*"):
        if path.is_file():
            (tmp_path / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path.relative_to(source)).write_bytes(path.read_bytes())
    (tmp_path / file).write_text(text)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises((FileError, UnsupportedError), match=sentence):
        tensors_by_name(checkpoint, read_blueprint(checkpoint))


@pytest.mark.models
@pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "embeddinggemma-300m"])
def test_real_embeddings_equal_their_references(name, shared_dir, models_dir):
    if not (models_dir / name / "model.safetensors").is_file():
        pytest.skip(f"{name} is not at hand (shared/tools/models/fetch_models.sh gets it)")
    golden = json.loads((shared_dir / "golden" / f"emb_{name}.json").read_text())["sentences"]
    with Vectors(models_dir / name, ctx=128, kv_format="f16") as model:
        got = model.of([s["token_ids"] for s in golden])
    for vector, sentence in zip(got, golden, strict=True):
        wanted = np.array(sentence["full"])
        assert 1 - vector @ wanted / np.linalg.norm(vector) / np.linalg.norm(wanted) < 1e-5
