"""Sampling parameters: vLLM's names and defaults, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pydantic
import pytest
from octavo import SamplingParams
from octavo.errors import InvalidRequest


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, -1, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (False, False, True)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 129, 1.5, True, "1", None]),
        ("temperature", [-0.1, math.nan, math.inf, -math.inf, "1", None, True]),
        ("top_p", [-0.1, 1.1, math.nan]),
        ("top_k", [-2, 1.5, True]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("seed", [1 << 63, -(1 << 63) - 1, 0.5, True]),
        ("max_tokens", [0, -1, 1.5, True]),
        ("min_tokens", [-1, 17, 1.5]),
        ("stop", [[""], [1], ["a"] * 65, ["\ud800"], [None]]),
        ("stop_token_ids", [[-1], [1 << 31], ["a"], [1.5], [True], [1] * 65]),
        ("repetition_penalty", [0, -1, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("logprobs", [-1, 21, True, 1.5]),
        ("priority", [1 << 31, 0.5]),
        ("cache_salt", ["x" * 129, "a\0b", "\ud800", 5]),
        ("ignore_eos", ["yes", 1, None]),
        ("include_stop_str_in_output", [1]),
        ("skip_special_tokens", [None]),
        (
            "logit_bias",
            [[1], {-1: 1.0}, {"a": 1.0}, {"1.5": 1}, {1: 101}, {1: math.nan}, {1: "2"}, {True: 1.0}, {1: None}],
        ),
        ("logit_bias", [dict.fromkeys(range(1025), 1.0)]),
        ("allowed_token_ids", [[], [-1], [1 << 31], ["1"], [True], 5, {1}]),
        ("bad_words", [[""], [" "], [1], ["\ud800"], ["x" * 257], ["a"] * 257]),
        ("structured_outputs", [{}, [], "a", {"json": {}, "regex": "a"}, {"schema": {}}, {"json": 5}, {"json": None}]),
        ("structured_outputs", [{"regex": ""}, {"regex": 5}, {"regex": "\ud800"}, {"choice": []}, {"choice": "ab"}]),
        ("structured_outputs", [{"choice": [""]}, {"choice": [1]}, {"grammar": ""}, {"json_object": False}]),
    ],
)
def test_bad_values_are_refused_by_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field, value


def test_a_class_where_its_schema_belongs() -> None:
    class Person(pydantic.BaseModel):
        name: str

    with pytest.raises(InvalidRequest, match="such as a pydantic class's model_json_schema"):
        SamplingParams(structured_outputs={"json": Person})
    assert SamplingParams(structured_outputs={"json": Person.model_json_schema()}).structured_outputs


@pytest.mark.parametrize(
    "values",
    [
        {"n": 128},
        {"temperature": 0},
        {"temperature": 2.5},
        {"top_p": 0.01},
        {"top_k": 0},
        {"top_k": -1},
        {"seed": -5},
        {"max_tokens": None, "min_tokens": 500},
        {"max_tokens": 8, "min_tokens": 8},
        {"stop": ["é" * 50]},
        {"logprobs": 0},
        {"logprobs": 20},
    ],
)
def test_good_values_pass_and_cross_the_socket_unchanged(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_one_stop_text_or_none_at_all() -> None:
    assert SamplingParams(stop="end").stop == ["end"]  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=None).stop == []  # type: ignore[arg-type]
    assert SamplingParams(stop=("a", "b")).stop == ["a", "b"]  # type: ignore[arg-type]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_two_requests_share_no_list() -> None:
    stops = ["a"]
    params = SamplingParams(stop=stops)
    stops.append("b")
    SamplingParams().stop.append("c")
    assert params.stop == ["a"]
    assert SamplingParams().stop == []


@pytest.mark.parametrize("field", ["structured_outputs", "allowed_token_ids"])
def test_a_minimum_cannot_be_promised_where_the_end_is_not_free(field: str) -> None:
    values: dict[str, Any] = {"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(min_tokens=1, **{field: values[field]})
    assert caught.value.field == "min_tokens"


def test_what_changes_single_tokens() -> None:
    assert SamplingParams(logit_bias={"7": -100, 8: 100}).logit_bias == {7: -100, 8: 100}  # type: ignore[dict-item]
    assert SamplingParams(bad_words="word").bad_words == ["word"]  # type: ignore[arg-type]
    assert not SamplingParams(logit_bias={1: 1.0}).is_constrained
    for values in (
        {"structured_outputs": {"json": True}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"allowed_token_ids": [5]},
        {"bad_words": ["a"]},
    ):
        params = SamplingParams(**values)  # type: ignore[arg-type]
        assert params.is_constrained
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
