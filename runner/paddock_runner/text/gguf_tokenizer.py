"""A Tokenizer from the metadata of a GGUF file (keys `tokenizer.ggml.*`).

Source: ggml-org/llama.cpp src/llama-vocab.cpp for defaults and the meaning of the keys; google/sentencepiece for what SPM does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from ..errors import FileError, UnsupportedError
from .pretokenizers import PreTokenizer, pre_tokenizer
from .tokenizer import Tokenizer, TokenizerParts
from .vocabulary import (
    END_TEXTS,
    GLM_END_TEXTS,
    AddedToken,
    byte_level_piece,
    end_ids,
    end_of_turn_id,
    fill_ids,
    sentence_piece,
)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_KEY = "tokenizer.ggml."
_MODELS = ("gpt2", "gemma4", "llama", "t5", "bert")
_MAX_TOKEN_CHARACTERS = 4096
_SPM_LONGEST = 256  # characters of a token that merging may build; longer ones are matched whole or not at all
_NAMED_IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
_ORDINARY_ENDS = ("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]")  # also plain text in many vocabularies
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@dataclass
class _Vocab:
    """The metadata, checked and decoded. ids: special ids by name ("bos", "eos", ...)."""

    model: str
    texts: list[str]
    types: list[int]
    scores: Sequence[float]
    merges: Sequence[Any]
    ids: dict[str, int]
    metadata: Mapping[str, Any]

    def flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(_KEY + name)
        return default if value is None else bool(value)

    def vocabulary(self, kinds: tuple[int, ...]) -> dict[str, int]:
        """text -> id of the tokens of these types; of equal texts the first."""
        found: dict[str, int] = {}
        for i, (text, kind) in enumerate(zip(self.texts, self.types, strict=True)):
            if kind in kinds:
                found.setdefault(text, i)
        return found


def tokenizer_from_gguf(metadata: Mapping[str, Any], n_rows: int | None = None) -> Tokenizer:
    """The tokenizer that a GGUF file describes. n_rows: rows of its embedding.

    Raises: UnsupportedError for a kind of tokenizer or pre-tokenizer that is not known, FileError when the arrays disagree.
    """
    vocab = _read(metadata)
    if vocab.model in ("gpt2", "gemma4"):
        parts = _byte_pair_parts(vocab)
    elif vocab.model == "llama":
        parts = _sentence_parts(vocab)
    elif vocab.model == "t5":
        parts = _unigram_parts(vocab)
    else:
        parts = _word_parts(vocab)
    return Tokenizer(parts, n_rows)


def _read(metadata: Mapping[str, Any]) -> _Vocab:
    model = str(metadata.get(_KEY + "model", ""))
    if model not in _MODELS:
        raise UnsupportedError(
            f"Paddock does not know the tokenizer '{model}' of this file" if model else "the file holds no tokenizer",
            f"known: {', '.join(_MODELS)}",
            what=model,
            supported=list(_MODELS),
        )
    tokens = metadata.get(_KEY + "tokens")
    if tokens is None or len(tokens) == 0:
        raise FileError("the file names a tokenizer but holds no tokens", "tokenizer.ggml.tokens is missing or empty")
    texts = [t if isinstance(t, str) else bytes(t).decode("utf-8", "replace") for t in tokens[:]]
    longest = max(map(len, texts))
    if longest > _MAX_TOKEN_CHARACTERS:
        raise FileError(f"a token of {longest} characters is longer than any tokenizer's ({_MAX_TOKEN_CHARACTERS})")
    texts = [t or f"[EMPTY_{i}]" for i, t in enumerate(texts)]
    types = _numbers(metadata, "token_type", len(texts), _NORMAL)
    scores = _numbers(metadata, "scores", len(texts), 0.0)
    ids = {}
    for name in _NAMED_IDS:
        value = metadata.get(f"{_KEY}{name}_token_id", _DEFAULT_IDS.get(model, {}).get(name))
        if value is not None and 0 <= int(value) < len(texts):
            ids[name] = int(value)
    merges = metadata.get(_KEY + "merges")
    vocab = _Vocab(model, texts, list(types), scores, merges if merges is not None else (), ids, metadata)
    _mark_special(vocab)
    return vocab


def _numbers(metadata: Mapping[str, Any], name: str, n_tokens: int, default: float) -> Sequence[Any]:
    values = metadata.get(_KEY + name)
    if values is None or len(values) == 0:
        return [default] * n_tokens
    if len(values) < n_tokens:
        raise FileError(
            f"tokenizer.ggml.{name} holds {len(values)} values for {n_tokens} tokens", need=n_tokens, have=len(values)
        )
    found: Sequence[Any] = values[:n_tokens]
    return found


def _mark_special(vocab: _Vocab) -> None:
    """Tokens that end a turn are control tokens, whatever the file's conversion made of them."""
    texts = set(vocab.texts)
    wanted = texts.intersection(END_TEXTS).difference(_ORDINARY_ENDS, () if "[gMASK]" in texts else GLM_END_TEXTS)
    has_types = vocab.metadata.get(_KEY + "token_type") is not None
    for i, text in enumerate(vocab.texts):
        if text in wanted and vocab.types[i] in (_NORMAL, _USER_DEFINED):
            vocab.types[i] = _CONTROL
    for name in ("bos", "eos", "eot", "eom", "padding"):
        if name in vocab.ids and (name == "eos" or not has_types):
            vocab.types[vocab.ids[name]] = _CONTROL


