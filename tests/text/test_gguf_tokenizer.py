from __future__ import annotations

import re
from typing import Any

import pytest
import sentencepiece
from octavo.errors import CorruptFile, UnsupportedModel
from octavo.text.gguf_tokenizer import parts_from_metadata
from octavo.text.pre_tokenizers import pre_tokenizer
from octavo.text.token_bytes import byte_alphabet
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tokenizers import pre_tokenizers


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    parts = parts_from_metadata({f"tokenizer.{key}": value for key, value in metadata.items()}, "m.gguf")
    assert parts is not None
    return Tokenizer(parts)


def byte_level(**changes: Any) -> dict[str, Any]:
    """Metadata of a small byte-level vocabulary: all bytes, three merges, two special tokens."""
    tokens = [*byte_alphabet(), "he", "ll", "Ġhe", "<s>", "</s>", "<think>"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": [1] * 259 + [3, 3, 4],
        "ggml.merges": ["h e", "l l", "Ġ he"],
        "ggml.bos_token_id": 259,
        "ggml.eos_token_id": 260,
        **changes,
    }


@pytest.fixture(scope="module")
def transformers_tokenizer(demo):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo.path.parent, gguf_file=demo.path.name)


@pytest.mark.demo
def test_demo_equals_transformers(demo_tokenizer, transformers_tokenizer, texts):
    compared = 0
    for text in texts:
        # transformers leaves out that this vocabulary splits every digit off first. That shows where two spaces
        # come before one, and in digits of other scripts.
        if re.search(r"\s\s\d", text) or any(character.isnumeric() and character > "9" for character in text):
            continue
        compared += 1
        ids = demo_tokenizer.encode(text)
        assert ids == transformers_tokenizer.encode(text), text
        assert demo_tokenizer.decode(ids) == transformers_tokenizer.decode(ids, skip_special_tokens=True)
        assert demo_tokenizer.decode(ids, skip_special_tokens=False) == transformers_tokenizer.decode(ids)
    assert compared > 150


@pytest.mark.demo
def test_demo_equals_its_published_pre_tokenizer(demo_tokenizer, transformers_tokenizer, texts):
    backend = transformers_tokenizer.backend_tokenizer
    before = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        for text in texts:
            assert demo_tokenizer.encode(text) == transformers_tokenizer.encode(text), text
    finally:
        backend.pre_tokenizer = before


@pytest.mark.demo
def test_demo_specials(demo_tokenizer):
    assert demo_tokenizer.encode("<|im_start|>user\nHi<|im_end|>")[0] == 1
    assert demo_tokenizer.encode("<|im_start|>user\nHi<|im_end|>")[-1] == 2
    assert (demo_tokenizer.bos_token_id, demo_tokenizer.eos_token_ids) == (1, (2,))
    assert demo_tokenizer.vocab_size == 49152
    assert demo_tokenizer.has_chat_template
    assert demo_tokenizer.token_to_id("<|im_end|>") == 2
    assert demo_tokenizer.token_to_id("no such token") is None
    assert demo_tokenizer.decode([1, 28120, 2]) == demo_tokenizer.decode([28120])
    assert demo_tokenizer.decode([1], skip_special_tokens=False) == "<|im_start|>"


SPLITS = {
    "llama-bpe": ["I", "'ll", " pay", " ", "123", "45", ".", "50", " EUR", "!\n\n", "  ", " OK"],
    "qwen2": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", ".", "5", "0", " EUR", "!\n\n", "  ", " OK"],
    "tekken": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", ".", "5", "0", " EUR", "!\n\n", "  ", " OK"],
    "gpt-4o": ["I'll", " pay", " ", "123", "45", ".", "50", " EUR", "!\n\n", "  ", " OK"],
    "gpt-2": ["I", "'ll", " pay", " 12345", ".", "50", " EUR", "!", "\n\n  ", " OK"],
    "smollm": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", ".", "5", "0", " EUR", "!", "\n\n  ", " OK"],
}


