"""Names of quantizations and numbers of parameters, of files that say and of those that do not."""

from __future__ import annotations

from paddock_runner.files.quant import n_parameters, quant_name

from tests.checkpoint_bytes import LLAMA, checkpoint, gguf_model


def test_a_gguf_file_says_its_quantization_and_others_are_called_by_their_format() -> None:
    shapes = {"a.weight": (4, 8), "b.weight": (3,)}
    told = checkpoint(gguf_model({**LLAMA, "general.file_type": 15}, shapes))
    odd = checkpoint(gguf_model({**LLAMA, "general.file_type": 999}, shapes))
    assert [quant_name(told, "q4_k"), quant_name(odd, "q4_k"), quant_name(checkpoint(gguf_model(LLAMA, shapes)), "bf16")] == ["Q4_K_M", "Q4_K", "BF16"]


def test_a_tensor_that_two_weights_share_counts_once() -> None:
    tensors = checkpoint(gguf_model(LLAMA, {"a.weight": (4, 8), "b.weight": (3,)})).tensors
    assert n_parameters(tensors.values()) == 35 == n_parameters([*tensors.values(), tensors["a.weight"]])