def _added(vocab: _Vocab) -> list[AddedToken]:
    name = str(vocab.metadata.get("general.name", "")).lower()
    is_phi3 = "phi-3" in name or "phi3" in name
    found = []
    for i, (text, kind) in enumerate(zip(vocab.texts, vocab.types, strict=True)):
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
            strips = is_phi3 and text not in _PHI3_KEEPS_SPACE
            found.append(AddedToken(i, text, kind != _USER_DEFINED, strips_right=strips))
    return found


def _parts(
    vocab: _Vocab, encoder: Encoder, pieces: list[bytes], prefix: list[int], suffix: list[int], **more: Any
) -> TokenizerParts:
    special = vocab.vocabulary((_CONTROL,))
    eos = vocab.ids.get("eos")
    eot = vocab.ids.get("eot")
    return TokenizerParts(
        encoder=encoder,
        pieces=pieces,
        added=_added(vocab),
        prefix=prefix,
        suffix=suffix,
        bos_id=vocab.ids.get("bos"),
        eos_id=eos,
        eot_id=eot if eot is not None else end_of_turn_id(special, eos),
        stop_ids=end_ids(special, [eos, eot, vocab.ids.get("eom")]),
        fill_ids=_fill_ids(vocab),
        **more,
    )


def _fill_ids(vocab: _Vocab) -> tuple[int, int, int] | None:
    for names in (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")):
        found = [vocab.metadata.get(f"{_KEY}{name}_token_id") for name in names]
        if all(isinstance(i, int) and 0 <= i < len(vocab.texts) for i in found):
            return int(found[0] or 0), int(found[1] or 0), int(found[2] or 0)
    return fill_ids(vocab.vocabulary((_CONTROL, _USER_DEFINED)))


def _ends(vocab: _Vocab, adds_bos: bool, adds_eos: bool = False) -> tuple[list[int], list[int]]:
    prefix: list[int] = []
    suffix: list[int] = []
    for name, is_wanted, into in (("bos", adds_bos, prefix), ("eos", adds_eos, suffix)):
        if not vocab.flag(f"add_{name}_token", is_wanted):
            continue
        if name in vocab.ids:
            into.append(vocab.ids[name])
        elif vocab.metadata.get(f"{_KEY}add_{name}_token"):
            raise FileError(f"the file asks for a {name} token around every text but names none")
    return prefix, suffix


def _byte_pair_parts(vocab: _Vocab) -> TokenizerParts:
    kind = pre_tokenizer("gemma4" if vocab.model == "gemma4" else str(vocab.metadata.get(_KEY + "pre", "")))
    known = vocab.vocabulary((_NORMAL, _USER_DEFINED, _UNUSED, _BYTE))
    merges = _merges(vocab, known)
    encoder = Encoder(
        models.BPE(
            known,
            merges,
            ignore_merges=kind.ignores_merges,
            byte_fallback=not kind.is_byte_level,
            cache_capacity=20_000,
        )
    )
    splits: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in kind.patterns]
    if kind.is_byte_level:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        if kind.composes:
            encoder.normalizer = normalizers.NFC()
    else:
        encoder.normalizer = normalizers.Replace(" ", "▁")
    encoder.pre_tokenizer = pre_tokenizers.Sequence(splits)
    prefix, suffix = _ends(vocab, kind.adds_bos)
    if not kind.is_byte_level and not prefix and "bos" in vocab.ids and vocab.model == "gemma4":
        prefix = [vocab.ids["bos"]]  # some conversions say false; the family is trained with it
    return _parts(vocab, encoder, _byte_pair_pieces(vocab, kind), prefix, suffix)


