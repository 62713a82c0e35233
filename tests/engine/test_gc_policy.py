"""Garbage collection during a call."""

from __future__ import annotations

import gc
import weakref

import pytest
from octavo.engine.gc_policy import young_objects_only


class _Ring:
    def __init__(self) -> None:
        self.me = self


def test_old_objects_are_set_aside_for_a_while() -> None:
    gc.collect()
    old = _Ring()
    watched = weakref.ref(old)
    with young_objects_only():
        del old
        young = weakref.ref(_Ring())
        gc.collect()
        assert watched() is not None
        assert young() is None
    gc.collect()
    assert watched() is None


def test_also_after_an_error() -> None:
    with pytest.raises(KeyError), young_objects_only():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_the_program_set_aside_stays_so() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with young_objects_only():
            assert gc.get_freeze_count() <= count
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
