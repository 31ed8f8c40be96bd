"""What is recommended for sampling: from a folder, a GGUF file, or the command line; who asks for something else gets that."""

from __future__ import annotations

import json

import pytest
from paddock_runner.errors import FileError, UsageError
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.text.recommended import Recommended, recommended
from paddock_runner.turns.wish import Wish

from tests.checkpoint_bytes import LLAMA, checkpoint, gguf_model, llama_shapes
from tests.golden.test_tiny import TINY
from tests.unit.turns.test_turns import served


def folder(tmp_path, **generation):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((TINY / "llama" / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return open_checkpoint(tmp_path)


def test_a_folder_s_own_file_comes_first(tmp_path):
    opened = folder(tmp_path, temperature=0.6, top_p=0.95, top_k=20, do_sample=True, eos_token_id=3)
    assert recommended(opened, ("temperature=0.1",)) == Recommended(0.6, 0.95, 20, source="generation_config.json")


def test_a_file_that_recommends_nothing_leaves_it_to_the_command_line(tmp_path):
    made = folder(tmp_path, _from_model_config=True, temperature=0.2)
    assert recommended(made, ("temperature=0.3", "min_p=0.15", "repetition_penalty=1.05")) == Recommended(0.3, 1.0, 0, 0.15, 1.05, "--recommended")
    assert recommended(made) == Recommended() and recommended(made).facts() == {}


def test_a_gguf_file_may_say_it_in_its_metadata():
    opened = checkpoint(gguf_model({**LLAMA, "general.sampling.temp": 0.5, "general.sampling.top_k": 64}, llama_shapes()))
    assert recommended(opened) == Recommended(0.5, top_k=64, source="GGUF metadata")


def test_numbers_that_cannot_be_are_passed_over_in_files_and_refused_on_the_command_line(tmp_path):
    assert recommended(folder(tmp_path, temperature="hot", top_p=2, top_k=True, min_p=0.1)) == Recommended(min_p=0.1, source="generation_config.json")
    for word in ("temperature", "temperature=", "temperature=nan", "heat=1", "top_p=0"):
        with pytest.raises(UsageError, match="--recommended"):
            recommended(folder(tmp_path), (word,))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(FileError, match="not valid JSON"):
        recommended(open_checkpoint(tmp_path))


def test_a_wish_takes_what_is_recommended_where_it_does_not_say():
    model = served()
    model.recommended = Recommended(0.6, 0.95, 20, source="generation_config.json")
    wish, silent = Wish(temperature=0.0, top_k=5), Wish()
    for one in (wish, silent):
        one.check(model)
    assert (wish.temperature, wish.top_p, wish.top_k, wish.min_p) == (0.0, 0.95, 5, 0.0)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.repetition_penalty) == (0.6, 0.95, 20, 1.0)
