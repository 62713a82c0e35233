"""What the sampling kernels know of one row: its parameters and its penalized logits, as ordered keys too."""

import triton
import triton.language as tl

__all__ = ["float_word", "is_drawn", "key_value", "ordered_key", "penalized", "row_values", "wants_thresholds"]

PARAM_WORDS = tl.constexpr(16)
HAS_PENALTIES = tl.constexpr(1)
WANTS_LOGPROBS = tl.constexpr(2)
NO_ID = tl.constexpr(0x7FFFFFFF)
LEAST_KEY = tl.constexpr(0x00800000)
"""The key of the least finite float."""


@triton.jit
def float_word(words, index: tl.constexpr):
    """The float32 whose bits are word `index` of a slot's parameters."""
    return tl.load(words + index).to(tl.float32, bitcast=True)


@triton.jit
def is_drawn(words):
    """Whether a row is drawn by noise: temperatures below 1e-5 choose greedily."""
    return float_word(words, 0) >= 1e-5


@triton.jit
def wants_thresholds(words, VOCAB: tl.constexpr):
    """Whether a drawn row limits its tokens by top_k, top_p or min_p."""
    top_k = tl.load(words + 6)
    return ((top_k > 0) & (top_k < VOCAB)) | (float_word(words, 1) < 1.0) | (float_word(words, 2) > 0.0)


@triton.jit
def penalized(x, counts, words):
    """Logits x after repetition, frequency and presence penalties; bit 30 of a count is set for a prompt's token."""
    repetition, presence, frequency = float_word(words, 3), float_word(words, 4), float_word(words, 5)
    output = counts & 0x3FFFFFFF
    repeated = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    y = tl.where(counts != 0, repeated, x)
    y = y - output.to(tl.float32) * frequency
    return y - tl.where(output > 0, presence, 0.0)


@triton.jit
def row_values(logits_row, counts_row, words, token_ids, mask, HAS_COUNTS: tl.constexpr):
    """Logits after penalties of int32 token ids of one row; -inf for NaN and where masked."""
    x = tl.load(logits_row + token_ids, mask=mask, other=float("-inf"))
    if HAS_COUNTS and (tl.load(words + 10) & HAS_PENALTIES) != 0:
        x = penalized(x, tl.load(counts_row + token_ids, mask=mask, other=0), words)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def ordered_key(x):
    """uint32 keys in the order of float32 x without NaN; 0 and -0 are the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def key_value(key):
    """The float32 of a uint32 key."""
    return tl.where((key >> 31) != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)
