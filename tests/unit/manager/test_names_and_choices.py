"""Names that people type, and which files of a repository they mean."""

from __future__ import annotations

import re

import pytest
from paddock_manager.catalog import catalog, names
from paddock_manager.store.choose import choose, gguf_variants, quant_of
from paddock_runner.blueprint.families import FAMILIES
from paddock_runner.errors import AmbiguousModel, UnknownModel, UnsupportedError, UsageError


@pytest.mark.parametrize(
    "text, repo, short, rev, quant",
    [
        ("org/repo", "org/repo", "", "", ""),
        ("org/repo:Q4_K_M", "org/repo", "", "", "Q4_K_M"),
        ("org/repo@main", "org/repo", "", "main", ""),
        ("org/repo@refs/pr/3:Q8_0", "org/repo", "", "refs/pr/3", "Q8_0"),
        ("hf.co/org/repo:UD-Q4_K_XL", "org/repo", "", "", "UD-Q4_K_XL"),
        ("qwen3.8-27b-fp8", "", "qwen3.8-27b-fp8", "", ""),
        ("smollm2-135m:q4_1", "", "smollm2-135m", "", "q4_1"),
    ],
)
def test_names_are_taken_apart(text, repo, short, rev, quant):
    ref = names.parse(text)
    assert (ref.repo, ref.short, ref.rev, ref.quant) == (repo, short, rev, quant)


@pytest.mark.parametrize("text", ["", "  ", "a/b/c", "../x/y:z", "a//b", "a/..", "a/b:", "a/b@", "a/b@../x", "a b", "a/b:c/d", "-x/y", "a/b\0", "a/b:latest", ".a/b"])
def test_what_is_no_name_is_refused_or_a_path(text):
    try:
        ref = names.parse(text)
    except UsageError:
        return
    assert ref.path is not None


@pytest.mark.parametrize("text", ["./model.gguf", "/tmp/x", "../x", "~/x.gguf", ".", "model.gguf", "a.safetensors"])
def test_paths_say_that_they_are_paths(text):
    assert names.parse(text).path is not None


@pytest.mark.parametrize(
    "name, quant",
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"), ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"), ("gemma-3-270m-it-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("x-IQ4_XS.gguf", "IQ4_XS"), ("x-IQ2_XXS.gguf", "IQ2_XXS"), ("x-IQ3_M.gguf", "IQ3_M"), ("x-Q6_K.gguf", "Q6_K"), ("x-Q6_K_L.gguf", "Q6_K_L"),
        ("x-f16.gguf", "F16"), ("x.BF16.gguf", "BF16"), ("gpt-oss-20b-mxfp4.gguf", "MXFP4"), ("Q8_0/x-Q8_0-00001-of-00003.gguf", "Q8_0"),
        ("Q8_0/x-00001-of-00003.gguf", "Q8_0"), ("plain.gguf", "plain"), ("Qwen3-8B-Q5_K_S.gguf", "Q5_K_S"), ("x-TQ1_0.gguf", "TQ1_0"), ("x-Q2_K_S.gguf", "Q2_K_S"),
    ],
)  # fmt: skip
def test_quant_in_a_file_name(name, quant):
    assert quant_of(name) == quant


def sized(*found: str) -> list[tuple[str, int]]:
    return [(name, 10 + i) for i, name in enumerate(found)]


def test_projectors_and_adapters_are_no_variants():
    assert list(gguf_variants(sized("m-Q4_0.gguf", "mmproj-F16.gguf", "m-mmproj-f16.gguf", "imatrix.gguf", "lora-x.gguf"))) == ["Q4_0"]


def test_only_variant_is_taken_without_a_quant():
    assert choose("o/r", sized("m-Q4_0.gguf", "README.md"), "").names == ("m-Q4_0.gguf",)


def test_several_variants_are_an_error_that_lists_them_smallest_first():
    with pytest.raises(AmbiguousModel) as error:
        choose("o/r", [("m-Q8_0.gguf", 80), ("m-Q4_0.gguf", 40)], "")
    assert error.value.facts["choices"] == ["o/r:Q4_0", "o/r:Q8_0"]


def test_quant_is_matched_exactly_but_for_case():
    found = sized("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q4_K_M.gguf", "m-Q4_0.gguf")
    assert choose("o/r", found, "q4_k_m").names == ("m-Q4_K_M.gguf",)
    assert choose("o/r", found, "ud-q4_k_m").names == ("m-UD-Q4_K_M.gguf",)
    with pytest.raises(UnknownModel):
        choose("o/r", found, "Q4")


def test_all_shards_of_a_split_are_taken_in_order_and_a_missing_one_is_named():
    shards = [f"Q8_0/m-Q8_0-0000{i}-of-00003.gguf" for i in (3, 1, 2)]
    assert choose("o/r", sized(*shards), "Q8_0").names == tuple(sorted(shards))
    with pytest.raises(UnknownModel, match="00002-of-00003"):
        choose("o/r", sized(shards[0], shards[1]), "Q8_0")


def test_two_files_of_one_quant_are_ambiguous_and_one_can_be_named():
    found = sized("a-Q4_0.gguf", "b-Q4_0.gguf")
    with pytest.raises(AmbiguousModel, match="2 different files"):
        choose("o/r", found, "Q4_0")
    assert choose("o/r", found, "", "b-Q4_0.gguf").names == ("b-Q4_0.gguf",)


