"""Log probabilities of the chosen token and of the likeliest, of a row's logits before penalties and temperature."""

import triton
import triton.language as tl
from octavo.kernels.sample_row import key_value, ordered_key

__all__ = ["write_logprobs"]


@triton.jit
def _pair(key, index):
    """One int64 that orders by rising key, ties by falling index."""
    return (key.to(tl.int64) << 31) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def write_logprobs(
    logits_row,
    chosen,
    sub_maxima,
    sub_masses,
    out_logprob,
    out_ids,
    out_logprobs,
    number,
    VOCAB: tl.constexpr,
    NUM_SUBS: tl.constexpr,
    LENGTH: tl.constexpr,
    SUB: tl.constexpr,
    MOST: tl.constexpr,
):
    """Write what one row asks for.

    The n likeliest tokens lie in the n parts of the row with the largest maxima, so only these are read.

    Of the arguments:
        logits_row: float32 [VOCAB].
        chosen: the token whose log probability goes to out_logprob.
        sub_maxima: float32 [NUM_SUBS], the largest of every SUB logits.
        sub_masses: float32 [NUM_SUBS], their sums of e^(logit - the largest).
        out_logprob: float32 [1].
        out_ids: int32 [number], written with -1 where fewer tokens are above -inf.
        out_logprobs: float32 [number], written with -inf there.
        number: likeliest tokens to write, MOST at most.
        LENGTH: the power of two from NUM_SUBS up.
        MOST: a power of two.
    """
    lane = tl.arange(0, LENGTH)
    maxima = tl.load(sub_maxima + lane, mask=lane < NUM_SUBS, other=float("-inf"))
    masses = tl.load(sub_masses + lane, mask=lane < NUM_SUBS, other=0.0)
    maximum = tl.max(maxima, 0)
    masses *= tl.where(maxima > float("-inf"), tl.exp(maxima - maximum), 0.0)
    total = maximum.to(tl.float64) + tl.log(tl.sum(masses.to(tl.float64), 0))
    tl.store(out_logprob, (tl.load(logits_row + chosen).to(tl.float64) - total).to(tl.float32))
    if number > 0:
        pairs = _pair(ordered_key(maxima), lane)
        place = tl.arange(0, MOST)
        parts = tl.full([MOST], NUM_SUBS, tl.int32)
        for i in range(number):
            best = tl.max(pairs, 0)
            parts = tl.where(place == i, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32), parts)
            pairs = tl.where(pairs == best, 0, pairs)
        token_ids = parts[:, None] * SUB + tl.arange(0, SUB)[None, :]
        x = tl.load(logits_row + token_ids, mask=token_ids < VOCAB, other=float("-inf"))
        found = _pair(ordered_key(tl.where(x == x, x, float("-inf"))), token_ids)
        likeliest = tl.zeros([MOST], tl.int64)
        for i in range(number):
            best = tl.max(tl.max(found, 1), 0)
            likeliest = tl.where(place == i, best, likeliest)
            found = tl.where(found == best, 0, found)
        value = key_value((likeliest >> 31).to(tl.uint32))
        exists = (likeliest > 0) & (value > float("-inf"))
        ids = tl.where(exists, (0x7FFFFFFF - (likeliest & 0x7FFFFFFF)).to(tl.int32), -1)
        logprobs = tl.where(exists, (value.to(tl.float64) - total).to(tl.float32), float("-inf"))
        tl.store(out_ids + place, ids, mask=place < number)
        tl.store(out_logprobs + place, logprobs, mask=place < number)
