"""Whether the kernels in Gluon can be used, a part of Triton that still changes; others with the same bits stand in.

Triton 3.5 lacks names that they import, and 3.9 has those but compiles none of them.
"""

from __future__ import annotations

import functools
import importlib
import logging

import triton

__all__ = ["GLUON_KERNELS", "gluon_serves"]

GLUON_KERNELS = ("attention_decode_hopper", "attention_prefill_hopper", "linear_hopper", "linear_slab")
"""The modules that import Gluon, and may be imported where `gluon_serves`."""

_WRITTEN_FOR = "3.6"

_LOG = logging.getLogger(__name__)


@functools.cache
def gluon_serves() -> bool:
    """Whether `GLUON_KERNELS` may be imported and launched.

    Decided, and logged, when first asked; ask only where one would be used, as Gluon takes a while to import.
    """
    reason = _lacking()
    if reason is not None:
        _LOG.info("Hopper's own kernels are left out for portable ones with the same results: %s", reason)
    return reason is None


def _lacking() -> str | None:
    """Why this Triton does not do; None where it does."""
    if triton.__version__.split(".")[:2] != _WRITTEN_FOR.split("."):
        return f"they are written for Triton {_WRITTEN_FOR}, and {triton.__version__} is installed"
    try:
        for name in GLUON_KERNELS:
            importlib.import_module(f"octavo.kernels.{name}")
    except ImportError as error:
        return f"Triton {triton.__version__} lacks what they import: {error}"
    return None