def _byte_pair_pieces(vocab: _Vocab, kind: PreTokenizer) -> list[bytes]:
    pieces = []
    for text, token_type in zip(vocab.texts, vocab.types, strict=True):
        if token_type in (_CONTROL, _UNKNOWN, _USER_DEFINED):
            pieces.append(text.encode("utf-8", "replace"))
        elif kind.is_byte_level:
            pieces.append(byte_level_piece(text))
        else:
            pieces.append(sentence_piece(text))
    return pieces


def _merges(vocab: _Vocab, known: Mapping[str, int]) -> list[tuple[str, str]]:
    if len(vocab.merges) == 0:
        if str(vocab.metadata.get(_KEY + "pre")) == "kimi-k2":
            return _merges_by_rank(known)
        raise FileError("the file holds a byte-pair tokenizer without its merges", "tokenizer.ggml.merges is missing")
    merges = []
    for merge in vocab.merges[:]:
        text = merge if isinstance(merge, str) else bytes(merge).decode("utf-8", "replace")
        cut = text.find(" ", 1)
        left, right = text[:cut], text[cut + 1 :]
        if cut > 0 and left in known and right in known and left + right in known:
            merges.append((left, right))
    return merges


def _merges_by_rank(known: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges of a rank-ordered vocabulary (tiktoken): each token is made of the two that its lower-ranked part tokens leave."""
    merges = []
    for token, rank in sorted(known.items(), key=lambda item: item[1]):
        symbols = list(token)
        while len(symbols) > 2:
            ranks = [known.get(a + b, rank) for a, b in itertools.pairwise(symbols)]
            best = min(ranks)
            if best >= rank:
                break
            at = ranks.index(best)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        if len(symbols) == 2:
            merges.append((symbols[0], symbols[1]))
    return merges


def _sentence_parts(vocab: _Vocab) -> TokenizerParts:
    known = vocab.vocabulary((_NORMAL, _USER_DEFINED, _UNUSED))
    merges = score_merges(known, vocab.scores)
    for text, i in vocab.vocabulary((_BYTE, _UNKNOWN)).items():
        known.setdefault(text, i)
    unknown = vocab.texts[vocab.ids["unknown"]] if "unknown" in vocab.ids else None
    encoder = Encoder(
        models.BPE(
            known,
            merges,
            unk_token=unknown if unknown in known else None,
            fuse_unk=True,
            byte_fallback=True,
            cache_capacity=0,
        )
    )
    has_space_prefix = vocab.flag("add_space_prefix", True)
    escape = normalizers.Replace(" ", "▁")
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape]) if has_space_prefix else escape
    pieces = [
        text.encode("utf-8", "replace") if kind in (_CONTROL, _UNKNOWN) else sentence_piece(text, kind == _BYTE)
        for text, kind in zip(vocab.texts, vocab.types, strict=True)
    ]
    prefix, suffix = _ends(vocab, True)
    return _parts(vocab, encoder, pieces, prefix, suffix, drops_leading_space=has_space_prefix)


def score_merges(known: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SPM's rule (merge the neighbours whose union has the best score, leftmost first) as an ordered list of merges.

    Of equal scores the longer union comes first and then the longer left half: that is the order in which merging from the
    left meets them.
    """
    unions = [(-scores[i], -len(text), text) for text, i in known.items() if 2 <= len(text) <= _SPM_LONGEST]
    unions.sort()
    merges: list[tuple[str, str]] = []
    n_done, is_known = 0, known.__contains__
    while n_done < len(unions):
        score, less, text = unions[n_done]
        n_done += 1
        cuts = range(-less - 1, 0, -1)
        if n_done == len(unions) or unions[n_done][1] != less or unions[n_done][0] != score:
            for cut in cuts:
                if is_known(left := text[:cut]) and is_known(right := text[cut:]):
                    merges.append((left, right))
            continue
        alike = [text]
        while n_done < len(unions) and unions[n_done][:2] == (score, less):
            alike.append(unions[n_done][2])
            n_done += 1
        merges += ((t[:cut], t[cut:]) for cut in cuts for t in alike if is_known(t[:cut]) and is_known(t[cut:]))
    return merges


def _unigram_parts(vocab: _Vocab) -> TokenizerParts:
    usable = (_NORMAL, _USER_DEFINED, _UNUSED)
    entries = []
    for i, (text, kind) in enumerate(zip(vocab.texts, vocab.types, strict=True)):
        # an entry that must never match keeps its place under a name no normalized text can hold
        name = text if kind in usable or i == vocab.ids.get("unknown") else f"\0{i}"
        entries.append((name, 0.0 if kind == _USER_DEFINED else float(vocab.scores[i])))
    encoder = Encoder(models.Unigram(entries, vocab.ids.get("unknown"), False))
    steps: list[Any] = []
    charsmap = vocab.metadata.get(_KEY + "precompiled_charsmap")
    if charsmap is not None and len(charsmap):
        data = bytes(int(b) & 0xFF for b in charsmap[:])
        try:
            steps.append(normalizers.Precompiled(data))
        except Exception as error:  # the library raises its plain Exception for a bad map
            raise FileError(f"tokenizer.ggml.precompiled_charsmap is damaged: {error}") from error
    if vocab.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        encoder.normalizer = normalizers.Sequence(steps)
    has_space_prefix = vocab.flag("add_space_prefix", True)
    encoder.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always" if has_space_prefix else "never", split=False)
    pieces = [
        sentence_piece(text, kind == _BYTE) if kind in (*usable, _BYTE) else text.encode("utf-8", "replace")
        for text, kind in zip(vocab.texts, vocab.types, strict=True)
    ]
    prefix, suffix = _ends(vocab, False, True)
    return _parts(vocab, encoder, pieces, prefix, suffix, drops_leading_space=has_space_prefix)


def _word_parts(vocab: _Vocab) -> TokenizerParts:
    known: dict[str, int] = {}
    pieces = []
    for i, (text, kind) in enumerate(zip(vocab.texts, vocab.types, strict=True)):
        if kind in (_NORMAL, _UNUSED):
            name = text[1:] if text.startswith("▁") else f"##{text}"
            pieces.append((" " + text[1:] if text.startswith("▁") else text).encode("utf-8", "replace"))
        else:
            name = text
            pieces.append(text.encode("utf-8", "replace"))
        known.setdefault(name, i)
    unknown = vocab.texts[vocab.ids["unknown"]] if "unknown" in vocab.ids else "[UNK]"
    encoder = Encoder(models.WordPiece(known, unk_token=unknown, max_input_chars_per_word=100))
    lowercase = vocab.flag("normalizer.lowercase", True)
    encoder.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=vocab.flag("normalizer.strip_accents", lowercase),
        lowercase=lowercase,
    )
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoder.decoder = decoders.WordPiece("##", True)
    prefix = [vocab.ids["bos"]] if "bos" in vocab.ids else []
    suffix = [vocab.ids["seperator"]] if "seperator" in vocab.ids else []
    return _parts(vocab, encoder, pieces, prefix, suffix, decodes_words=True)