def test_gguf_beside_safetensors_asks_which():
    found = sized("m-Q4_0.gguf", "model.safetensors", "config.json")
    with pytest.raises(AmbiguousModel) as error:
        choose("o/r", found, "")
    assert error.value.facts["choices"] == ["o/r:Q4_0", "o/r:safetensors"]
    assert choose("o/r", found, "safetensors").is_folder


def test_one_weight_set_of_a_folder_and_why_the_rest_is_left_out():
    found = sized("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors", "original/x.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "config.json", "tokenizer.json", "README.md", "onnx/model.onnx")
    chosen = choose("o/r", found, "")
    assert set(chosen.names) == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json", "tokenizer.json"}
    assert {n for n, _ in chosen.skipped} == {"consolidated.safetensors", "original/x.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "onnx/model.onnx"}


def test_repository_without_weights_that_we_read_is_unsupported():
    with pytest.raises(UnsupportedError):
        choose("o/r", sized("pytorch_model.bin", "config.json"), "")
    with pytest.raises(UnsupportedError):
        choose("o/r", sized("vae/x.safetensors"), "")


def test_catalog_names_families_that_are_supported_in_the_form_it_names():
    """A short name must not lead to a download that cannot be run. Without a quantization the repository is a safetensors folder."""
    entries = catalog.entries()
    assert len(entries) >= 60
    for name, entry in entries.items():
        written = {entry.family, entry.family.replace("_", "-")}
        family = next((f for f in FAMILIES if written & {f.name, *f.gguf, *f.hf}), None)
        assert family is not None, name
        assert not entry.quant or family.gguf or family.name == "mixtral", name


def test_catalog_entries_are_sound():
    for name, entry in catalog.entries().items():
        assert names.parse(name).short == name
        assert entry.sources and entry.title and entry.licence
        for source in entry.sources:
            names.check_repo(source.repo)
            assert re.fullmatch("([0-9a-f]{40})?", source.rev) and (source.file or not (source.rev or source.size_bytes))
            assert quant_of(source.file).lower() == entry.quant.lower() or not source.file
            assert not source.package or (source.version and source.member and len(source.sha256) == 64 and source.size_bytes)
    assert [bool(s.package) for s in catalog.find("SmolLM2-135M").sources] == [False, True]
    assert sum(bool(s.rev and s.file and s.size_bytes) for s in (entry.sources[0] for entry in catalog.entries().values())) >= 60


def test_drafters_and_projectors_are_no_variants():
    names = ["M-UD-Q4_K_XL.gguf", "dflash-M-Q4_K_M.gguf", "dflash-kquant.gguf", "mmproj-M-Q4_K_M.gguf", "M-eagle3-Q8_0.gguf", "mtp-M.gguf"]
    assert choose("o/r", sized(*names), "").names == ("M-UD-Q4_K_XL.gguf",)


def test_what_sentence_transformers_puts_beside_a_model_comes_along():
    names = ["config.json", "model.safetensors", "tokenizer.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "onnx/model.onnx", "openvino/x.safetensors"]
    chosen = choose("o/r", sized(*names), "")
    assert set(chosen.names) == set(names[:7])
    assert {name for name, _ in chosen.skipped} == {"onnx/model.onnx", "openvino/x.safetensors"}


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("https://huggingface.co/org/repo", ("org/repo", "", "", "")),
        ("https://huggingface.co/org/repo/", ("org/repo", "", "", "")),
        ("https://huggingface.co/org/repo:Q4_K_M", ("org/repo", "", "Q4_K_M", "")),
        ("huggingface.co/org/repo/tree/main", ("org/repo", "", "", "")),
        ("https://www.huggingface.co/org/repo/tree/v1.0", ("org/repo", "v1.0", "", "")),
        ("https://hf.co/org/repo/blob/main/m-Q4_K_M.gguf?download=true", ("org/repo", "", "", "m-Q4_K_M.gguf")),
        ("https://huggingface.co/org/repo/resolve/abc123/Q8_0/m-00001-of-00002.gguf#x", ("org/repo", "abc123", "", "Q8_0/m-00001-of-00002.gguf")),
        ("https://huggingface.co/org/repo/blob/main/model-00001-of-00004.safetensors", ("org/repo", "", "", "")),
        ("hf://org/repo@abc:Q4_0", ("org/repo", "abc", "Q4_0", "")),
        ("http://mirror.example:8080/org/repo", ("org/repo", "", "", "")),
    ],
)
def test_addresses_of_the_hub_and_its_mirror_name_repositories(text, ref, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080/")
    found = names.parse(text)
    assert (found.repo, found.rev, found.quant, found.file) == ref and not found.url


@pytest.mark.parametrize("text", ["https://huggingface.co/org/repo/blob/main/README.md", "https://huggingface.co/datasets/org/x", "https://huggingface.co/../x", "https://huggingface.co/org/..%2f..%2fetc"])
def test_addresses_of_the_hub_that_are_no_model_are_refused(text):
    with pytest.raises(UsageError):
        names.parse(text)


def test_addresses_elsewhere_stay_urls():
    assert names.parse("https://example.org/huggingface.co/m.gguf").url == "https://example.org/huggingface.co/m.gguf"
