"""A kernel that breaks the device, as a wrong pointer would."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["wild_store"]

# Of the first page, which is never mapped.
_NOWHERE = 64


@triton.jit
def _store_kernel(address):
    tl.store(address.to(tl.int64).to(tl.pointer_type(tl.int32)), 1)


def wild_store() -> None:
    """Launch it on the current stream: that, and all that follows in this process, ends with an error."""
    _store_kernel[(1,)](_NOWHERE)
