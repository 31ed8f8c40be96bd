"""The plan is the allocator's sum: every line from the formulas that the device uses, and solutions that fit."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.errors import UsageError, WontFit
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.formats.table import packed_bytes
from paddock_runner.memory import state
from paddock_runner.memory.arena import arena, pack_scratch_bytes
from paddock_runner.memory.plan import PlanRequest, chosen_format, cpu_facts, cuda_facts, plan, state_sizes
from paddock_runner.memory.solve import require_fit, solver
from paddock_runner.memory.state import KV_BYTES, StateSizes, aligned, device_arrays, page_layout, pinned_arrays
from paddock_runner.pack import abi

from tests.checkpoint_bytes import LLAMA, checkpoint, gguf_model, llama_shapes

MIB = 1 << 20
CPU = cpu_facts(2)


@pytest.fixture(scope="module")
def model():
    opened = checkpoint(gguf_model({**LLAMA, "llama.context_length": 8192}, llama_shapes()))
    blueprint = read_blueprint(opened)
    return blueprint, tensors_by_name(opened, blueprint)


def test_weights_are_what_the_pack_makes_of_them(model):
    blueprint, tensors = model
    found = plan(blueprint, tensors, PlanRequest(256, 1, CPU))
    matrices = [v for v in tensors.values() if len(v.shape) == 2]
    assert found.group_bytes("weights") == sum(aligned(packed_bytes(v.format, *v.shape)) for v in matrices)
    vectors = [v for v in tensors.values() if len(v.shape) == 1]
    assert found.group_bytes("vectors") == sum(aligned(4 * v.n_elements) for v in vectors) + aligned(4 * 8)


@pytest.mark.parametrize("kv_format", KV_BYTES)
def test_page_holds_all_layers_and_the_pool_is_whole_granules(kv_format, model):
    blueprint, tensors = model
    found = plan(blueprint, tensors, PlanRequest(1000, 3, CPU, kv_format, page_tokens=16))
    assert found.sizes.max_ctx_tokens == 1008 and found.sizes.n_pages == 3 * 63 + 1
    assert found.kv_token_bytes == 2 * (2 * 16 + 2 * 16) * KV_BYTES[kv_format]
    assert found.page_bytes == page_layout(blueprint, kv_format, 16).page_bytes >= 16 * found.kv_token_bytes
    assert found.group_bytes("kv") == -(-190 * found.page_bytes // (2 * MIB)) * 2 * MIB
    assert found.pool_tokens == 189 * 16


def test_state_activations_and_scratch_are_the_allocators_own_sums(model):
    blueprint, tensors = model
    request = PlanRequest(512, 4, CPU, max_step_tokens=64, prefill_share=0.0)
    found, sizes = plan(blueprint, tensors, request), state_sizes(blueprint, request)
    assert found.sizes == sizes == StateSizes(4, 512, 32, 65, 40, 64, 64)
    assert found.group_bytes("state") == sum(aligned(n) for n in device_arrays(sizes).values())
    assert found.group_bytes("pinned") == sum(aligned(n) for n in pinned_arrays(sizes).values())
    assert found.group_bytes("activations") == arena(blueprint, 64, 64, 4, "f16").n_bytes
    assert found.group_bytes("scratch") == pack_scratch_bytes(blueprint, 64, 64, 2, found.sizes.max_ctx_tokens)
    assert found.total_bytes == sum(x.n_bytes for x in found.lines) <= found.peak_bytes
    assert all(x.n_bytes >= 0 for x in found.lines)


def test_record_sizes_are_those_of_the_pack():
    sizes = {abi.pk_sampling: state.SAMPLING_BYTES, abi.pk_result: state.RESULT_BYTES, abi.pk_top: state.TOP_BYTES, abi.pk_bias: state.BIAS_BYTES}
    assert all(ctypes.sizeof(kind) == n for kind, n in sizes.items())


def test_large_tensor_on_its_way_counts_at_the_peak(model):
    blueprint, tensors = model
    small = plan(blueprint, tensors, PlanRequest(32, 1, replace(CPU, granule_bytes=1), max_step_tokens=1))
    big = {**tensors, "embed.weight": replace(tensors["embed.weight"], n_bytes=1 << 30)}
    assert plan(blueprint, big, PlanRequest(32, 1, replace(CPU, granule_bytes=1), max_step_tokens=1)).peak_bytes > small.peak_bytes + (1 << 29)


def test_plan_grows_with_every_wish(model):
    blueprint, tensors = model
    base = PlanRequest(512, 2, CPU)
    total = plan(blueprint, tensors, base).total_bytes
    for more in (replace(base, max_ctx_tokens=8192), replace(base, max_batch=64), replace(base, max_step_tokens=4096), replace(base, n_pages=5000)):
        assert plan(blueprint, tensors, more).total_bytes > total
    assert cuda_facts(132).process_bytes == 132 * (4 * MIB + 320 * 1024)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"max_ctx_tokens": 8193}, "a context of 8193 tokens was asked for, llama was made for 8192"),
        ({"max_batch": 0}, "must all be at least 1"),
        ({"kv_format": "q3"}, "KV format q3 is not known; known: f32, f16"),
        ({"n_pages": 16}, "16 pages cannot hold one context of 16 pages"),
    ],
)
def test_impossible_request_is_refused_with_its_numbers(change, words, model):
    with pytest.raises(UsageError) as caught:
        plan(*model, replace(PlanRequest(512, 2, CPU), **change))
    assert words in str(caught.value)


@pytest.mark.parametrize("free_mib", [60, 80, 150, 400, 3000])
def test_solutions_fit_and_the_next_larger_do_not(free_mib, model):
    answer, request = solver(*model, free_mib * MIB), PlanRequest(2048, 8, CPU)
    ctx, batch, pages = answer.largest_ctx_tokens(request), answer.largest_batch(request), answer.most_pages(request)
    full = state_sizes(model[0], request).n_pages
    if ctx:
        assert answer.fits(replace(request, max_ctx_tokens=ctx))
        assert ctx == 8192 or not answer.fits(replace(request, max_ctx_tokens=ctx + 32))
    else:
        assert not answer.fits(replace(request, max_ctx_tokens=32))
    if batch:
        assert answer.fits(replace(request, max_batch=batch))
        assert batch == 1024 or not answer.fits(replace(request, max_batch=batch + 1))
    if pages:
        assert answer.fits(replace(request, n_pages=pages))
        assert pages == full or not answer.fits(replace(request, n_pages=pages + 1))


def test_plan_that_does_not_fit_names_both_numbers_and_what_would(model):
    answer, request = solver(*model, 140 * MIB), PlanRequest(8192, 64, CPU, "f16")
    with pytest.raises(WontFit) as caught:
        require_fit(answer, request)
    facts = caught.value.facts
    assert facts["need_bytes"] > facts["free_bytes"] == 140 * MIB and facts["alternatives"]
    for other in facts["alternatives"]:
        assert answer.fits(replace(request, **{k: v for k, v in other.items() if k != "change"}))
    assert "it fits with" in str(caught.value)
    assert require_fit(solver(*model, 1 << 40), request).total_bytes == facts["plan"]["total_bytes"]


def test_weights_that_are_too_large_leave_nothing_to_suggest(model):
    with pytest.raises(WontFit, match="the weights alone are too large") as caught:
        require_fit(solver(*model, 1 * MIB), PlanRequest(512, 1, CPU))
    assert caught.value.facts["alternatives"] == []


def test_plan_says_the_same_as_json(model):
    found = plan(*model, PlanRequest(512, 2, CPU))
    data = found.as_json()
    assert sum(x["bytes"] for x in data["lines"]) == data["total_bytes"] == found.total_bytes
    assert {x["source"] for x in data["lines"]} == {"header", "planner", "table"}


def test_planning_imports_nothing_heavy():
    script = "import sys, paddock_runner.memory.solve, paddock_runner.blueprint.read, paddock_runner.blueprint.names; print([m for m in ('numpy', 'difflib', 'asyncio', 'ctypes') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert out.stdout.strip() == "[]"


@pytest.mark.models
def test_plan_of_a_real_model_is_the_same_from_its_header_alone(models_dir):
    from paddock_runner.files.checkpoint import open_remote

    path = models_dir / "gemma3-270m-q4_k_m.gguf"
    request = PlanRequest(4096, 2, CPU)

    def total(opened):
        blueprint = read_blueprint(opened)
        return plan(blueprint, tensors_by_name(opened, blueprint), request)

    with open(path, "rb") as f:
        remote = open_remote(path.name, [(path.name, lambda offset, n: os.pread(f.fileno(), n, offset), path.stat().st_size)])
    assert total(open_checkpoint(path)) == total(remote)


def with_biased_keys(blueprint):
    """The same model with biases on queries, keys and values."""
    return replace(blueprint, layers=tuple(replace(x, attention=replace(x.attention, qkv_bias=True)) for x in blueprint.layers))


def test_a_gpu_keeps_keys_whose_projections_have_a_bias_in_f16_and_says_why(model):
    plain, biased = model[0], with_biased_keys(model[0])
    assert chosen_format(plain, "cuda") == ("bf16", "") and chosen_format(plain, "cpu") == chosen_format(biased, "cpu") == ("f16", "")
    format, why = chosen_format(biased, "cuda")
    assert format == "f16" and "bias" in why


def test_beside_keys_in_f16_projections_are_f32_until_they_are_rotated(model):
    plain = arena(model[0], 64, 4, 2, "bf16")
    for format in ("f16", "fp8,window=f16"):
        found = arena(model[0], 64, 4, 2, format)
        assert found.buffers["qkv"].is_f32 == ("queries" in found.buffers) == (format == "f16")
    assert not plain.buffers["qkv"].is_f32 and "queries" not in plain.buffers
    exact = arena(model[0], 64, 4, 2, "f16")
    assert exact.buffers["queries"].offset >= exact.buffers["qkv"].offset + 64 * 4 * exact.buffers["qkv"].cols
    assert exact.buffers["attention_out"].offset >= exact.buffers["queries"].offset + 64 * 2 * exact.buffers["queries"].cols
    assert arena(model[0], 64, 4, 4, "f16") == arena(model[0], 64, 4, 4, "bf16")
