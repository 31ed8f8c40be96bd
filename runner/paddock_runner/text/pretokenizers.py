"""How each kind of byte-level BPE cuts text into words before merging, by the name GGUF gives it (`tokenizer.ggml.pre`).

Each kind is a list of regular expressions, applied one after the other: a match becomes a word of its own and so does what
lies between matches. The expressions are those of the checkpoints' own tokenizer.json files (Oniguruma syntax), except that a look
ahead over digits ends after 1200 of them: without an end its cost grows with the square of the text.
Source: ggml-org/llama.cpp src/llama-vocab.cpp (names, flags and the shorter expressions), the publishers' tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_TAIL_SLASH}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_TAIL_SLASH}"
)
_DEEPSEEK3_WORDS = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DIGIT_THEN_GPT2 = (r"\p{N}", _GPT2)
_HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_HAN_UPPER}*{_HAN_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HAN_UPPER}+{_HAN_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_TAIL}"
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_COMPOSING = ("qwen2", "deepseek-r1-qwen")
_LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Word patterns of one kind, and what llama.cpp assumes with it.

    ignores_merges: a word that is a token as a whole is taken at once, whatever the merges say.
    adds_bos: the default where the file does not say.
    is_byte_level: words are spelled in the 256 characters of GPT-2; else spaces become U+2581 and unknown bytes <0xXX>.
    composes: the text is put into Unicode form C first, as the family's own tokenizer.json does (GGUF does not carry this).
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    is_byte_level: bool = True
    composes: bool = False


def _kinds() -> dict[str, PreTokenizer]:
    table: dict[str, PreTokenizer] = {}

    def kind(names: str, *patterns: str, merges: bool = True, bos: bool = False, raw: bool = False) -> None:
        for name in names.split():
            table[name] = PreTokenizer(patterns, not merges, bos, not raw, name in _COMPOSING)

    kind(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        merges=False,
        bos=True,
    )
    kind("dbrx smaug-bpe chatglm-bpe", _LLAMA3)
    kind("glm4 glm5", _LLAMA3, merges=False)
    kind("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2)
    kind("qwen35", _QWEN35)
    kind("ufakzeka", rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}")
    kind("laguna", _LINES, _QWEN2)
    kind("minicpm5", r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+"), merges=False)
    kind(
        "jais-2",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s{1}",
    )
    kind("tekken", _TEKKEN, merges=False, bos=True)
    kind("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O)
    kind("granite-embed-multi-97m", _GPT4O, merges=False)
    kind("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3}){0,400}\b)", _GPT4O)
    kind(
        "youtu",
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
        merges=False,
    )
    kind("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_DEEPSEEK3)
    kind(
        "spark2_5",
        *_DEEPSEEK3[:2],
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    )
    kind(
        "deepseek-llm",
        "[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _DEEPSEEK_CJK,
        r"\p{N}",
    )
    kind("deepseek-coder", "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
    kind("falcon", *_FALCON)
    kind("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4", _GPT2)
    kind("mpt olmo jais trillion granite-docling", _GPT2)
    kind("jina-v1-en jina-v2-code roberta-bpe", _GPT2)
    kind("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", *_DIGIT_THEN_GPT2)
    kind("poro-chat bloom gpt3-finnish", _BLOOM)
    kind("viking", _BLOOM, r"\p{N}")
    kind("kimi-k2", _KIMI)
    kind("superbpe", r"\p{N}+", r"(?=(\d{3}){1,400}(?!\d))")
    kind(
        "bailingmoe bailingmoe2 llada-moe",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    )
    kind(
        "seed-coder",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
    kind(
        "exaone-moe",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )
    kind("gemma4 granite-embed-multi-311m", _LINES, bos=True, raw=True)
    kind("sarvam-moe", _LINES, raw=True)
    return table


KINDS = _kinds()


def pre_tokenizer(name: str) -> PreTokenizer:
    """The kind of that name.

    Raises: UnsupportedError, naming it and the known ones (an older file may name none: its words cannot be cut rightly).
    """
    try:
        return KINDS[name]
    except KeyError:
        known = ", ".join(sorted(KINDS))
        named = f"the pre-tokenizer '{name}'" if name else "a file that names no pre-tokenizer (tokenizer.ggml.pre)"
        raise UnsupportedError(
            f"Paddock does not know {named}",
            f"take a newer conversion of the model; known: {known}",
            what=name,
            supported=sorted(KINDS),
        ) from None
