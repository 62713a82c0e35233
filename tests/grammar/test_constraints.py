"""Masks through the binding: what a random model writes under them, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from octavo import _core
from octavo.errors import InvalidRequest, UnsupportedModel
from octavo.loading.resolve import resolve_model
from octavo.text.tokenizer import load_tokenizer
from walks import LENGTH, STOP, Walker

BYTES = [bytes([byte]) for byte in range(256)]
PIECES = [
    b'{"',
    b'":',
    b' "',
    b'",',
    b'"}',
    b"true",
    b"12",
    b"the",
    b" the",
    b"\n  ",
    "é".encode(),
    b"}}",
    b"ab",
    b"ye",
]
WORDS = [*BYTES, *PIECES, b"<|end|>", b"<|stop|>"]
EOS = [len(WORDS) - 2, len(WORDS) - 1]


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker(WORDS, EOS)


def test_objects_parse_and_end(walker: Walker) -> None:
    grammar = walker.vocabulary.compile("json_object", "")
    answers = [answer for request in walker.run([{"grammar": grammar, "n": 4}] * 8) for answer in request]
    ended = [answer for answer in answers if answer.finish_reason == STOP]
    assert len(ended) >= 4
    for answer in ended:
        assert isinstance(json.loads(answer.text), dict)
        assert answer.tokens[-1] in EOS
        assert answer.masks[-1] == len(EOS), "after the last brace nothing may follow"


def test_blanks_between_parts_are_bounded(walker: Walker) -> None:
    blanks = Walker([b"{", b"}", b" ", b"\n", b"<end>"], [4])
    for seed in range(20):
        ((answer,),) = blanks.run([{"grammar": blanks.vocabulary.compile("json_object", "")}], seed=seed)
        assert answer.finish_reason == STOP
        assert re.fullmatch(r"\{( |\n *)?\}", answer.text)
        assert len(answer.text) <= 2 + 1 + 32


PATTERNS = ["a+b{2,3}", "(yes|no|yesterday)", r"\d{4}-\d\d", r"\w+\s[^\W\d]\S", "[^a-y]{3}", "^(ab|cd)*$", "(?i)ab+|x"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_their_pattern(walker: Walker, pattern: str) -> None:
    grammar = walker.vocabulary.compile("regex", pattern)
    answers = [one for request in walker.run([{"grammar": grammar, "n": 2}] * 8, max_tokens=120) for one in request]
    assert any(answer.finish_reason == STOP for answer in answers)
    for answer in answers:
        if answer.finish_reason == STOP:
            assert re.fullmatch(pattern, answer.text, re.ASCII), answer.text


def test_choices_are_members_and_all_of_them_come(walker: Walker) -> None:
    choices = ["yes", "yesterday", "no", "né", 'a "quoted"\\ one\n', "{}", ""]
    grammar = walker.vocabulary.compile("choice", json.dumps(choices))
    answers = walker.run([{"grammar": grammar, "n": 16}] * 8)
    texts = [answer.text for request in answers for answer in request]
    assert set(texts) == set(choices)
    assert all(answer.finish_reason == STOP for request in answers for answer in request)


def test_answers_of_one_request_go_their_own_ways(walker: Walker) -> None:
    grammar = walker.vocabulary.compile("regex", "(a|b)(c|d){3}e")
    (answers,) = walker.run([{"grammar": grammar, "n": 16}])
    assert len({answer.text for answer in answers}) > 4
    assert all(re.fullmatch("(a|b)(c|d){3}e", answer.text) for answer in answers)


def test_allowed_tokens_alone_and_with_a_grammar(walker: Walker) -> None:
    a, b, c = b"abc"
    plain, ending, held = walker.run(
        [
            {"allowed_token_ids": [a, b]},
            {"allowed_token_ids": [a, EOS[0]]},
            {"grammar": walker.vocabulary.compile("regex", "[abc]+"), "allowed_token_ids": [a, c]},
        ],
        max_tokens=60,
    )
    assert plain[0].finish_reason == LENGTH
    assert set(plain[0].tokens) == {a, b}
    assert set(ending[0].tokens) == {a, EOS[0]}
    assert ending[0].finish_reason == STOP
    assert set(held[0].text) <= {"a", "c"}
    assert held[0].finish_reason == STOP, "a grammar's end tokens are allowed all the same"


def test_bad_words_are_not_written(walker: Walker) -> None:
    a, b, c = b"abc"
    grammar = walker.vocabulary.compile("regex", "[abc]+")
    bad = [[a, b], [b, c, a], [c, c, c, c], []]
    for answer in walker.run([{"grammar": grammar, "allowed_token_ids": [a, b, c], "bad_words": bad, "n": 16}])[0]:
        assert not re.search("ab|bca|cccc", answer.text)
        assert len(answer.text) < 3 or re.search("[abc]", answer.text)
    ((free,),) = walker.run([{"bad_words": [[EOS[0]], [EOS[1]], [a, b]]}], max_tokens=300)
    assert free.finish_reason == LENGTH
    assert not {*EOS} & {*free.tokens}


def test_a_grammar_wins_over_bad_words(walker: Walker) -> None:
    grammar = walker.vocabulary.compile("regex", "z{3}")
    ((answer,),) = walker.run([{"grammar": grammar, "bad_words": [[ord("z")], [EOS[0]], [EOS[1]]]}])
    assert answer.text == "zzz"


def test_an_answers_first_space_is_no_part_of_it() -> None:
    words = [b" yes", b"yes", b" ", b"y", b"es", b" no", b"  no", b"no", b"<end>"]
    walker = Walker(words, [8], drop_leading_space=True)
    for spec, expected in [("yes", {"yes"}), (" no", {" no"}), (" ?yes|", {" yes", "yes", ""})]:
        grammar = walker.vocabulary.compile("regex", spec)
        answers = walker.run([{"grammar": grammar, "n": 16}] * 8)
        assert {answer.text for request in answers for answer in request} == expected
        assert all(answer.finish_reason == STOP for request in answers for answer in request)
    requests = walker.run([{"grammar": walker.vocabulary.compile("regex", "yes"), "n": 16}] * 8)
    tokens = {tuple(answer.tokens) for answers in requests for answer in answers}
    assert tokens == {(0, 8), (1, 8), (2, 1, 8), (3, 4, 8), (2, 3, 4, 8)}


def test_special_tokens_are_never_allowed_by_their_bytes() -> None:
    words = [b"<", b"tool", b">", b"<tool>", b"<tool>", b"<end>"]
    walker = Walker(words, [5], flags=bytes([0, 0, 0, 0, 1, 1]))
    (answers,) = walker.run([{"grammar": walker.vocabulary.compile("regex", "<tool>"), "n": 16}])
    assert {tuple(answer.tokens) for answer in answers} == {(0, 1, 2, 5), (3, 5)}


def test_lark_names_special_and_end_tokens() -> None:
    words = [b"a", b"<tool>", b"<end>", b"<stop>"]
    walker = Walker(words, [2, 3], flags=bytes([0, 1, 1, 1]))
    for grammar, expected in [('start: "a" <tool> "a"?', {(0, 1, 2), (0, 1, 3), (0, 1, 0, 2), (0, 1, 0, 3)})] + [
        (f'start: "a" {name}', {(0, 3)}) for name in ("<stop>", "<[3]>")
    ]:
        compiled = walker.vocabulary.compile("grammar", grammar)
        answers = walker.run([{"grammar": compiled, "n": 16}] * 4)
        assert {tuple(answer.tokens) for request in answers for answer in request} == expected


def test_a_grammar_that_the_tokens_cannot_write_is_refused() -> None:
    walker = Walker([b"a", b"<end>"], [1])
    with pytest.raises(InvalidRequest, match="no token"):
        walker.vocabulary.compile("regex", "b")


def test_a_row_whose_grammar_cannot_go_on_says_so_once() -> None:
    walker = Walker([b"a", b"<end>"], [1])
    key, row = np.array([1, 0], np.int64).tobytes(), np.zeros(1, np.int32)

    def fill() -> list[tuple[int, str]]:
        return walker.constraints.fill(key, row.ctypes.data, 1)

    walker.constraints.add(1, 1, walker.vocabulary.compile("regex", "ab"))
    walker.core.submit(1, np.zeros(1, np.int32).tobytes(), arrival_us=0, max_tokens=9, constrained=True)
    plan = walker.core.plan()
    assert plan is not None
    assert walker.core.masked() == key
    assert (fill(), row[0]) == ([], 1)
    assert walker.constraints.advance(walker.core.commit(plan.step)) == []
    ((index, message),) = fill()
    assert (index, row[0]) == (0, 2)
    assert "no token that could come next" in message
    assert (fill(), row[0]) == ([], 2)


JSON_GBNF = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,2})? ws
ws ::= [ \t\n]{0,3}
"""


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "yes" | "no" digits\ndigits ::= [0-9]{2,} # two or more', r"yes|no[0-9]{2,}"),
        ('root ::= ("a" | "ab") "bc" ("." | root)', r"(ab?bc)+\."),
        ('start: ITEM ("," ITEM)*\nITEM: /[a-c]+/ | NUMBER\nNUMBER: /[0-9]/', "([a-c]+|[0-9])(,([a-c]+|[0-9]))*"),
        ('start: "<" /[ab]/ start ">" | ""', "(<[ab])*(>)*"),
    ],
)
def test_texts_follow_their_grammar(walker: Walker, grammar: str, pattern: str) -> None:
    compiled = walker.vocabulary.compile("grammar", grammar)
    answers = [one for request in walker.run([{"grammar": compiled, "n": 4}] * 8, max_tokens=80) for one in request]
    texts = {answer.text for answer in answers if answer.finish_reason == STOP}
    assert len(texts) > 1
    for text in texts:
        assert re.fullmatch(pattern, text), text
        assert text.count("<") == text.count(">")


