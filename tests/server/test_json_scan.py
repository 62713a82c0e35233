"""Depth and number of a JSON text's containers: as a parser finds them, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.server.request.json_scan import scan

TEXTS = st.text(st.sampled_from('a"\\[]{}é\n/u'), max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=25,
)


def measured(value: Any) -> tuple[int, int]:
    """(containers, depth) of a value."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    inner = [measured(item) for item in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(count for count, _ in inner), 1 + max((depth for _, depth in inner), default=0)


@settings(max_examples=400, deadline=None)
@given(VALUES, st.integers(1, 9), st.booleans())
def test_it_finds_what_a_parser_finds(value: Any, piece: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    results = list(scan(text, piece))
    assert results[-1] == measured(json.loads(text))
    assert results == sorted(results)


@pytest.mark.parametrize("backslashes", range(1, 9))
@pytest.mark.parametrize("piece", range(1, 9))
def test_runs_of_backslashes_across_pieces(backslashes: int, piece: int) -> None:
    text = b'["' + b"\\" * backslashes + b'"' + b'[" ' + b"]"
    # An odd run escapes the quote, so the bracket after it is text.
    containers = 1 if backslashes % 2 else 2
    assert list(scan(text, piece))[-1][0] == containers


def test_an_empty_text_has_nothing() -> None:
    assert list(scan(b"")) == []
