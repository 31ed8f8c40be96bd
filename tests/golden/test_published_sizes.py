"""Models of published shapes, without their weights: as many parameters as their names say, and the plan has room for what the pack asks for."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
from paddock_runner.blueprint.names import expected_shapes
from paddock_runner.engine.assemble import _scalars
from paddock_runner.engine.explain import _site
from paddock_runner.files.view import TensorView
from paddock_runner.memory.arena import pack_scratch_bytes
from paddock_runner.memory.plan import PlanRequest, cpu_facts, state_sizes
from paddock_runner.memory.state import page_layout
from paddock_runner.model.decoder import trace
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device
from paddock_runner.pack.library import find_pack, load_pack

from tests.unit.blueprint.test_gemma4 import DENSE_31B, E2B, E4B, MOE_26B, read
from tests.unit.blueprint.test_muse_and_kolibri import muse
from tests.unit.blueprint.test_muse_and_kolibri import read as read_plain

MODELS = {
    "gemma-4-e2b": (lambda: read(E2B), 4.63),
    "gemma-4-e4b": (lambda: read(E4B), 7.46),
    "gemma-4-31b": (lambda: read(DENSE_31B), 30.70),
    "gemma-4-26b-a4b": (lambda: read(MOE_26B), 25.23),
    "muse-glimmer-30b": (muse, 27.85),
    "kolibri-1": (lambda: read_plain({"model_type": "kolibri1"}), 78.10),
}
"""Text parts: billions of parameters (Gemma's published 30.7 and 25.2, Kolibri's 78; the others have towers beside)."""
NARROW = {**E2B, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 384, "vocab_size": 512, "num_hidden_layers": 10, "num_kv_shared_layers": 5, "layer_types": E2B["layer_types"][:10]}
PLANNED = {**{name: make for name, (make, _) in MODELS.items()}, "narrow with wide heads": lambda: read(NARROW)}


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_has_the_parameters_of_its_name(name):
    make, billions = MODELS[name]
    assert round(sum(math.prod(shape) for shape in expected_shapes(make()).values()) / 1e9, 2) == billions


@pytest.mark.parametrize("name", [name for name in PLANNED if name != "kolibri-1"])
def test_the_plan_has_room_for_what_the_pack_asks_for(name):
    b = PLANNED[name]()
    views = {
        our: TensorView(our, shape, "bf16" if len(shape) == 2 else "f32", Path("none"), 0, 2 * math.prod(shape)) for our, shape in expected_shapes(b).items()
    }
    device = Device(load_pack(find_pack("cpu")), 0, 2, 0)
    try:
        n_threads = device.facts.n_processors
        sizes = state_sizes(b, PlanRequest(512, 1, cpu_facts(n_threads), max_step_tokens=64))
        device.state = abi.pk_state()
        for field, kind in abi.pk_state._fields_:
            if kind is ctypes.c_uint64:
                setattr(device.state, field, 1 << 30)
        for field, value in _scalars(sizes, page_layout(b, "f16", sizes.page_tokens).page_bytes).items():
            setattr(device.state, field, value)
        site = _site(b, views, sizes, "f16", {})
        buffers = {key: type(t)(t.data, t.rows, t.cols, abi.PK_F32 if t.format in (abi.PK_BF16, abi.PK_F16) else t.format) for key, t in site.buffers.items()}
        program = trace(b, type(site)(site.weights, buffers, site.kv_offsets, site.kv_formats, site.rotations, site.state_offsets))
        need = device.workspace_bytes(program)
        assert need <= pack_scratch_bytes(b, sizes.max_step_tokens, sizes.max_step_rows, n_threads, sizes.max_ctx_tokens)
    finally:
        device.close()
