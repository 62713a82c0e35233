"""A real engine on a tiny random checkpoint: whatever it would rather say, held answers are what they are held to."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
import torch
import transformers
from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import InvalidRequest

# In one process: what the tests share takes long to make.
pytestmark = pytest.mark.xdist_group("constrained_llm")

VOCAB_SIZE = 600
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "grüße", 7, None]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "kind", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "integer", "minimum": -90, "maximum": 90}, "open": {"type": "boolean"}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}
CHOICES = ["yes", "no", "yes and no", "日本", 'a "quoted" one']
OUTPUTS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "json text": {"json": json.dumps(SCHEMA)},
    "regex": {"regex": r"[A-Z][a-z]{2,9} (ß|日本|\d{1,4})(, \d\d?)?"},
    "choice": {"choice": CHOICES},
    "grammar": {"grammar": 'start: sum\nsum: NUM ("+" NUM){0,4}\nNUM: /[0-9]{1,5}/'},
}
PROMPTS = [
    f"2 7 1 8 2 8 1 8 2 8 4 5 9 0 4 5 2 3 5 3 6 0 2 8; all pets, as data, of the year {1990 + n}: " for n in range(6)
]


def check(outputs: dict[str, Any], text: str) -> None:
    ((kind, value),) = outputs.items()
    if kind == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "regex":
        assert re.fullmatch(value, text), text
    elif kind == "choice":
        assert text in CHOICES
    else:
        assert re.fullmatch(r"\d{1,5}(\+\d{1,5}){0,4}", text), text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    texts = [json.dumps(SCHEMA), "all pets, as data", " ".join(CHOICES), "the cat, the dog; 12345 + 67890 = grüße"] * 3
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 20,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(path)
    return path


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "num_blocks": 400, "max_num_seqs": 16, **settings})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make(folder, overlap=False) as llm:
        yield llm


def requests() -> tuple[list[str], list[SamplingParams]]:
    """Held answers of all kinds beside free ones, several to a prompt."""
    prompts, params = [], []
    for number in range(36):
        prompts.append(PROMPTS[number % len(PROMPTS)])
        outputs = [None, *OUTPUTS.values()][number % 6]
        temperature = [0.0, 1.0, 0.8][number // 6 % 3]
        params.append(
            SamplingParams(
                n=3 if temperature else 1,
                temperature=temperature,
                top_p=0.95 if number % 4 else 1.0,
                seed=number,
                max_tokens=60 if outputs is None else 400,
                structured_outputs=outputs,
                repetition_penalty=1.2 if number % 5 == 0 else 1.0,
            )
        )
    return prompts, params


def all_hold(outputs: list[RequestOutput], params: list[SamplingParams]) -> None:
    for output, asked in zip(outputs, params, strict=True):
        for answer in output.outputs:
            if asked.structured_outputs is not None:
                assert answer.finish_reason == "stop"
                check(asked.structured_outputs, answer.text)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[RequestOutput]:
    prompts, params = requests()
    outputs = llm.generate(prompts, params)
    all_hold(outputs, params)
    return outputs


def test_held_answers_are_many(expected: list[RequestOutput]) -> None:
    """They follow the model: seeds and prompts give different ones."""
    for kind in range(1, 6):
        texts = [answer.text for output in expected[kind::6] for answer in output.outputs]
        assert len(set(texts)) > 2


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": True},
        {"overlap": True, "enable_prefix_caching": False},
        {"overlap": True, "max_num_seqs": 3, "max_num_batched_tokens": 17},
        {"overlap": True, "num_blocks": 40},
        {"overlap": False, "worker": True},
    ],
    ids=["overlap", "no prefixes", "small steps", "preemption", "worker"],
)
def test_tokens_are_the_same_however_steps_are_made(
    folder: Path, expected: list[RequestOutput], settings: dict[str, Any]
) -> None:
    prompts, params = requests()
    with make(folder, **settings) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm.stats()
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert stats["blocks_used"] == 0
    if settings.get("num_blocks") == 40:
        assert stats["preemptions"] > 0
    if settings.get("enable_prefix_caching", True):
        assert stats["prefix_hit_tokens"] > 0


def test_many_seeds(llm: LLM) -> None:
    for outputs in OUTPUTS.values():
        params = [
            SamplingParams(temperature=1.3, seed=seed, n=4, max_tokens=450, structured_outputs=outputs)
            for seed in range(12)
        ]
        all_hold(llm.generate([PROMPTS[0]] * len(params), params), params)


def test_free_answers_are_as_without_held_ones(llm: LLM, expected: list[RequestOutput]) -> None:
    prompts, params = requests()
    alone = llm.generate(prompts[::6], params[::6])
    assert [output.outputs for output in alone] == [output.outputs for output in expected[::6]]


def test_a_mask_that_allows_the_likeliest_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
    free = llm.generate(PROMPTS, params)
    every = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, logprobs=2, allowed_token_ids=list(range(VOCAB_SIZE))
    )
    assert [output.outputs for output in llm.generate(PROMPTS, every)] == [output.outputs for output in free]


def test_log_probabilities_are_of_what_is_allowed(llm: LLM) -> None:
    allowed = [11, 40, 97]
    params = SamplingParams(temperature=0, max_tokens=12, allowed_token_ids=allowed, logprobs=5)
    (output,) = llm.generate(PROMPTS[0], params)
    positions = output.outputs[0].logprobs or []
    assert len(positions) == 12
    for position in positions:
        assert position.token_id in allowed
        assert sorted(token for token, _ in position.top) == allowed
        assert abs(sum(math.exp(value) for _, value in position.top) - 1) < 1e-4


def test_biases_move_what_is_drawn(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=5)
    (free,) = llm.generate(PROMPTS[0], greedy)
    first = free.outputs[0].token_ids[0]
    second = (free.outputs[0].logprobs or [])[0].top[1][0]
    banned = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={first: -100})
    (output,) = llm.generate(PROMPTS[0], banned)
    assert output.outputs[0].token_ids[0] == second
    assert first not in output.outputs[0].token_ids
    forced = SamplingParams(temperature=1, max_tokens=20, ignore_eos=True, logit_bias={77: 100})
    (output,) = llm.generate(PROMPTS[0], forced)
    assert output.outputs[0].token_ids == [77] * 20
    # A mask and a bias together: the best of what is allowed.
    both = SamplingParams(
        temperature=0, max_tokens=9, structured_outputs={"choice": ["yes", "no"]}, logit_bias={77: 100}
    )
    (output,) = llm.generate(PROMPTS[0], both)
    assert output.outputs[0].text in ("yes", "no")


def test_bad_words_do_not_come_out(llm: LLM) -> None:
    assert llm.tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (free,) = llm.generate(PROMPTS[1], params)
    tokens = free.outputs[0].token_ids
    # A pair of tokens that spells itself, somewhere in what the model would say.
    encode = llm.tokenizer.encode
    found = [
        (pair, text)
        for pair in itertools.pairwise(tokens)
        if (text := llm.tokenizer.decode(list(pair))).strip() == text
        and encode(text, add_special_tokens=False) == list(pair)
    ]
    assert found
    pair, word = found[0]
    (held,) = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, bad_words=[word]))
    got = held.outputs[0].token_ids
    assert pair not in set(itertools.pairwise(got))
    place = next(i for i in range(len(tokens)) if tuple(tokens[i : i + 2]) == pair)
    assert got[: place + 1] == tokens[: place + 1]
    assert got[place + 1] != tokens[place + 1]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"json": {"type": "nonsense"}}, "nonsense"),
        ({"json": "{not json"}, "JSON|json"),
        ({"regex": "(unclosed"}, "unclosed|paren|group"),
        ({"grammar": "start: missing"}, "missing"),
    ],
)
def test_what_is_no_grammar_is_refused(llm: LLM, outputs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate([PROMPTS[0], PROMPTS[1]], [SamplingParams(), SamplingParams(structured_outputs=outputs)])
    assert caught.value.field == "structured_outputs"
    assert re.search(words, str(caught.value))
    assert len(llm.generate(PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_tokens_outside_the_vocabulary_are_refused_by_field(llm: LLM) -> None:
    for field, value in (("allowed_token_ids", [VOCAB_SIZE]), ("logit_bias", {VOCAB_SIZE: 1.0})):
        with pytest.raises(InvalidRequest, match=str(VOCAB_SIZE)) as caught:
            llm.generate(PROMPTS[0], SamplingParams(**{field: value}))  # type: ignore[arg-type]
        assert caught.value.field == field
