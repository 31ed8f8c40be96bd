"""A model's own draft layer: its guesses are transformers', and answers with them are the answers without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paddock_runner.blueprint.guessing import with_guesses
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.engine.policy import Policy
from paddock_runner.errors import UnsupportedError
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.plan import PlanRequest, cpu_facts, plan, state_sizes
from paddock_runner.pack import abi
from paddock_runner.pack.library import find_pack

from tests.golden.drafted import MTP, N_PROMPT, folder
from tests.golden.gguf_of import convert
from tests.golden.teacher import Teacher
from tests.golden.test_tiny import TINY, log_softmax
from tests.soak.rig import Rig


class Place:
    """A device with the model and its draft layer."""

    def __init__(self, path: Path, kind: str = "mtp", n_slots: int = 4) -> None:
        checkpoint = open_checkpoint(path)
        self.blueprint = with_guesses(read_blueprint(checkpoint), checkpoint, kind)
        views = tensors_by_name(checkpoint, self.blueprint)
        request = PlanRequest(128, n_slots, cpu_facts(2), "f32", 32, page_tokens=16)
        self.sizes = state_sizes(self.blueprint, request)
        self.plan = plan(self.blueprint, views, request)
        self.device = build_device(Assembly(find_pack("cpu"), self.sizes, "f32", max_isa=2), self.blueprint, views)

    def guess(self, slot: int, position: int) -> int:
        """What stands in a slot's text."""
        return self.device.text_token(slot, position)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("name, chunk", [("qwen3.5", 7), ("qwen3.5", 25), ("qwen3.5-moe", 7), ("glm4-moe", 7)])
def test_guesses_are_those_of_transformers(name, chunk, form, tmp_path):
    golden = np.load(MTP / name / "golden.npz")
    ids, want = golden["ids"].tolist(), log_softmax(golden["logits"])
    path = folder(name, tmp_path)
    place = Place(convert(path, tmp_path / "model.gguf") if form == "gguf" else path)
    try:
        teacher = Teacher(place.device, chunk, abi.PK_ROW_SAMPLE | abi.PK_ROW_DRAFT)
        teacher.begin(ids[:N_PROMPT])
        for position in range(N_PROMPT - 1, len(ids) - 2):
            assert teacher.token == ids[position + 1], "the model's own greedy tokens"
            guess, row = place.guess(0, position + 2), want[position]
            assert row.max() - row[guess] < 1e-4, position
            teacher.follow(teacher.token)
    finally:
        place.device.close()


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "glm4-moe"])
def test_answers_with_guesses_are_the_answers_without(name, tmp_path):
    path = folder(name, tmp_path)
    place = Place(path)
    try:
        found = []
        for is_on in (False, True):
            rig = Rig(place.sizes, device=place.device, policy=Policy(draft_gain=0.0, draft_head=True))
            rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(place.device.done[0])
            rig.engine.drafter.is_on = is_on
            asked = [rig.ask([5, 6, 7, 8, 9 + i], 30, temperature=0.8 * (i % 2), top_k=3, seed=i) for i in range(3)]
            rig.run()
            rig.assert_empty()
            found.append([x.tokens for x in asked])
            drafted, accepted = rig.engine.drafter.drafted, rig.engine.drafter.accepted
            rig.close()
        assert found[0] == found[1] and drafted > 20 and accepted <= drafted
    finally:
        place.device.close()


def test_a_model_without_a_draft_layer_says_so():
    for name, sentence in (("qwen3.5", "there is no draft layer"), ("qwen4-exp", "recurrent layers that cannot take guesses back")):
        checkpoint = open_checkpoint(TINY / name)
        with pytest.raises(UnsupportedError, match=sentence):
            with_guesses(read_blueprint(checkpoint), checkpoint, "mtp")


def test_the_draft_layer_is_in_the_plan(tmp_path):
    path = folder("qwen3.5", tmp_path)
    places = [Place(path, kind) for kind in ("off", "mtp")]
    try:
        assert places[1].plan.kv_token_bytes == 2 * places[0].plan.kv_token_bytes
        assert places[1].sizes.max_guesses == 1 and places[1].sizes.recurrent_bytes > 2 * places[0].sizes.recurrent_bytes
    finally:
        for place in places:
            place.device.close()
