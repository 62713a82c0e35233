"""How byte-level vocabularies split text before merging, by GGUF's `tokenizer.ggml.pre`.

The patterns are those of the models' published `tokenizer.json` files.
"""

from __future__ import annotations

import logging

from tokenizers import Regex, pre_tokenizers

__all__ = ["ADDS_BOS", "IGNORES_MERGES", "pre_tokenizer"]

_LOG = logging.getLogger("octavo")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_JOINED = r"[^\r\n\p{L}\p{N}]?"

_LLAMA3 = rf"{_CONTRACTIONS}|{_JOINED}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_JOINED}\p{{L}}+|\p{{N}}|{_MARKS}|{_SPACES}"
_QWEN35 = rf"{_CONTRACTIONS}|{_JOINED}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = (
    rf"{_JOINED}{_UPPER}*{_LOWER}+|{_JOINED}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"{_JOINED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_JOINED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_SEED_CODER = rf"{_CONTRACTIONS}|{_JOINED}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")

_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "lfm2",
            "midm-2.0",
            "dbrx",
            "smaug-bpe",
        ),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"),
        (_QWEN2,),
    ),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), (_GPT4O,)),
    "seed-coder": (_SEED_CODER,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-coder": _DEEPSEEK_CODER,
}
_SINGLE_DIGITS = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
)
_GPT2 = frozenset(
    (
        "gpt-2",
        "default",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "mellum",
        "exaone4",
        "gigachat",
        "a.x-4.0",
    )
)

IGNORES_MERGES = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "tekken")
)
"""A whole word that is in the vocabulary is one token, whatever the merges say."""

ADDS_BOS = IGNORES_MERGES
"""A text begins with the BOS token where the file does not say."""


def pre_tokenizer(name: str | None) -> pre_tokenizers.PreTokenizer:
    """The splitter of one `tokenizer.ggml.pre`; GPT-2's, with a warning, for names not known here."""
    splits = _SPLITS.get(name or "")
    if splits is not None:
        return pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name is not None and name not in _GPT2:
        _LOG.warning(
            "tokenizer.ggml.pre %r is not known: text is split as GPT-2 does, which may cost quality; "
            "the model's own tokenizer.json (tokenizer setting) avoids that",
            name,
        )
    return byte_level
