from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo._core import TokenTable

pieces = st.one_of(
    st.binary(max_size=6),
    st.text(max_size=4).map(lambda text: text.encode()),
    st.sampled_from(["🙂", "👩‍👩‍👧", "中文", "한국어", "e\u0301", " ", "\n"]).map(lambda text: text.encode()),
    # Parts of characters, surrogates, overlong forms, bytes that are never valid.
    st.sampled_from(
        [b"\xf0\x9f", b"\x99\x82", b"\xe4", b"\xb8\xad", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90", b"\xff"]
    ),
)


def decode(table: TokenTable, ids: list[int], **options: bool) -> str:
    return table.decode(np.array(ids, np.int32).tobytes(), **options).decode()


@given(tokens=st.lists(pieces, min_size=1, max_size=30))
def test_text_is_what_python_decodes(tokens: list[bytes]):
    table = TokenTable(tokens, bytes(len(tokens)))
    assert len(table) == len(tokens)
    assert decode(table, list(range(len(tokens)))) == b"".join(tokens).decode("utf-8", "replace")


@given(tokens=st.lists(st.tuples(pieces, st.booleans()), min_size=1, max_size=12), order=st.lists(st.integers(0, 11)))
def test_special_tokens_are_skipped_or_shown(tokens: list[tuple[bytes, bool]], order: list[int]):
    table = TokenTable([token for token, _ in tokens], bytes(special for _, special in tokens))
    ids = [i % len(tokens) for i in order]
    plain = b"".join(tokens[i][0] for i in ids if not tokens[i][1])
    every = b"".join(tokens[i][0] for i in ids)
    assert decode(table, ids) == plain.decode("utf-8", "replace")
    assert decode(table, ids, skip_special_tokens=False) == every.decode("utf-8", "replace")


def test_only_the_very_first_space_is_dropped():
    tokens = [b"<s>", b" Hello", b" world", b" "]
    table = TokenTable(tokens, bytes([1, 0, 0, 0]), drop_leading_space=True)
    assert decode(table, [0, 1, 2]) == "Hello world"
    assert decode(table, [3, 1]) == " Hello"
    assert decode(table, [0, 1], skip_special_tokens=False) == "<s> Hello"
    assert decode(TokenTable(tokens, bytes(4)), [1, 2]) == " Hello world"


def test_ids_outside_the_table_stand_for_nothing():
    table = TokenTable([b"a", b"b"], bytes(2))
    assert decode(table, [0, 2, -1, 2**31 - 1, 1]) == "ab"


def test_what_cannot_be_a_table_or_ids_is_refused():
    with pytest.raises(ValueError, match="2 tokens but 1 flags"):
        TokenTable([b"a", b"b"], bytes(1))
    with pytest.raises(TypeError):
        TokenTable(["a"], bytes(1))  # type: ignore[list-item]
    with pytest.raises(ValueError, match="multiple of 4"):
        TokenTable([b"a"], bytes(1)).decode(b"\0\0\0")
