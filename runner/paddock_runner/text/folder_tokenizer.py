"""A Tokenizer from a Hugging Face folder: tokenizer.json, with what tokenizer_config.json and the configs add.

Padding and truncation that a tokenizer.json has built in are ignored: they belong to somebody's training run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Encoder

from ..errors import FileError
from ..files.folder import require_tokenizer
from .pairs import PairEnds
from .tokenizer import Tokenizer, TokenizerParts
from .vocabulary import AddedToken, byte_level_piece, end_ids, end_of_turn_id, fill_ids, sentence_pieces

_MAX_BYTES = 256 << 20
_PROBE_ID = 4_000_000_000
_PROBE_MODEL = {"type": "WordLevel", "vocab": {"a": _PROBE_ID}, "unk_token": "a"}
_FILES = ("tokenizer_config.json", "generation_config.json", "config.json")


def tokenizer_from_folder(folder: Path, n_rows: int | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. n_rows: rows of the model's embedding.

    Raises: UnsupportedError when the folder has no tokenizer.json, FileError when a file is damaged.
    """
    require_tokenizer(folder)
    path = folder / "tokenizer.json"
    configs = [_read(folder / name) if (folder / name).is_file() else {} for name in _FILES]
    return tokenizer_from_json(_read(path, ("model",)), *configs, n_rows=n_rows, name=str(path))


def tokenizer_from_json(
    spec: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    *,
    n_rows: int | None = None,
    name: str = "tokenizer.json",
) -> Tokenizer:
    """The tokenizer that the parsed files describe. `name` is used in messages. spec["model"] may be left as JSON (msgspec.Raw).

    Raises: FileError when the `tokenizers` library refuses it.
    """
    added_specs = spec.get("added_tokens") or []
    try:
        added = [_added(a) for a in added_specs]
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{name}: an entry of added_tokens is damaged ({error!r})", path=name) from error
    encoder = _encoder(spec, name)
    pieces, decodes_words = _pieces(spec, encoder, added)
    later, drops_space = _leading_space(spec, name)
    by_text = {a.text: a.id for a in reversed(added)}
    special = {a.text: a.id for a in reversed(added) if a.is_special}
    tokenizer_config = tokenizer_config or {}
    bos, eos = (_id_of(tokenizer_config.get(key), by_text, encoder) for key in ("bos_token", "eos_token"))
    named = [*_ids(generation_config), *_ids(model_config)]
    if eos is None and named:
        eos = named[0]
    prefix, suffix = _ends(spec, name, tokenizer_config, bos, eos)
    parts = TokenizerParts(
        encoder=encoder,
        pieces=pieces,
        added=added,
        prefix=prefix,
        suffix=suffix,
        bos_id=bos if bos is not None else (prefix[0] if prefix else None),
        eos_id=eos,
        eot_id=end_of_turn_id(special, eos),
        stop_ids=end_ids(special, [eos, *named]),
        fill_ids=fill_ids(by_text),
        later_encoder=later,
        drops_leading_space=drops_space,
        decodes_words=decodes_words,
        pair=_pair(spec, name),
    )
    return Tokenizer(parts, n_rows)


class _Model(msgspec.Struct):
    """Of the model in a tokenizer.json, what is needed here; the rest, most of the file, goes to the library as it is."""

    type: str | None = None
    vocab: dict[str, int] | None = None


def _read(path: Path, left: tuple[str, ...] = ()) -> dict[str, Any]:
    """A JSON object. left: fields that are not taken apart."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise FileError(f"{path} is {size} bytes, more than a tokenizer file can be ({_MAX_BYTES})", path=str(path))
    try:
        data = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw] if left else Any)
        if left:
            data = {key: raw if key in left else msgspec.json.decode(raw) for key, raw in data.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path} is not JSON: {error}", path=str(path)) from error
    if not isinstance(data, dict):
        raise FileError(f"{path} holds no JSON object", path=str(path))
    return data


def _added(spec: Mapping[str, Any]) -> AddedToken:
    token_id = int(spec["id"])
    if token_id < 0:
        raise ValueError(token_id)
    return AddedToken(
        token_id,
        str(spec["content"]),
        bool(spec.get("special")),
        bool(spec.get("lstrip")),
        bool(spec.get("rstrip")),
        bool(spec.get("single_word")),
    )


def _encoder(spec: Mapping[str, Any], name: str, keeps_ends: bool = False) -> Encoder:
    """The library's tokenizer without the steps that this package does itself."""
    ends = spec.get("post_processor") if keeps_ends else None
    bare = {**spec, "added_tokens": [], "truncation": None, "padding": None, "post_processor": ends}
    try:
        encoder = Encoder.from_buffer(msgspec.json.encode(bare))
    except Exception as error:  # the library raises its plain Exception for every fault in the file
        raise FileError(f"{name} is refused by the tokenizers library: {error}", path=name) from error
    return encoder


def _steps(spec: Any, list_key: str) -> list[Mapping[str, Any]]:
    """A pipeline as a flat list of its steps."""
    if not isinstance(spec, Mapping):
        return []
    if spec.get("type") == "Sequence":
        return [step for part in spec.get(list_key) or [] for step in _steps(part, list_key)]
    return [spec]


