"""Which files of a repository make one model: quant variants of GGUF, one weight set of safetensors, and what is left out."""

from __future__ import annotations

import difflib
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
PICKLES = (".bin", ".pth", ".pt", ".ckpt")
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
    """What to fetch. skipped: (what, why) for weight files that are left out. notes: what speaks against it."""

    quant: str
    names: tuple[str, ...]
    is_folder: bool
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


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
            named = [n for n, _ in files if n.endswith(".gguf")] or [n for n, _ in files]
            near = difflib.get_close_matches(file, named, 3, 0.3) or named[:3]
            raise UnknownModel(f"{repo} has no file {file}", f"it has {', '.join(near)}", name=file, known=[n for n, _ in files][:50])
        return Choice(quant or quant_of(file), (file,), False)
    variants = gguf_variants(files)
    weights = [n for n, _ in files if n.endswith(".safetensors")]
    if quant and quant.lower() != "safetensors":
        return _by_quant(repo, variants, quant)
    if weights and (not variants or quant):
        return _safetensors(repo, files)
    if not variants:
        raise _no_weights(repo, [n for n, _ in files])
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


def _no_weights(repo: str, names: list[str]) -> UnsupportedError:
    """Nothing here is a model that we read: what is, and what would be."""
    side = [n for n in names if n.lower().endswith(".gguf")]
    pickles = [n for n in names if n.lower().endswith(PICKLES)]
    if side:
        message = f"{repo} holds no model: {side[0]} is a projector, a drafter or an adapter, which belongs to one"
        return UnsupportedError(message, "name the repository of the model itself", files=side[:50])
    if pickles:
        message = f"{repo} holds its weights as {pickles[0]}, a format that can carry programs, which Paddock does not open"
        return UnsupportedError(message, "take a repository with safetensors or GGUF files", files=pickles[:50])
    return UnsupportedError(f"{repo} holds neither GGUF nor safetensors weights", "Paddock reads those two formats", files=names[:50])


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
        if strays or "adapter_config.json" in names:
            message = f"{repo} holds an adapter (LoRA), not a model"
            raise UnsupportedError(message, "name a repository with the whole model, or one into which the adapter was merged", files=names[:50])
        lacks = "config.json" if kept else "*.safetensors at its root"
        message = f"{repo} has no Hugging Face model at its root (config.json beside *.safetensors): it lacks {lacks}"
        raise UnsupportedError(message, files=names[:50])
    missing = _missing_of(kept)
    if missing:
        raise UnknownModel(f"{repo} is incomplete: {missing}", "its upload may not be over; ask again later, or name another revision", name=repo)
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
    return Choice("", tuple(side + kept), True, tuple(skipped), _no_tokenizer(names))


def _missing_of(names: list[str]) -> str:
    """What a numbered set of safetensors lacks, or "". Sets that are numbered from 0 hold one more than they say."""
    sets: dict[tuple[str, str], int] = {}
    for name in names:
        found = SHARD.search(name[: -len(".safetensors")])
        if found:
            key = (name[: found.start()], found[2])
            sets[key] = sets.get(key, 0) + 1
    if len(sets) != 1:
        return ""
    (stem, total), count = next(iter(sets.items()))
    wanted = [f"{stem}-{i:05d}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
    lost = [n for n in wanted if n not in names]
    return f"{lost[0]} is not in the repository, which has {count} of {int(total)}" if lost and count < int(total) else ""


def _no_tokenizer(names: list[str]) -> tuple[str, ...]:
    """A folder without tokenizer.json is worth a word before it is fetched."""
    if "tokenizer.json" in names:
        return ()
    others = [n for n in names if n in ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")]
    beside = f", only {', '.join(others)}" if others else ""
    return (f"it has no tokenizer.json{beside}: Paddock cannot run it; a GGUF file of the model carries its tokenizer",)