@pytest.mark.parametrize("name", SPLITS)
def test_how_text_is_split(name):
    text = "I'll pay 12345.50 EUR!\n\n   OK"
    alphabet = byte_alphabet()
    pieces = [
        bytes(alphabet[character] for character in piece).decode()
        for piece, _ in pre_tokenizer(name).pre_tokenize_str(text)
    ]
    assert pieces == SPLITS[name]


def test_splits_equal_transformers(texts):
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    from tokenizers import Regex

    known = set()
    for name, split in mapping.GGUF_PRE_TOKENIZER_SPLITS.items():
        ours = pre_tokenizer(name)
        theirs = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if isinstance(ours, pre_tokenizers.ByteLevel):
            continue
        known.add(name)
        for text in texts[:120]:
            assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), (name, text)
    assert {"llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"} <= known


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-coder", "seed-coder"])
def test_other_splits_lose_nothing(name, texts):
    for text in texts[:120]:
        pieces = "".join(piece for piece, _ in pre_tokenizer(name).pre_tokenize_str(text))
        alphabet = byte_alphabet()
        assert bytes(alphabet[character] for character in pieces).decode() == text


def test_an_unknown_split_warns(caplog):
    tokenizer = tokenizer_of(byte_level(**{"ggml.pre": "from-the-future"}))
    assert "'from-the-future' is not known" in caplog.text
    assert tokenizer.decode(tokenizer.encode("hello hello")) == "hello hello"


def test_byte_level():
    tokenizer = tokenizer_of(byte_level())
    tokens = byte_level()["ggml.tokens"]
    ids = tokenizer.encode("hello hé</s><think>")
    assert [tokens[token_id] for token_id in ids] == ["he", "ll", "o", "Ġ", "h", "Ã", "©", "</s>", "<think>"]
    assert tokenizer.decode(ids) == "hello hé<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello hé</s><think>"


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({}, [], []),
        ({"ggml.add_bos_token": True}, [259], []),
        ({"ggml.add_bos_token": True, "ggml.add_eos_token": True}, [259], [260]),
        ({"ggml.pre": "llama-bpe"}, [259], []),
        ({"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}, [], []),
        ({"ggml.add_bos_token": True, "ggml.bos_token_id": 10**6}, [], []),
    ],
)
def test_what_is_put_around_a_text(changes, before, after):
    tokenizer = tokenizer_of(byte_level(**changes))
    inner = tokenizer.encode("x", add_special_tokens=False)
    assert len(inner) == 1
    assert tokenizer.encode("x") == [*before, *inner, *after]


def test_whole_words_of_the_vocabulary_where_merges_are_ignored():
    changes = {"ggml.tokens": [*byte_level()["ggml.tokens"], "hello"], "ggml.token_type": [1] * 259 + [3, 3, 4, 1]}
    assert tokenizer_of(byte_level(**changes)).encode("hello") != [262]
    assert tokenizer_of(byte_level(**changes, **{"ggml.pre": "llama-bpe"})).encode("hello") == [259, 262]


def test_end_tokens():
    assert tokenizer_of(byte_level()).eos_token_ids == (260,)
    assert tokenizer_of(byte_level(**{"ggml.eot_token_id": 259})).eos_token_ids == (260, 259)
    tokens = byte_level()["ggml.tokens"]
    tokens[259] = "<|eot_id|>"
    assert tokenizer_of(byte_level(**{"ggml.tokens": tokens})).eos_token_ids == (260, 259)


def test_chat_templates():
    tokenizer = tokenizer_of(
        byte_level(chat_template="plain {{ bos_token }}", **{"chat_template.tool_use": "tools {{ eos_token }}"})
    )
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "plain <s>"
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "tools </s>"
    assert tokenizer.encode_chat(messages) == tokenizer.encode("plain <s>", add_special_tokens=False)


