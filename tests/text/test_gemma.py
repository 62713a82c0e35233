"""Gemma: no space before a text, byte fallback, runs of spaces as tokens, and its chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from octavo.errors import InvalidRequest
from octavo.loading.resolve import ModelSource
from octavo.text.chat_template import ChatTemplate
from octavo.text.gguf_tokenizer import parts_from_metadata
from octavo.text.tokenizer import Tokenizer, load_tokenizer

RUNS = ["▁▁", "▁▁▁", "\n\n", "<b>"]
TURN = "<start_of_turn>"


@pytest.fixture(scope="module")
def gemma_model(texts, tmp_path_factory) -> Path:
    """A SentencePiece model with Gemma's settings."""
    folder = tmp_path_factory.mktemp("gemma")
    lines = [line for text in texts[21:27] for line in text.splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=RUNS,
        control_symbols=[TURN],
        minloglevel=2,
    )
    return folder


@pytest.fixture(scope="module")
def library(gemma_model) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(gemma_model / "tokenizer.model"))


def gguf_tokenizer(library: sentencepiece.SentencePieceProcessor, **changes: Any) -> Tokenizer:
    pieces = [library.id_to_piece(token) for token in range(library.vocab_size())]
    kinds = [
        2 if library.is_unknown(token)
        else 3 if library.is_control(token)
        else 6 if library.is_byte(token)
        else 4 if piece in RUNS
        else 1
        for token, piece in enumerate(pieces)
    ]  # fmt: skip
    metadata = {
        "model": "llama",
        # llama.cpp's converter writes the spaces of user-defined tokens as spaces.
        "tokens": [piece.replace("▁", " ") if piece in RUNS else piece for piece in pieces],
        "scores": [library.get_score(token) for token in range(library.vocab_size())],
        "token_type": kinds,
        "bos_token_id": library.bos_id(),
        "eos_token_id": library.eos_id(),
        "unknown_token_id": library.unk_id(),
        "add_space_prefix": False,
        "add_bos_token": True,
        **changes,
    }
    parts = parts_from_metadata({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, "m.gguf")
    assert parts is not None
    return Tokenizer(parts)


def check_against_library(
    tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor, texts: list[str]
) -> None:
    table = tokenizer.vocabulary
    assert not table.drop_leading_space
    for text in [*texts, " a", "  a", "a   b", "\n\n\n", "x<b> y"]:
        if "\0" in text or TURN in text:
            continue
        ids = tokenizer.encode(text)
        assert ids == [library.bos_id(), *library.encode(text)], text
        assert tokenizer.decode(ids) == text
        assert b"".join(table.tokens[token] for token in ids[1:]).decode() == text


def test_gguf_equals_its_own_library(library, texts):
    check_against_library(gguf_tokenizer(library), library, texts)
    assert gguf_tokenizer(library, add_bos_token=False).encode("the") == library.encode("the")


def test_a_model_file_equals_its_own_library(gemma_model, library, texts):
    tokenizer = load_tokenizer(ModelSource("folder", gemma_model, "gemma"))
    assert tokenizer is not None
    check_against_library(tokenizer, library, texts)


def test_a_folder_equals_transformers(library, tmp_path, texts):
    from transformers import GemmaTokenizer

    vocabulary = {library.id_to_piece(token): token for token in range(library.vocab_size())}
    from octavo.text.sentencepiece import merges_of

    scores = [library.get_score(token) for token in range(library.vocab_size())]
    oracle = GemmaTokenizer(vocab=vocabulary, merges=merges_of(vocabulary, scores), bos_token="<s>", eos_token="</s>")
    oracle.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelSource("folder", tmp_path, "gemma"))
    assert tokenizer is not None
    assert not tokenizer.vocabulary.drop_leading_space
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if message['role'] == 'assistant' %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set opening = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set opening = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set opening = "" -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (opening if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for part in message['content'] -%}{{ part['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


def test_gemma_2_refuses_a_system_message():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidRequest, match="System role not supported"):
        ChatTemplate(GEMMA2, TOKENS).render(messages)


@pytest.mark.parametrize("as_parts", [False, True])
def test_gemma_3_puts_the_system_message_into_the_first_turn(as_parts):
    def content(text: str) -> Any:
        return [{"type": "text", "text": text}] if as_parts else text

    messages = [{"role": "system", "content": content("Be brief.")}, {"role": "user", "content": content(" Hi ")}]
    text = ChatTemplate(GEMMA3, TOKENS).render(messages)
    assert text == "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.parametrize("template", [GEMMA2, GEMMA3], ids=["gemma2", "gemma3"])
def test_a_begun_answer(template):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure: "}]
    text = ChatTemplate(template, TOKENS).render(messages, continue_final_message=True)
    assert text == "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nSure:"