def test_json_in_gbnf_parses(walker: Walker) -> None:
    compiled = walker.vocabulary.compile("grammar", JSON_GBNF)
    answers = [one for request in walker.run([{"grammar": compiled, "n": 8}] * 8) for one in request]
    ended = [answer for answer in answers if answer.finish_reason == STOP]
    assert len(ended) > 3
    assert all(isinstance(json.loads(answer.text), dict) for answer in ended)


@pytest.mark.demo
def test_a_real_vocabulary() -> None:
    tokenizer = load_tokenizer(resolve_model("demo"))
    assert tokenizer is not None
    table = tokenizer.vocabulary
    walker = Walker(table.tokens, sorted(tokenizer.eos_token_ids), flags=table.flags)
    schema = {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3}
    for kind, spec in [
        ("json", json.dumps(schema)),
        ("choice", '["Zürich", "東京", "Athens"]'),
        ("regex", "[0-9a-f]{4,}"),
    ]:
        grammar = walker.vocabulary.compile(kind, spec)
        answers = [one for request in walker.run([{"grammar": grammar, "n": 4}] * 4) for one in request]
        ended = [answer.text for answer in answers if answer.finish_reason == STOP]
        assert ended
        for text in ended:
            if kind == "json":
                jsonschema.validate(json.loads(text), schema)
            else:
                assert text in spec if kind == "choice" else re.fullmatch(spec, text)


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("json", '{"not": {}}', '"not"'),
        ("json", '{"type": "object", "properties": {"a": {"if": true, "then": false}}}', '"if", "then"'),
        ("json", '{"type": "array", "uniqueItems": true}', '"uniqueItems"'),
        ("json", '{"type": "object", "dependentRequired": {}}', '"dependentRequired"'),
        ("json", '{"type": "string", "format": "secret"}', '"format" with "secret"'),
        ("json", '{"x-guidance": {"lenient": true}, "not": {}}', '"x-guidance"'),
        ("json", '{"oneOf": [{"minimum": 1}, {"maximum": 3}]}', '"oneOf"'),
        ("json", '{"$ref": "https://example.org/a"}', "https://example.org/a"),
        ("json", '{"$ref": "#/$defs/a"}', "#/$defs/a"),
        ("json", '{"type": "strin"}', "strin"),
        ("json", '{"allOf": [{"type": "null"}, {"type": "string"}]}', "Unsatisfiable"),
        ("json", '{"type": ', "line 1 column 9"),
        ("json", "[]", "must be an object"),
        ("json", "false", "false"),
        ("regex", "a(", "unclosed group"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "a(?=b)b", "look-ahead"),
        ("choice", "[]", "at least one"),
        ("choice", '["a", 1]', "list of texts"),
        ("choice", '"a"', "list of texts"),
        ("grammar", "start: nowhere", "nowhere"),
        ("grammar", 'start: "a" <|nothing|>', "nothing"),
        ("grammar", "", "start"),
        ("grammar", 'root ::= "a" b', "line 1, column 14: there is no rule b"),
        ("grammar", '%llguidance {"allow_invalid_utf8": true}\nstart: /a/', "allow_invalid_utf8"),
    ],
)
def test_what_is_wrong_is_told(walker: Walker, kind: str, spec: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        walker.vocabulary.compile(kind, spec)
    assert message in str(caught.value)
    assert caught.value.field == "structured_outputs"
    assert not re.search("panic|backtrace|verbose|llguidance/", str(caught.value))


def test_what_callers_get_wrong(walker: Walker) -> None:
    with pytest.raises(ValueError, match="kind is"):
        walker.vocabulary.compile("xml", "")
    constraints = _core.Constraints(walker.vocabulary)
    constraints.add(1, 1, None, [3], None)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"request_id": 1, "n": 1}, "request 1"),
        ({"request_id": 2, "n": 1, "allowed_token_ids": []}, "allowed_token_ids"),
        ({"request_id": 2, "n": 1, "allowed_token_ids": [len(WORDS)]}, "allowed_token_ids"),
        ({"request_id": 2, "n": 1, "bad_words": [[1, 10**6]]}, "bad_words"),
    ]
    for arguments, message in bad:
        with pytest.raises(InvalidRequest, match=message):
            constraints.add(**arguments)
    assert 1 in constraints
    assert 2 not in constraints
    key = np.array([1, 0], np.int64).tobytes()
    row = np.zeros(walker.row_words + 3, np.int32)
    for arguments, message in [
        ({"keys": key, "address": 0, "row_words": walker.row_words}, "null"),
        ({"keys": key, "address": row.ctypes.data + 1, "row_words": walker.row_words}, "aligned"),
        ({"keys": key, "address": row.ctypes.data, "row_words": walker.row_words - 1}, "row_words"),
        ({"keys": key[:-1], "address": row.ctypes.data, "row_words": walker.row_words}, "keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            constraints.fill(**arguments)
    row[:] = -1
    assert constraints.fill(key, row.ctypes.data, walker.row_words + 3) == []
    assert row.tolist() == [8, *[0] * (walker.row_words + 2)]
    constraints.remove(1)
    constraints.remove(1)
    assert len(constraints) == 0
    ((index, message),) = constraints.fill(key, row.ctypes.data, walker.row_words)
    assert index == 0
    assert "not known" in message
    for eos, size in [([], 4), ([4], 4)]:
        with pytest.raises(UnsupportedModel, match="end token"):
            _core.Vocabulary(walker.table, eos, size)
