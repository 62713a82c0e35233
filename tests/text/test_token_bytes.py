from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
from octavo.errors import UnsupportedModel
from octavo.text.sentencepiece import sentencepiece_tokenizer
from octavo.text.token_bytes import SPECIAL, byte_alphabet, vocabulary_bytes
from octavo.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend


def table_text(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    packed = struct.pack(f"<{len(ids)}i", *ids)
    return tokenizer.token_table().decode(packed, skip_special_tokens=skip_special_tokens).decode()


def wrap(backend: Backend) -> Tokenizer:
    from octavo.text.parts import TokenizerParts

    return Tokenizer(TokenizerParts(backend, {}, None, (), {}))


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    """Pieces with and without a mark, all bytes, and special tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "the", "▁日", "é", "a", "x▁y", "<0x4", "<0x0A>>", "🎉", "\n"]
    backend = sentencepiece_tokenizer(pieces, [0.0] * len(pieces), unknown="<unk>", add_space_prefix=True)
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in ("<s>", "</s>")])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return wrap(backend)


def test_the_alphabet_is_that_of_the_tokenizers_package():
    from tokenizers import pre_tokenizers

    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(chr(code) for code in range(0x800))
    spelled = "".join(piece for piece, _ in split.pre_tokenize_str(text))
    assert bytes(alphabet[character] for character in spelled) == text.encode()


@pytest.mark.demo
def test_demo_bytes(demo_tokenizer):
    vocabulary = demo_tokenizer.vocabulary
    assert len(vocabulary.tokens) == len(vocabulary.flags) == 49152
    assert vocabulary.tokens[demo_tokenizer.encode(" the")[0]] == b" the"
    assert [token_id for token_id, flag in enumerate(vocabulary.flags) if flag & SPECIAL] == list(range(17))
    assert not vocabulary.drop_leading_space
    assert demo_tokenizer.token_bytes(2) == b"<|im_end|>"
    assert demo_tokenizer.token_bytes(49152) == demo_tokenizer.token_bytes(-1) == b""


@pytest.mark.demo
@pytest.mark.parametrize("skip", [True, False])
def test_demo_table_decodes_as_the_tokenizer(demo_tokenizer, skip):
    rng = random.Random(3)
    table = demo_tokenizer.token_table()
    for _ in range(1500):
        ids = [rng.randrange(49152) if rng.random() < 0.9 else rng.randrange(17) for _ in range(rng.randint(0, 20))]
        text = table.decode(struct.pack(f"<{len(ids)}i", *ids), skip_special_tokens=skip).decode()
        assert text == demo_tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.demo
def test_demo_table_decodes_text(demo_tokenizer, texts):
    for text in texts[:100]:
        ids = demo_tokenizer.encode(text)
        assert table_text(demo_tokenizer, ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("skip", [True, False])
def test_sentencepiece_table_decodes_as_the_tokenizer(llama, skip):
    rng = random.Random(4)
    packed = 0
    for _ in range(1500):
        ids = [rng.randrange(llama.vocab_size) for _ in range(rng.randint(0, 8))]
        ids += [3 + byte for byte in rng.choice(["é", "日本", "🎉", "", " a"]).encode()]
        expected = llama.decode(ids, skip_special_tokens=skip)
        if "\ufffd" in expected:  # the tokenizer writes one mark a byte there
            continue
        packed += 1
        assert table_text(llama, ids, skip_special_tokens=skip) == expected, ids
    assert packed > 100


def test_sentencepiece_bytes(llama):
    tokens = llama.vocabulary.tokens
    assert tokens[3 + 0x0A] == b"\n"
    assert tokens[3 + 0xFF] == b"\xff"
    assert [tokens[3 + 256 + index] for index in range(8)] == [
        b" ",
        b"  ",
        b" the",
        b"the",
        " 日".encode(),
        "é".encode(),
        b"a",
        b"x y",
    ]
    assert tokens[-1] == b"<think>"
    assert list(llama.vocabulary.flags[:3]) == [0, SPECIAL, SPECIAL]
    assert llama.vocabulary.flags[-1] == 0
    assert llama.vocabulary.drop_leading_space


def test_only_the_first_space_is_dropped(llama):
    the = llama.token_to_id("▁the")
    two = llama.token_to_id("▁▁")
    for ids in ([the, the], [two, the], [1, the], [3 + 0x20, the], [the]):
        assert table_text(llama, ids) == llama.decode(ids)
    assert table_text(llama, [the, the]) == "the the"


def test_metaspace_decoders():
    backend = Backend(models.BPE(vocab={"▁the": 0, "re": 1}, merges=[]))
    backend.decoder = decoders.Metaspace()
    assert vocabulary_bytes(backend).drop_leading_space
    assert table_text(wrap(backend), [0, 1, 0]) == backend.decode([0, 1, 0]) == "there the"
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    assert table_text(wrap(backend), [0, 1, 0]) == backend.decode([0, 1, 0]) == " there the"


def test_ids_without_tokens():
    backend = Backend(models.BPE(vocab={"a": 0, "b": 5}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = wrap(backend)
    assert tokenizer.vocabulary.tokens == [b"a", b"", b"", b"", b"", b"b"]
    assert tokenizer.vocab_size == 6
    assert len(tokenizer.token_table()) == 6
    assert len(tokenizer.token_table(9)) == 9
    assert len(tokenizer.token_table(2)) == 2
    assert tokenizer.vocabulary.resized(9).tokens == [b"a", b"", b"", b"", b"", b"b", b"", b"", b""]
    assert tokenizer.vocabulary.resized(2).tokens == [b"a", b""]


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Strip(content="_", left=1, right=1)])
def test_decoders_that_work_on_more_than_one_token(decoder):
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(UnsupportedModel, match="tokenizer: "):
        vocabulary_bytes(backend)
