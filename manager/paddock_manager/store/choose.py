"""Which files of a repository make one model: quant variants of GGUF, one weight set of safetensors, and what is left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paddock_runner.errors import AmbiguousModel, UnknownModel, UnsupportedError

QUANT_TOKEN = re.compile(
    r"(?:^|[-._/])((?:UD[-_])?(?:I?Q\d+(?:_(?:K|0|1|NL|XXS|XS|S|M))?(?:_(?:XXL|XL|XXS|XS|S|M|L|NL|XL))?|T?Q\d_\d|F16|F32|FP16|FP32|BF16|MXFP4(?:_MOE)?|NVFP4))"
    r"(?=$|[-._/])",
    re.IGNORECASE,
)
SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
SIDE_ROLES = ("mmproj", "imatrix", "lora", "adapter", "mtp-", "dflash-", "eagle3")
SIDE_FILES = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "chat_template.jinja", "preprocessor_config.json",
    "processor_config.json", "model.safetensors.index.json", "tekken.json",
}  # fmt: skip
SENTENCE_FILES = re.compile(
    r"modules\.json|config_sentence_transformers\.json|sentence_bert_config\.json|\d+_(?:Pooling|Dense|LogitScore)/config\.json|\d+_Dense/model\.safetensors"
)
"""What sentence-transformers puts beside a model: which vectors it gives."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to fetch. skipped: (what, why) for weight files that are left out."""

    quant: str
    names: tuple[str, ...]
    is_folder: bool
    skipped: tuple[tuple[str, str], ...] = ()


def gguf_variants(files: Iterable[tuple[str, int]]) -> dict[str, list[tuple[str, int]]]:
    """GGUF files (name, size) by quant, shards in order. Projectors, drafters, adapters and importance matrices are no models."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for name, size in sorted(files):
        base = name.rsplit("/", 1)[-1]
        if not name.lower().endswith(".gguf") or any(
            base.lower().startswith(r) or f"-{r}" in base.lower() for r in SIDE_ROLES
        ):
            continue
        groups.setdefault(quant_of(name), []).append((name, size))
    return groups


def quant_of(name: str) -> str:
    """The quant in a file name, upper case ("Q4_K_M", "UD-Q4_K_XL"); the stem when it names none."""
    stem = re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)
    stem = SHARD.sub("", stem)
    found = QUANT_TOKEN.findall(stem.rsplit("/", 1)[-1]) or QUANT_TOKEN.findall(stem)
    return str(found[-1]).upper().replace("UD_", "UD-") if found else stem.rsplit("/", 1)[-1]


def choose(repo: str, files: list[tuple[str, int]], quant: str, file: str = "") -> Choice:
    """The files of one model in a repository.

    files: (name, size). quant: wanted, matched exactly but for case. file: wanted by name.
    Raises: UnknownModel (with what there is), AmbiguousModel (with the choices), UnsupportedError (no weights we read).
    """
    if file:
        if file not in {n for n, _ in files}:
            raise UnknownModel(f"{repo} has no file {file}", name=file, known=[n for n, _ in files][:50])
        return Choice(quant or quant_of(file), (file,), False)
    variants = gguf_variants(files)
    weights = [n for n, _ in files if n.endswith(".safetensors")]
    if quant and quant.lower() != "safetensors":
        return _by_quant(repo, variants, quant)
    if weights and (not variants or quant):
        return _safetensors(repo, files)
    if not variants:
        raise UnsupportedError(
            f"{repo} holds neither GGUF nor safetensors weights",
            "Paddock reads those two formats",
            files=[n for n, _ in files][:50],
        )
    if len(variants) > 1 or weights:
        sizes = {q: sum(s for _, s in group) for q, group in variants.items()}
        choices = [f"{repo}:{q}" for q in sorted(sizes, key=lambda q: sizes[q])] + (
            [f"{repo}:safetensors"] if weights else []
        )
        listed = ", ".join(c.rpartition(":")[2] for c in choices)
        raise AmbiguousModel(
            f"{repo} holds {len(choices)} variants",
            f"name one, as in {choices[0]}: {listed}",
            name=repo,
            choices=choices,
            sizes_bytes=sizes,
        )
    only = next(iter(variants))
    return _by_quant(repo, variants, only)


def _by_quant(repo: str, variants: dict[str, list[tuple[str, int]]], quant: str) -> Choice:
    """Exactly the variant that was named."""
    hits = [q for q in variants if q.lower() == quant.lower()]
    if not hits:
        known = sorted(variants)
        hint = "it has " + ", ".join(known) if known else "it holds no GGUF files"
        raise UnknownModel(f"{repo} has no quant {quant}", hint, name=f"{repo}:{quant}", known=known)
    group = [n for n, _ in variants[hits[0]]]
    sets = _shard_sets(group)
    if len(sets) > 1:
        choices = [names[0] for names in sets]
        raise AmbiguousModel(
            f"{repo}:{quant} is {len(sets)} different files",
            "pull one by --file: " + ", ".join(choices),
            name=repo,
            choices=choices,
        )
    missing = _missing_shards(sets[0])
    if missing:
        raise UnknownModel(f"{repo}:{quant} is incomplete: {missing} is not in the repository", name=repo)
    return Choice(hits[0], tuple(sets[0]), False)


def _shard_sets(names: list[str]) -> list[list[str]]:
    """Files that belong together: shards of one split, or single files."""
    sets: dict[str, list[str]] = {}
    for name in names:
        stem = name[: -len(".gguf")]
        sets.setdefault(SHARD.sub("", stem), []).append(name)
    return [sorted(group) for group in sets.values()]


def _missing_shards(names: list[str]) -> str:
    """The first shard that a split lacks, or ""."""
    first = SHARD.search(names[0][: -len(".gguf")])
    if first is None:
        return ""
    total = int(first.group(2))
    stem = names[0][: first.start()]
    wanted = [f"{stem}-{i:05d}-of-{total:05d}.gguf" for i in range(1, total + 1)]
    return next((w for w in wanted if w not in names), "")


def _safetensors(repo: str, files: list[tuple[str, int]]) -> Choice:
    """The weight set at the root of the repository, its configuration and tokenizer; nothing twice."""
    names = [n for n, _ in files]
    root = [n for n in names if "/" not in n and n.endswith(".safetensors")]
    kept = [n for n in root if not n.startswith("consolidated")] or root
    strays = [n for n in kept if n.startswith(("adapter_", "optimizer"))]
    kept = [n for n in kept if n not in strays]
    if not kept or "config.json" not in names:
        raise UnsupportedError(
            f"{repo} has no Hugging Face model at its root (config.json beside *.safetensors)", files=names[:50]
        )
    skipped = [(n, "a second copy of the weights") for n in root if n not in kept and n not in strays]
    skipped += [(n, "not part of the model") for n in strays]
    skipped += [
        (n, "a second copy of the weights")
        for n in names
        if n.endswith((".bin", ".pth", ".pt", ".h5", ".msgpack", ".gguf", ".onnx"))
    ]
    side = [n for n in names if n in SIDE_FILES or SENTENCE_FILES.fullmatch(n)]
    skipped += [
        (n, "a second copy of the weights") for n in names if "/" in n and n.endswith(".safetensors") and n not in side
    ]
    return Choice("", tuple(side + kept), True, tuple(skipped))
