"""Eight-bit floats (e4m3, finite, with NaN) by bit operations: GPUs before compute capability 8.9 have no instruction.

The format is that of "FP8 formats for deep learning" (arXiv 2209.05433): a sign, four bits of exponent with a bias of
7, three of mantissa; the largest number is 448, the smallest 2^-9, and 0x7F is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["encode_e4m3"]


@triton.jit
def encode_e4m3(x):
    """The e4m3 codes of float32 numbers: uint8, rounded to nearest even; beyond 448 the largest; NaN stays NaN."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    # Half of the last kept bit, and one less where that bit is even, carry into it as rounding does.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 steps are of 2^-9, which is the last bit of numbers about 2^14.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (sign | code).to(tl.uint8)
