"""The client's half of a request: what is refused, what is filled in."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest
from octavo.engine.protocol import Constraint, FrameReader, FromClient, Request, Submit, encode_frame
from octavo.engine.requests import RequestMaker, read_request
from octavo.errors import ContextLengthExceeded, InvalidRequest
from octavo.runner.fake import fake_model_info
from octavo.sampling_params import SamplingParams

INFO = fake_model_info(vocab_size=100, max_model_len=20)


def filled(request: Request) -> SamplingParams:
    return msgspec.msgpack.decode(request.params, type=SamplingParams)


def make(prompt: object, params: SamplingParams | None = None, seed: int = 0) -> Request:
    return RequestMaker(INFO, seed).make(1, prompt, params or SamplingParams())  # type: ignore[arg-type]


def test_a_prompt_becomes_int32() -> None:
    for prompt in ([1, 2, 99], (1, 2, 99), np.array([1, 2, 99]), range(3)):
        request = make(prompt)
        assert np.frombuffer(request.prompt, np.int32).tolist() == list(prompt)  # type: ignore[call-overload]


@pytest.mark.parametrize("prompt", [[], [100], [-1], [1 << 40], ["1"], [1.5], None, 5])
def test_a_bad_prompt_is_refused_by_field(prompt: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt: ") as caught:
        make(prompt)
    assert caught.value.field == "prompt"


def test_a_prompt_too_long_names_both_lengths() -> None:
    make([1] * 19)
    for length in (20, 21):
        with pytest.raises(ContextLengthExceeded, match=rf"\b{length} tokens .* 20 tokens"):
            make([1] * length)


def test_defaults_are_what_the_makers_recommend() -> None:
    assert RequestMaker(INFO, 0).defaults() == SamplingParams()
    info = msgspec.structs.replace(INFO, sampling_defaults={"temperature": 0.6, "top_k": 20})
    maker = RequestMaker(info, 0)
    assert maker.defaults() == SamplingParams(temperature=0.6, top_k=20)
    assert maker.defaults(max_tokens=None) == SamplingParams(temperature=0.6, top_k=20, max_tokens=None)


@pytest.mark.parametrize(("asked", "given"), [(None, 15), (3, 3), (15, 15), (500, 15)])
def test_max_tokens_ends_at_the_context(asked: int | None, given: int) -> None:
    params = SamplingParams(max_tokens=asked, min_tokens=3)
    assert filled(make([1] * 5, params)).max_tokens == given
    assert params.max_tokens == asked, "the caller's object stays as it was"


def test_min_tokens_is_cut_with_max_tokens() -> None:
    assert filled(make([1] * 18, SamplingParams(max_tokens=50, min_tokens=40))).min_tokens == 2


def test_values_changed_after_construction_are_checked_again() -> None:
    params = SamplingParams()
    params.temperature = math.nan
    with pytest.raises(InvalidRequest, match="temperature"):
        make([1], params)


def test_a_temperature_next_to_nothing_is_greedy() -> None:
    assert filled(make([1], SamplingParams(temperature=1e-6))).temperature == 0
    assert filled(make([1], SamplingParams(temperature=0.01))).temperature == 0.01


def test_seeds_follow_from_the_engines_seed_and_the_order() -> None:
    def drawn(seed: int) -> list[int | None]:
        maker = RequestMaker(INFO, seed)
        params = [SamplingParams(), SamplingParams(seed=5), SamplingParams(), SamplingParams()]
        return [filled(maker.make(i, [1], one)).seed for i, one in enumerate(params)]

    first = drawn(0)
    assert drawn(0) == first
    assert first[1] == 5
    others = [seed for offset in range(1, 100) for seed in drawn(offset) if seed != 5]
    assert len({*others, *first}) == len(others) + len(first), "engines with neighbouring seeds share none"
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in others if seed is not None)


class Words:
    """A tokenizer of characters; a space belongs to what follows."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [50, *map(ord, text[1:])] if text.startswith(" ") else [ord(letter) for letter in text]


def test_what_holds_an_answer_goes_beside_its_parameters() -> None:
    maker = RequestMaker(INFO, 0, Words())  # type: ignore[arg-type]
    schema = {"type": "integer", "maximum": 1 << 70}
    params = SamplingParams(structured_outputs={"json": schema}, allowed_token_ids=[3, 99], bad_words=["ab", " c"])
    request = maker.make(1, [1], params)
    constraint = request.constraint
    assert constraint is not None
    assert constraint.grammar is not None
    assert constraint.grammar[0] == "json"
    assert json.loads(constraint.grammar[1]) == schema
    assert constraint.allowed_token_ids == [3, 99]
    assert constraint.bad_words == [[97, 98], [50, 97, 98], [99], [50, 99]]
    sent = filled(request)
    assert not sent.is_constrained
    assert params.is_constrained, "the caller's object stays as it was"
    checked = read_request(FrameReader(FromClient).feed(encode_frame(Submit([request])))[0].requests[0], 9)
    assert (checked.request_id, checked.constraint) == (9, constraint)
    again = maker.check(2, [1], params, same_params=True)
    assert again.constraint == constraint


@pytest.mark.parametrize(
    ("outputs", "grammar"),
    [
        ({"json": '{"type": "null"}'}, ("json", '{"type": "null"}')),
        ({"json": True}, ("json", "true")),
        ({"json_object": True}, ("json_object", "")),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"choice": ["a", "é"]}, ("choice", '["a", "\\u00e9"]')),
        ({"grammar": "start: A"}, ("grammar", "start: A")),
    ],
)
def test_a_grammar_is_a_kind_and_a_text(outputs: dict[str, object], grammar: tuple[str, str]) -> None:
    request = make([1], SamplingParams(structured_outputs=outputs))
    assert request.constraint == Constraint(grammar)


def test_what_holds_no_answer_is_refused_by_field() -> None:
    for field, value in (
        ("allowed_token_ids", [100]),
        ("bad_words", ["no tokenizer"]),
        ("structured_outputs", {"json": {"maximum": math.inf}}),
        ("structured_outputs", {"json": {"default": {1, 2}}}),
    ):
        with pytest.raises(InvalidRequest, match=field) as caught:
            make([1], SamplingParams(**{field: value}))  # type: ignore[arg-type]
        assert caught.value.field == field