@pytest.mark.demo
def test_a_whole_tokenizer_in_the_file_is_used(demo_tokenizer, texts):
    whole = demo_tokenizer._backend.to_str()
    tokenizer = tokenizer_of(byte_level(**{"huggingface.json": whole}))
    assert tokenizer.encode(texts[9]) == demo_tokenizer.encode(texts[9])


@pytest.fixture(scope="module")
def llama_model(texts, tmp_path_factory):
    """A SentencePiece model with Llama 2's settings, and GGUF metadata made from it."""
    prefix = tmp_path_factory.mktemp("sp") / "llama"
    lines = [line for text in texts[21:27] for line in text.splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    ids = range(model.vocab_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    metadata = {
        "ggml.model": "llama",
        "ggml.tokens": [model.id_to_piece(i) for i in ids],
        "ggml.scores": [model.get_score(i) for i in ids],
        "ggml.token_type": kinds,
        "ggml.bos_token_id": model.bos_id(),
        "ggml.eos_token_id": model.eos_id(),
        "ggml.unknown_token_id": model.unk_id(),
    }
    return model, metadata


def test_sentencepiece_equals_its_own_library(llama_model, texts):
    model, metadata = llama_model
    tokenizer = tokenizer_of(metadata)
    for text in texts:
        if "\0" in text:
            continue
        ids = tokenizer.encode(text)
        assert ids == [model.bos_id(), *model.encode(text)], text
        assert tokenizer.decode(ids) == model.decode(ids[1:]), text


def test_sentencepiece_equals_transformers(llama_model, texts):
    from transformers import LlamaTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import get_merges

    _, metadata = llama_model
    vocabulary = {token: token_id for token_id, token in enumerate(metadata["ggml.tokens"])}
    plain = {key.removeprefix("ggml."): value for key, value in metadata.items()}
    oracle = LlamaTokenizer(vocab=vocabulary, merges=get_merges(plain), add_bos_token=True)
    tokenizer = tokenizer_of(metadata)
    compared = 0
    for text in texts:
        if not text or text.startswith((" ", "▁")):  # transformers adds no second space there
            continue
        compared += 1
        assert tokenizer.encode(text) == oracle.encode(text), text
    assert compared > 300


def test_sentencepiece_without_the_added_space(llama_model):
    _, metadata = llama_model
    tokenizer = tokenizer_of({**metadata, "ggml.add_space_prefix": False, "ggml.add_bos_token": False})
    ids = tokenizer.encode("the core")
    assert not metadata["ggml.tokens"][ids[0]].startswith("▁")
    assert tokenizer.decode(ids) == "the core"
    assert not tokenizer.vocabulary.drop_leading_space


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.merges": ["he"]}, "'he'; two tokens are expected"),
        ({"ggml.merges": ["h absent"]}, "do not fit together"),
        ({"ggml.merges": [1, 2]}, "no list of strings"),
        ({"ggml.token_type": [1, 2]}, "one entry a token"),
        ({"ggml.eos_token_id": "2"}, "`tokenizer.ggml.eos_token_id` is '2'"),
        ({"ggml.tokens": ["a", "a", "b"], "ggml.token_type": [1, 1, 1], "ggml.merges": []}, "twice"),
        ({"ggml.model": "llama"}, "`tokenizer.ggml.scores`"),
        ({"huggingface.json": "{"}, "do not fit together"),
    ],
)
def test_vocabularies_that_cannot_be(changes, message):
    with pytest.raises(CorruptFile, match=message):
        tokenizer_of(byte_level(**changes))


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", None])
def test_other_kinds(kind):
    with pytest.raises(UnsupportedModel, match="reads gpt2 and llama vocabularies"):
        tokenizer_of(byte_level(**{"ggml.model": kind}))


def test_no_tokenizer_in_the_file():
    assert parts_from_metadata({"general.architecture": "llama"}, "m.gguf") is None


@pytest.mark.demo
def test_load_tokenizer(demo):
    tokenizer = load_tokenizer(demo)
    assert tokenizer is not None
    assert tokenizer.encode("Hello world") == [19556, 905]