def _pieces(spec: Mapping[str, Any], encoder: Encoder, added: Iterable[AddedToken]) -> tuple[list[bytes], bool]:
    model_type, vocab = _model(spec.get("model"))
    ids = encoder.get_vocab(with_added_tokens=False) if vocab is None else vocab
    n_vocab = max(max(ids.values(), default=-1), max((a.id for a in added), default=-1)) + 1
    if n_vocab > 4 * len(ids) + 65536:
        raise FileError(f"the tokenizer names id {n_vocab - 1}, but holds only {len(ids)} tokens")
    texts = [""] * n_vocab
    for text, i in ids.items():
        texts[i] = text
    for a in added:
        texts[a.id] = a.text
    steps = {
        s.get("type")
        for s in (*_steps(spec.get("decoder"), "decoders"), *_steps(spec.get("pre_tokenizer"), "pretokenizers"))
    }
    if model_type == "WordPiece" or "WordPiece" in steps:
        encoder.add_special_tokens([a.text for a in added if a.text])
        return list(map(_word_piece, texts)), True
    if "ByteLevel" in steps:
        return list(map(byte_level_piece, texts)), False
    return sentence_pieces(texts, "ByteFallback" in steps), False


def _model(model: Any) -> tuple[str | None, dict[str, int] | None]:
    """Kind of a tokenizer's model, and its vocabulary where that is an object of ids."""
    if isinstance(model, Mapping):
        return model.get("type"), None
    try:
        found = msgspec.json.decode(model, type=_Model)
    except (msgspec.DecodeError, TypeError):
        return _kind(model), None
    is_whole = found.vocab is not None and min(found.vocab.values(), default=0) >= 0
    return found.type, found.vocab if is_whole else None


def _kind(model: Any) -> str | None:
    """A unigram model's vocabulary is a list, so its kind is read alone."""
    try:
        kind = msgspec.json.decode(model, type=dict[str, msgspec.Raw]).get("type")
        return None if kind is None else msgspec.json.decode(kind, type=str | None)
    except (msgspec.DecodeError, TypeError):
        return None


def _word_piece(text: str) -> bytes:
    return (text[2:] if text.startswith("##") else " " + text).encode("utf-8", "replace")


def _leading_space(spec: Mapping[str, Any], name: str) -> tuple[Encoder | None, bool]:
    """An encoder for later segments where only the text's start gets a space; whether decoding takes one away."""
    strips = any(
        s.get("type") == "Strip" and s.get("content") == " " and s.get("start")
        for s in _steps(spec.get("decoder"), "decoders")
    )
    is_first_only = False
    changed = copy.deepcopy(spec.get("pre_tokenizer"))
    for step in _steps(changed, "pretokenizers"):
        if step.get("type") == "Metaspace" and isinstance(step, dict):
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
            strips = strips or scheme != "never"
            if scheme == "first":
                is_first_only = True
                step["prepend_scheme"] = "never"
    return (_encoder({**spec, "pre_tokenizer": changed}, name) if is_first_only else None), strips


def _ends(
    spec: Mapping[str, Any], name: str, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[list[int], list[int]]:
    """Ids around every text: those of the post-processor, then what tokenizer_config says of bos and eos."""
    prefix: list[int] = []
    suffix: list[int] = []
    if spec.get("post_processor"):
        probe = _encoder(
            {"version": "1.0", "model": _PROBE_MODEL, "post_processor": spec["post_processor"]}, name, True
        )
        whole = probe.encode("a", add_special_tokens=True).ids
        at = whole.index(_PROBE_ID) if _PROBE_ID in whole else 0
        prefix, suffix = whole[:at], whole[at + 1 :]
    wants_bos, wants_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if bos is not None:
        if wants_bos is True and bos not in prefix:
            prefix = [bos, *prefix]
        elif wants_bos is False:
            prefix = [i for i in prefix if i != bos]
    if eos is not None:
        if wants_eos is True and eos not in suffix:
            suffix = [*suffix, eos]
        elif wants_eos is False:
            suffix = [i for i in suffix if i != eos]
    return prefix, suffix


def _pair(spec: Mapping[str, Any], name: str) -> PairEnds | None:
    """What the post-processor puts around and between two texts; None when it leaves one of them out."""
    if not spec.get("post_processor"):
        return None
    probe = _encoder({"version": "1.0", "model": _PROBE_MODEL, "post_processor": spec["post_processor"]}, name, True)
    whole = probe.encode("a", "a", add_special_tokens=True)
    found = list(zip(whole.ids, whole.type_ids, strict=True))
    at = [i for i, (token, _) in enumerate(found) if token == _PROBE_ID]
    if len(at) != 2:
        return None
    a, b = at
    return PairEnds(tuple(found[:a]), tuple(found[a + 1 : b]), tuple(found[b + 1 :]), (found[a][1], found[b][1]))


def _id_of(token: Any, by_text: Mapping[str, int], encoder: Encoder) -> int | None:
    """Id of a token that a config names by text, or by an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        return None
    found: int | None = by_text.get(text)
    return found if found is not None else encoder.token_to_id(text)


def _ids(config: Mapping[str, Any] | None) -> list[int]:
    value = (config or {}).get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
