"""Draws under top_k, top_p and min_p, without a sort.

One program works on a row. What it keeps is a prefix of the tokens by falling logit, ties by rising id; so it is known
by its last token, a (key, id) pair that a bisection over the ordered bits of the logits finds. Masses are whole numbers
of 2^-40 of the likeliest token's, so their sums have no order, and the answer is exact for these masses. The reference
sums float64: the two differ where a boundary falls within some 1e-6 of the total.

Most of a row is never read again: the first kernel left the maximum and the mass of every 128 logits, and these bound
from below the last token that can be kept. What may be kept is gathered and searched in registers where it is
few, and narrowed by passes over it first where it is many.
"""

import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.noise import gumbel, noise_bits, noise_keys
from octavo.kernels.overlap import follow
from octavo.kernels.sample_prefix import (
    ONE,
    is_inside,
    list_visits,
    load_visited,
    search_prefix,
    sub_block_maxima,
)
from octavo.kernels.sample_row import (
    LEAST_KEY,
    NO_ID,
    PARAM_WORDS,
    float_word,
    is_drawn,
    ordered_key,
    wants_thresholds,
)

__all__ = ["LIMITED_WARPS", "compile_cases", "draw_limited_kernel"]

LIMITED_WARPS = 16


@triton.jit
def _enough_for_top_k(keys, top_k):
    """A key that at least top_k of keys [n] reach, found by its upper 16 bits; 0 where there are fewer.

    The maxima of parts of a row are some of its logits, so the row's k-th largest is no less.
    """
    upper = (keys >> 16).to(tl.int32)
    low, high = tl.cast(0, tl.int32), tl.cast(0x10000, tl.int32)
    for _ in range(16):
        middle = (low + high) // 2
        reached = tl.sum((upper >= middle).to(tl.int32), 0) >= top_k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low.to(tl.int64) << 16


@triton.jit
def _enough_for_top_p(largest, mass, top_p, maximum, temperature, SUB: tl.constexpr):
    """A logit that the nucleus surely reaches, and the nucleus' mass in whole numbers.

    Below a bound lie at most the masses of the parts whose largest weight is below it, and of any other part its mass
    without that largest, or 127 times the bound. The nucleus holds all above a bound below which the rest fits.

    Of the arguments:
        largest: float32 [n], the largest weight of each part of the row.
        mass: float32 [n], the weight of each part.
    """
    total = tl.sum(mass.to(tl.float64), 0)
    rest = (total * ((1.0 - top_p.to(tl.float64)) * 0.999 - 4e-6)).to(tl.float32)
    low, high = tl.cast(-87.0, tl.float32), tl.cast(0.0, tl.float32)
    for _ in range(12):
        middle = (low + high) * 0.5
        bound = tl.exp(middle)
        below = tl.where(largest < bound, mass, tl.minimum(mass - largest, bound * (SUB - 1)))
        fits = tl.sum(below, 0) <= rest
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    wide = maximum.to(tl.float64) + (low.to(tl.float64) - 0.01) * temperature.to(tl.float64)
    logit = (wide - tl.abs(wide) * 1.2e-7).to(tl.float32)
    target = tl.ceil(total * top_p.to(tl.float64) * ONE).to(tl.int64)
    # With everything below the least weight, that weight bounds nothing.
    return tl.where(low <= -87.0, float("-inf"), logit), target


