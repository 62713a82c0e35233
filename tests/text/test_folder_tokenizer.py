from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import sentencepiece
from octavo.errors import CorruptFile, InvalidRequest, ModelError, ModelNotFound, UnsupportedModel
from octavo.loading.resolve import ModelSource
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

HELLO = [{"role": "user", "content": "hi"}]


def source(folder: Path) -> ModelSource:
    return ModelSource("config-only", folder, "m")


@pytest.fixture
def folder(tmp_path):
    """A byte-level tokenizer that puts `<s>` before a text, truncates, and pads."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(sorted(alphabet))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.enable_truncation(5)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_a_tokenizer_alone(folder):
    tokenizer = Tokenizer.from_source(source(folder))
    assert tokenizer.encode("abc")[0] == 256
    assert len(tokenizer.encode("a long text")) == 12, "neither truncated nor padded"
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]
    assert tokenizer.decode(tokenizer.encode("Zoë")) == "Zoë"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.apply_chat_template(HELLO)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("spelling", ["</s>", {"content": "</s>", "lstrip": False}])
def test_names_of_special_tokens(folder, file, spelling):
    write(folder, file, {"bos_token": "<s>", "eos_token": spelling, "unk_token": None})
    write(folder, "chat_template.jinja", "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}")
    tokenizer = Tokenizer.from_source(source(folder))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257,))
    assert tokenizer.apply_chat_template(HELLO) == "<s>|</s>|"


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_what_is_put_around_a_text(folder, settings):
    from transformers import AutoTokenizer

    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend", **settings}
    write(folder, "tokenizer_config.json", settings)
    expected = AutoTokenizer.from_pretrained(folder).encode("a", padding=False, truncation=False)
    assert Tokenizer.from_source(source(folder)).encode("a") == expected == [256, 64]


def test_tokens_that_only_the_settings_know(folder):
    listed = {
        "257": {"content": "</s>", "special": True},
        "258": {"content": "<tool>", "special": False},
        "259": {"content": "<|end|>", "special": True},
        "x": {"content": "ignored"},
    }
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": listed, "eos_token": "<|end|>"})
    tokenizer = Tokenizer.from_source(source(folder))
    assert tokenizer.encode("<tool><|end|>", add_special_tokens=False) == [258, 259]
    assert tokenizer.decode([258, 259]) == "<tool>"
    assert tokenizer.eos_token_ids == (259,)


def test_where_chat_templates_lie(folder):
    def rendered(**arguments):
        return Tokenizer.from_source(source(folder)).apply_chat_template(HELLO, **arguments)

    tools = [{"type": "function", "function": {"name": "f"}}]
    write(folder, "tokenizer_config.json", {"chat_template": "string"})
    assert rendered() == rendered(tools=tools) == "string"
    listed = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "listed tools"}]
    write(folder, "tokenizer_config.json", {"chat_template": listed})
    assert (rendered(), rendered(tools=tools)) == ("listed", "listed tools")
    write(folder, "chat_template.json", {"chat_template": "json"})
    assert rendered() == "json"
    write(folder, "chat_template.jinja", "file")
    (folder / "additional_chat_templates").mkdir()
    write(folder, "additional_chat_templates/tool_use.jinja", "file tools")
    assert (rendered(), rendered(tools=tools)) == ("file", "file tools")
    assert rendered(chat_template="given {{ messages[0].content }}") == "given hi"


def test_another_tokenizer_instead(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    tokenizer = Tokenizer.from_source(source(empty), str(folder))
    assert tokenizer.encode("a") == [256, 64]
    with pytest.raises(ModelNotFound):
        Tokenizer.from_source(source(folder), str(empty / "none"))


def test_no_tokenizer(tmp_path):
    assert load_tokenizer(source(tmp_path)) is None
    with pytest.raises(ModelNotFound, match="the tokenizer setting can name"):
        Tokenizer.from_source(source(tmp_path))


@pytest.mark.parametrize("file", ["tekken.json", "vocab.json", "vocab.txt"])
def test_other_kinds(tmp_path, file):
    (tmp_path / file).write_text("{}")
    with pytest.raises(UnsupportedModel, match=f"holds {file} and no tokenizer.json"):
        load_tokenizer(source(tmp_path))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {}}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("special_tokens_map.json", "nonsense"),
        ("chat_template.json", "nonsense"),
    ],
)
def test_files_that_cannot_be_read(folder, file, content):
    write(folder, file, content)
    with pytest.raises(CorruptFile, match=file):
        load_tokenizer(source(folder))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("post_processor", "single", 0, "SpecialToken", "id"), "absent"),
        (("post_processor", "special_tokens"), {}),
        (("model", "vocab", "a"), 2**32 - 1),
        (("model", "vocab", "a"), 2**63),
        (("model", "merges"), [["a", "absent"]]),
        (("pre_tokenizer",), {"type": "Split", "pattern": {"Regex": "["}, "behavior": "Isolated", "invert": False}),
    ],
)
def test_tokenizers_that_contradict_themselves(folder, path, value):
    whole = json.loads((folder / "tokenizer.json").read_text())
    part = whole
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    write(folder, "tokenizer.json", whole)
    with pytest.raises(CorruptFile):
        Tokenizer.from_source(source(folder)).token_table()


def test_a_template_that_is_not_utf8(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptFile, match="not UTF-8"):
        load_tokenizer(source(folder))


def test_half_characters_in_a_prompt(folder):
    with pytest.raises(InvalidRequest, match="not valid Unicode") as caught:
        Tokenizer.from_source(source(folder)).encode("a\ud800")
    assert caught.value.field == "prompt"


@pytest.fixture(
    params=[
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {},
        {
            "normalization_rule_name": "identity",
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            "user_defined_symbols": ["<think>"],
            "byte_fallback": False,
        },
    ],
    ids=["llama", "normalized", "no prefix"],
)
def sentencepiece_folder(request, texts, tmp_path):
    settings = {"byte_fallback": True, **request.param}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts[21:27] for line in text.splitlines() if line),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=900,
        minloglevel=2,
        **settings,
    )
    return tmp_path


def test_sentencepiece_files(sentencepiece_folder, texts):
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    tokenizer = Tokenizer.from_source(source(sentencepiece_folder))
    for text in [*texts[:21], *texts[24:120], "<think> x"]:
        if "\0" in text:
            continue
        ids = tokenizer.encode(text)
        assert ids == [oracle.bos_id(), *oracle.encode(text)], text
    write(
        sentencepiece_folder,
        "tokenizer_config.json",
        {"add_bos_token": False, "add_eos_token": True, "eos_token": "</s>"},
    )
    tokenizer = Tokenizer.from_source(source(sentencepiece_folder))
    assert tokenizer.encode("the core") == [*oracle.encode("the core"), oracle.eos_id()]
    assert tokenizer.eos_token_ids == (oracle.eos_id(),)


def test_sentencepiece_files_that_cannot_be_read(sentencepiece_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("torn")
    data = (sentencepiece_folder / "tokenizer.model").read_bytes()
    for content in (b"", b"\xff" * 40, data[:-3], data[: len(data) // 2], b"\x0a\xff\xff\xff\xff\x7f"):
        (folder / "tokenizer.model").write_bytes(content)
        with pytest.raises((CorruptFile, UnsupportedModel), match=r"tokenizer\.model"):
            load_tokenizer(source(folder))


def test_changed_sentencepiece_files(sentencepiece_folder, tmp_path_factory):
    """Whatever is changed in the file, it is read, or a typed error says that it cannot be."""
    rng = random.Random(5)
    folder = tmp_path_factory.mktemp("changed")
    data = (sentencepiece_folder / "tokenizer.model").read_bytes()
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            place = rng.choice((rng.randrange(len(changed)), rng.randrange(len(changed) - 200, len(changed))))
            changed[place] = rng.randrange(256)
        (folder / "tokenizer.model").write_bytes(changed)
        try:
            tokenizer = load_tokenizer(source(folder))
        except ModelError:
            continue
        assert tokenizer is not None
        tokenizer.encode("the core of a house")


def test_other_sentencepiece_models(texts, tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[21].splitlines()),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="unigram",
        vocab_size=200,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(UnsupportedModel, match="only BPE"):
        load_tokenizer(source(tmp_path))


@pytest.mark.demo
def test_what_transformers_saves(demo, demo_tokenizer, texts, tmp_path):
    demo_tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    from transformers import PreTrainedTokenizerFast

    saved = tmp_path / "saved"
    oracle = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    oracle.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    oracle.save_pretrained(saved)
    shutil.copy(saved / "tokenizer.json", saved / "copy.json")
    tokenizer = Tokenizer.from_source(source(saved))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.apply_chat_template(HELLO) == oracle.apply_chat_template(HELLO, tokenize=False)
    for text in texts[:120]:
        assert tokenizer.encode(text) == oracle.encode(text), text
