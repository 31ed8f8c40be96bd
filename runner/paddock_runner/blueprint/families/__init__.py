"""The list of families: one line each. A family turns a checkpoint's metadata into a Blueprint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint
from ..mixture import from_gguf as mixture_from_gguf
from . import (
    bert,
    deepseek,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite,
    granite_moe,
    kolibri,
    laguna,
    lfm2,
    llama,
    llama_kin,
    ministral,
    mixtral,
    muse_glimmer,
    nemotron_h,
    nomic_bert,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen4_exp,
    qwen35,
    qwen_moe,
    smollm3,
)


@dataclass(frozen=True, slots=True)
class Family:
    """gguf: values of general.architecture; hf: values of model_type; examples: models that people know it by."""

    name: str
    gguf: tuple[str, ...]
    hf: tuple[str, ...]
    from_gguf: Callable[[Checkpoint, str], Blueprint]
    from_hf: Callable[[Checkpoint, Fields], Blueprint]
    examples: str


FAMILIES = (
    Family("llama", ("llama",), ("llama", "mistral"), llama.from_gguf, llama.from_hf, "Llama 1-3, Mistral, SmolLM"),
    Family("qwen2", ("qwen2",), ("qwen2",), qwen2.from_gguf, qwen2.from_hf, "Qwen 2, Qwen 2.5"),
    Family("qwen3", ("qwen3",), ("qwen3",), qwen3.from_gguf, qwen3.from_hf, "Qwen 3"),
    Family("gemma2", ("gemma2",), ("gemma2",), gemma2.from_gguf, gemma2.from_hf, "Gemma 2"),
    Family("gemma3", ("gemma3", "gemma-embedding"), ("gemma3_text", "gemma3"), gemma3.from_gguf, gemma3.from_hf, "Gemma 3, EmbeddingGemma"),
    Family(
        "gemma4",
        ("gemma4",),
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        gemma4.from_gguf,
        gemma4.from_hf,
        "Gemma 4: E2B, E4B, 12B, 31B, 26B-A4B",
    ),
    Family(
        "granite",
        ("granite", "granitehybrid"),
        ("granite", "granitemoehybrid"),
        granite.from_gguf,
        granite.from_hf,
        "Granite 3, Granite 4 (also with Mamba layers and experts)",
    ),
    Family("phi3", ("phi3",), ("phi3",), phi3.from_gguf, phi3.from_hf, "Phi 3, Phi 3.5, Phi 4"),
    Family("olmo2", ("olmo2",), ("olmo2", "olmo3"), olmo2.from_gguf, olmo2.from_hf, "OLMo 2, OLMo 3"),
    Family("smollm3", ("smollm3",), ("smollm3",), smollm3.from_gguf, smollm3.from_hf, "SmolLM 3"),
    Family("exaone4", ("exaone4",), ("exaone4",), exaone4.from_gguf, exaone4.from_hf, "EXAONE 4"),
    Family(
        "ministral",
        ("mistral3",),
        ("ministral", "ministral3", "mistral3"),
        ministral.from_gguf,
        ministral.from_hf,
        "Ministral, Mistral Small 3",
    ),
    Family(
        "mixtral",
        (),
        ("mixtral",),
        mixture_from_gguf,
        mixtral.from_hf,
        "Mixtral (its GGUF files call themselves llama)",
    ),
    Family(
        "qwen-moe",
        ("qwen2moe", "qwen3moe"),
        ("qwen2_moe", "qwen3_moe"),
        mixture_from_gguf,
        qwen_moe.from_hf,
        "Qwen 3 30B-A3B, Qwen 1.5 MoE",
    ),
    Family("olmoe", ("olmoe",), ("olmoe",), mixture_from_gguf, olmoe.from_hf, "OLMoE"),
    Family(
        "granite-moe",
        ("granitemoe",),
        ("granitemoe", "granitemoeshared"),
        mixture_from_gguf,
        granite_moe.from_hf,
        "Granite 3 MoE",
    ),
    Family("glm4-moe", ("glm4moe",), ("glm4_moe",), mixture_from_gguf, glm4_moe.from_hf, "GLM 4.5, 4.6, 4.7"),
    Family("gpt-oss", ("gpt-oss",), ("gpt_oss",), gpt_oss.from_gguf, gpt_oss.from_hf, "gpt-oss 20B, 120B"),
    Family("laguna", ("laguna",), ("laguna",), laguna.from_gguf, laguna.from_hf, "Laguna XS, S"),
    Family("lfm2", ("lfm2", "lfm2moe"), ("lfm2", "lfm2_moe"), lfm2.from_gguf, lfm2.from_hf, "LFM2, LFM2 MoE"),
    Family(
        "qwen35",
        ("qwen35", "qwen35moe", "qwen3next"),
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
        qwen35.from_gguf,
        qwen35.from_hf,
        "Qwen 3.5 to 3.8, Qwen3-Next",
    ),
    Family("qwen4-exp", (), ("qwen4_exp", "qwen4_exp_text"), qwen4_exp.from_gguf, qwen4_exp.from_hf, "Qwen 3.8 Flash Next (safetensors)"),
    Family("deepseek", ("deepseek2",), ("deepseek_v2", "deepseek_v3"), deepseek.from_gguf, deepseek.from_hf, "DeepSeek V2, V3, R1"),
    Family("nemotron-h", ("nemotron_h", "nemotron_h_moe"), ("nemotron_h",), nemotron_h.from_gguf, nemotron_h.from_hf, "Nemotron-H, Nemotron 3 Nano"),
    Family(
        "muse-glimmer",
        ("muse-glimmer",),
        ("muse_glimmer", "muse_glimmer_text"),
        muse_glimmer.from_gguf,
        muse_glimmer.from_hf,
        "Muse Glimmer 30B",
    ),
    Family("kolibri", (), ("kolibri1",), mixture_from_gguf, kolibri.from_hf, "Kolibri 1 (safetensors)"),
    Family("llama-kin", ("ernie4_5", "seed_oss", "arcee"), ("ernie4_5", "seed_oss", "arcee"), llama_kin.from_gguf, llama_kin.from_hf, "ERNIE 4.5 (dense), Seed-OSS, AFM"),
    Family("bert", ("bert",), ("bert", "roberta", "xlm-roberta"), bert.from_gguf, bert.from_hf, "MiniLM, bge, e5, cross-encoders"),
    Family("nomic-bert", ("nomic-bert",), ("nomic_bert",), nomic_bert.from_gguf, nomic_bert.from_hf, "Nomic Embed 1, 1.5"),
)
