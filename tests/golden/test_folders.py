"""Real weights in safetensors folders (bf16, fp8 blocks, nvfp4, mxfp4) against the recorded references of the same weights."""

from __future__ import annotations

import pytest

from tests.golden.teacher import Teacher
from tests.golden.test_models import CHUNK, deviations, open_device, reference

# Limits of the golden folder's README: f32 arithmetic in another order, through AMX tiles with activations of 16 bits.
FOLDERS = {
    "smollm2-135m-instruct-bf16": ("smollm2-135m-instruct-q4_1@bf16-safetensors", 0.15, 0.3),
    "smollm2-135m-instruct-fp8-block": ("smollm2-135m-instruct-q4_1@fp8-block", 0.15, 0.3),
    "qwen2.5-coder-0.5b-instruct-fp8-block": ("qwen2.5-coder-0.5b-instruct-q4_k_m@fp8-block", 0.15, 0.3),
    "gemma3-270m-bf16": ("gemma3-270m-q4_k_m@bf16-safetensors", 0.15, 0.3),
    "smollm2-135m-instruct-nvfp4": ("smollm2-135m-instruct-q4_1@nvfp4", 0.15, 0.3),
    "smollm2-135m-instruct-mxfp4": ("smollm2-135m-instruct-q4_1@mxfp4", 0.15, 0.3),
}


@pytest.mark.models
@pytest.mark.parametrize("name", FOLDERS)
def test_folder_passes_its_reference(name, shared_dir, models_dir):
    golden, limit, margin_limit = FOLDERS[name]
    if not (models_dir / name / "model.safetensors").is_file():
        pytest.skip(f"{name} is not at hand (shared/tools/models/derive.py makes it)")
    device = open_device(models_dir / name)
    try:
        teacher = Teacher(device, CHUNK)
        for key, case in reference(shared_dir, golden).items():
            steps = deviations(teacher, case)
            assert max(d for d, _, _ in steps) <= limit, key
            assert all(same for _, same, margin in steps if margin > margin_limit), key
    finally:
        device.close()
