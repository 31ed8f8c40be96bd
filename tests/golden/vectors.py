"""Models that give vectors: the tiny ones with their references, and a device with an engine around it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.engine.policy import Policy
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.plan import PlanRequest, cpu_facts, plan
from paddock_runner.pack.library import find_pack

from tests.soak.rig import Rig

ENCODERS = Path(__file__).resolve().parent / "encoders"
NAMES = sorted(p.name for p in ENCODERS.iterdir())
TASKS = {"qwen3-rank": "rank"}


class Vectors:
    """A model with an engine, planned as the runner plans it."""

    def __init__(self, path: Path, task: str = "auto", ctx: int = 64, step: int = 16, kv_format: str = "f32", max_isa: int = 0, pack: Path | None = None) -> None:
        checkpoint = open_checkpoint(path)
        self.blueprint = read_blueprint(checkpoint, task)
        views = tensors_by_name(checkpoint, self.blueprint)
        request = PlanRequest(min(ctx, self.blueprint.max_ctx_tokens), 3, cpu_facts(2), kv_format, step, 8)
        self.plan = plan(self.blueprint, views, request)
        self.device = build_device(Assembly(pack or find_pack("cpu"), self.plan.sizes, kv_format, max_isa=max_isa), self.blueprint, views)

    def __enter__(self) -> Vectors:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.close()

    def rig(self) -> Rig:
        policy = Policy(whole_prompts=self.blueprint.needs_whole_prompts)
        rig = Rig(self.plan.sizes, policy=policy, device=self.device, read_vectors=self.device.read_vectors)
        rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(self.device.done[0])
        return rig

    def of(self, prompts: list[list[int]]) -> list[np.ndarray]:
        """Vectors of prompts that are asked for at once."""
        rig = self.rig()
        found = [rig.ask(p, 1, temperature=0.0) for p in prompts]
        rig.run()
        rig.assert_empty()
        rig.close()
        return [np.frombuffer(x.vector, np.float32) for x in found]


def golden_of(name: str) -> tuple[list[list[int]], np.ndarray]:
    """Prompts (a token's type goes with its id) and the reference's vectors."""
    golden = np.load(ENCODERS / name / "golden.npz")
    config = json.loads((ENCODERS / name / "config.json").read_text())
    ids = golden["ids"] + golden["types"] * config["vocab_size"]
    return [part.tolist() for part in np.split(ids, np.cumsum(golden["lengths"])[:-1])], golden["vectors"]
