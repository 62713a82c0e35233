"""Answers under a JSON schema are valid by jsonschema, an implementation of its own."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from octavo.errors import InvalidRequest
from walks import STOP, Walker

WORDS = [
    *(bytes([byte]) for byte in range(256)),
    *(
        piece.encode()
        for piece in ('{"', '": ', '", "', '"}', "true", "false", "null", "12", "the", " a", "\n  ", "é", "]}", "e+")
    ),
    b"<|end|>",
]

PERSON: dict[str, Any] = {
    "$defs": {"name": {"type": "string", "minLength": 1, "maxLength": 8}},
    "type": "object",
    "properties": {
        "name": {"$ref": "#/$defs/name"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 3},
        "size": {"type": "number", "exclusiveMinimum": -2, "multipleOf": 0.5, "maximum": 1000},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-\\d{1,3}$"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer", "multipleOf": 7}},
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    "union": {
        "anyOf": [{"type": "integer", "minimum": 100}, {"const": {"a": [1, "x"]}}, {"type": ["null", "boolean"]}]
    },
    "merged": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 30}], "multipleOf": 4},
    "one": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}},
                "required": ["kind"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "b"}},
                "required": ["kind"],
                "additionalProperties": False,
            },
        ]
    },
    "map": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "open": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a", "b"]},
    "dates": {"type": "array", "items": {"type": "string", "format": "date"}, "maxItems": 2},
    "anything": True,
}


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker(WORDS, [len(WORDS) - 1], end=0.5, max_model_len=1024)


def check(walker: Walker, schema: Any, seed: int, requests: int = 4, max_tokens: int = 300) -> int:
    """How many answers came to their end; all of these are valid."""
    grammar = walker.vocabulary.compile("json", json.dumps(schema))
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    ended = 0
    for answers in walker.run([{"grammar": grammar, "n": 4}] * requests, seed=seed, max_tokens=max_tokens):
        for answer in answers:
            if answer.finish_reason == STOP:
                checker.validate(json.loads(answer.text))
                ended += 1
    return ended


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_valid(walker: Walker, name: str) -> None:
    ended = sum(check(walker, SCHEMAS[name], seed) for seed in range(3))
    assert ended >= 3, "few random texts come to an end, but some do"


def test_nothing_outside_a_schema_is_needed(walker: Walker) -> None:
    """All values that a schema has are written sooner or later."""
    schema = {"type": "array", "items": {"enum": [1, "b"]}, "maxItems": 2}
    grammar = walker.vocabulary.compile("json", json.dumps(schema))
    values = set()
    for seed in range(12):
        for answers in walker.run([{"grammar": grammar, "n": 16}] * 2, seed=seed, max_tokens=300):
            values |= {json.dumps(json.loads(answer.text)) for answer in answers if answer.finish_reason == STOP}
    assert values == {"[]", "[1]", '["b"]', "[1, 1]", '[1, "b"]', '["b", 1]', '["b", "b"]'}


def a_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of small pieces, some of which contradict each other."""
    kinds = ["integer", "string", "boolean", "null", "enum", "number"]
    kind = draw.choice(kinds + (["object", "array", "anyOf", "object", "allOf"] if depth else []))
    low, high = sorted(draw.sample(range(-20, 300), 2))
    if kind in ("integer", "number"):
        bounds = {"minimum": low, "exclusiveMaximum": high, "multipleOf": draw.choice([2, 3, 0.25])}
        return {"type": kind, **{key: bounds[key] for key in draw.sample(sorted(bounds), draw.randrange(3))}}
    if kind == "string":
        options: list[dict[str, Any]] = [
            {"maxLength": 3},
            {"minLength": 2, "maxLength": 5},
            {"pattern": "^[ab]+c$"},
            {},
        ]
        return {"type": kind, **draw.choice(options)}
    if kind == "enum":
        return {"enum": draw.sample([1, -2.5, "x", "y\n\"'", None, True, [1, "a"], {"k": 0}], draw.randrange(1, 4))}
    if kind == "array":
        return {"type": kind, "items": a_schema(draw, depth - 1), "minItems": draw.randrange(3), "maxItems": 3}
    if kind in ("anyOf", "allOf"):
        return {kind: [a_schema(draw, depth - 1) for _ in range(draw.randrange(1, 3))]}
    if kind == "object":
        names = draw.sample(["a", "b", "c d", 'q"', "é"], draw.randrange(1, 4))
        return {
            "type": kind,
            "properties": {name: a_schema(draw, depth - 1) for name in names},
            "required": draw.sample(names, draw.randrange(len(names) + 1)),
            "additionalProperties": False,
        }
    return {"type": kind}


def test_random_schemas(walker: Walker) -> None:
    draw = random.Random(7)
    ended = refused = 0
    for seed in range(120):
        schema = a_schema(draw)
        try:
            ended += check(walker, schema, seed, requests=1, max_tokens=160)
        except InvalidRequest as error:
            if "nsatisf" not in str(error):
                raise
            refused += 1
    assert ended > 240
    assert 0 < refused < 40