@triton.jit
def draw_limited_kernel(
    logits,
    counts,
    logits_rows,
    logits_slots,
    positions,
    slot_params,
    token_counts,
    sub_maxima,
    sub_masses,
    visits,
    found,
    found_ids,
    drawn,
    VOCAB: tl.constexpr,
    NUM_SUBS: tl.constexpr,
    LENGTH: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    FOUND: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw the token of one row that has top_k, top_p or min_p; other rows return at once. Grid (rows,).

    Of the arguments:
        logits: float32 [rows, VOCAB]; and the plan's arrays as `sample.sample` takes them.
        sub_maxima: float32 [rows, NUM_SUBS], the largest penalized logit of every SUB.
        sub_masses: float32 [rows, NUM_SUBS], their masses after temperature over that of their largest.
        visits: int32 [rows, NUM_SUBS] of scratch; found float32 [rows, FOUND], found_ids int32 [rows, FOUND] too.
        drawn: int32 [rows], written.
        LENGTH: the power of two from NUM_SUBS up.
    """
    follow(PDL)
    row = tl.program_id(0)
    if row >= tl.load(counts + 3):
        return
    slot = tl.load(logits_slots + row)
    words = slot_params + slot * PARAM_WORDS
    if not (is_drawn(words) & wants_thresholds(words, VOCAB)):
        return
    sub_maxima += row * NUM_SUBS
    maximum = tl.max(sub_block_maxima(sub_maxima, NUM_SUBS, LENGTH), 0)
    if (maximum == float("-inf")) | (maximum == float("inf")):
        return
    logits_row = logits + row.to(tl.int64) * VOCAB
    counts_row = token_counts
    if HAS_COUNTS:
        counts_row = token_counts + slot.to(tl.int64) * VOCAB
    visits += row * NUM_SUBS
    found += row * FOUND
    found_ids += row * FOUND
    temperature, top_p, min_p = float_word(words, 0), float_word(words, 1), float_word(words, 2)
    top_k = tl.load(words + 6)
    limits_k = (top_k > 0) & (top_k < VOCAB)
    least = tl.cast(float("-inf"), tl.float32)
    cut_key = tl.cast(LEAST_KEY, tl.int64)
    cut_id = tl.cast(NO_ID, tl.int32)
    if limits_k:
        low = tl.maximum(_enough_for_top_k(ordered_key(sub_block_maxima(sub_maxima, NUM_SUBS, LENGTH)), top_k), cut_key)
        num_visits = list_visits(visits, sub_maxima, low, least, maximum, temperature, NUM_SUBS, LENGTH)
        cut_key, cut_id = search_prefix(
            logits_row, counts_row, words, visits, num_visits, found, found_ids, maximum, temperature,
            low, cut_key, cut_id, top_k.to(tl.int64), tl.cast(0.0, tl.float64),
            False, VOCAB, SUB, TILE, FOUND, HAS_COUNTS,
        )  # fmt: skip
    if top_p < 1.0:
        low = cut_key
        target = tl.cast(-1, tl.int64)
        if not limits_k:
            lane = tl.arange(0, LENGTH)
            maxima = sub_block_maxima(sub_maxima, NUM_SUBS, LENGTH)
            largest = tl.exp(tl.div_rn(maxima - maximum, tl.zeros_like(maxima) + temperature))
            mass = tl.load(sub_masses + row * NUM_SUBS + lane, mask=lane < NUM_SUBS, other=0.0) * largest
            bound, target = _enough_for_top_p(largest, mass, top_p, maximum, temperature, SUB)
            low = tl.maximum(ordered_key(bound).to(tl.int64), low)
        num_visits = list_visits(visits, sub_maxima, low, least, maximum, temperature, NUM_SUBS, LENGTH)
        cut_key, cut_id = search_prefix(
            logits_row, counts_row, words, visits, num_visits, found, found_ids, maximum, temperature,
            low, cut_key, cut_id, target, top_p.to(tl.float64), True, VOCAB, SUB, TILE, FOUND, HAS_COUNTS,
        )  # fmt: skip
    if min_p > 0.0:
        least = tl.log(min_p.to(tl.float64)).to(tl.float32)
    num_visits = list_visits(visits, sub_maxima, cut_key, least, maximum, temperature, NUM_SUBS, LENGTH)

    position = tl.load(positions + tl.load(logits_rows + row)) + 1
    first, second = noise_keys(tl.load(words + 7), tl.load(words + 8), tl.load(words + 9), position)
    best = tl.cast(float("-inf"), tl.float32)
    best_id = tl.cast(NO_ID, tl.int32)
    token_ids, y = load_visited(logits_row, counts_row, words, visits, num_visits, 0, VOCAB, SUB, TILE, HAS_COUNTS)
    for tile in range(tl.cdiv(num_visits, TILE // SUB)):
        # The next tile is on its way while this one is worked on.
        next_ids, next_y = load_visited(
            logits_row, counts_row, words, visits, num_visits, tile + 1, VOCAB, SUB, TILE, HAS_COUNTS
        )
        z = tl.div_rn(y - maximum, tl.zeros_like(y) + temperature)
        high = tl.cast(0xFFFFFFFF, tl.int64)
        kept = is_inside(ordered_key(y), token_ids, cut_key, high, cut_key, cut_id) & (z >= least)
        score = tl.where(kept, z + gumbel(noise_bits(token_ids, first, second)), float("-inf"))
        tile_best = tl.max(score, 0)
        tile_id = tl.min(tl.where(kept & (score == tile_best), token_ids, NO_ID), 0)
        best_id = tl.where(
            tile_best > best, tile_id, tl.where(tile_best == best, tl.minimum(best_id, tile_id), best_id)
        )
        best = tl.maximum(best, tile_best)
        token_ids, y = next_ids, next_y
    tl.store(drawn + row, best_id)


def compile_cases(capability: int) -> list[CompileCase]:
    """The vocabularies of a large and a small model, with and without penalties."""
    cases = []
    for vocab_size, has_counts in ((151_936, True), (50_257, False)):
        num_subs = triton.cdiv(vocab_size, 4096) * 32
        constants = {
            "VOCAB": vocab_size,
            "NUM_SUBS": num_subs,
            "LENGTH": triton.next_power_of_2(num_subs),
            "SUB": 128,
            "TILE": 2048,
            "FOUND": 4096,
            "HAS_COUNTS": has_counts,
        }
        floats = ("logits", "sub_maxima", "sub_masses", "found")
        names = [name for name in draw_limited_kernel.arg_names if name not in constants]
        arguments = {name: "*fp32" if name in floats else "*i32" for name in names}
        cases.append(CompileCase(draw_limited_kernel, arguments, constants, num_warps=LIMITED_WARPS))
    return cases
