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
from octavo.kernels.sample_row import (
    LEAST_KEY,
    NO_ID,
    PARAM_WORDS,
    float_word,
    is_drawn,
    key_value,
    ordered_key,
    row_values,
    wants_thresholds,
)

__all__ = ["LIMITED_WARPS", "compile_cases", "draw_limited_kernel"]

LIMITED_WARPS = 16

ONE = tl.constexpr(1099511627776.0)
"""The mass of the likeliest token."""


@triton.jit
def _maxima(sub_maxima, NUM_SUBS: tl.constexpr, LENGTH: tl.constexpr):
    """The largest logits of a row's sub-blocks, loaded again where they are needed: they take few registers then."""
    lane = tl.arange(0, LENGTH)
    return tl.load(sub_maxima + lane, mask=lane < NUM_SUBS, other=float("-inf"))


@triton.jit
def _visit(visits, sub_maxima, low, least, maximum, temperature, NUM_SUBS: tl.constexpr, LENGTH: tl.constexpr):
    """List the sub-blocks that hold a key from low on and a scaled logit from least on; returns how many."""
    largest = _maxima(sub_maxima, NUM_SUBS, LENGTH)
    scaled = tl.div_rn(largest - maximum, tl.zeros_like(largest) + temperature)
    kept = (ordered_key(largest) >= low.to(tl.uint32)) & (scaled >= least)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(visits + place, tl.arange(0, LENGTH), mask=kept)
    tl.debug_barrier()
    return tl.sum(kept.to(tl.int32), 0)


@triton.jit
def _visited(
    logits_row,
    counts_row,
    words,
    visits,
    num_visits,
    tile,
    VOCAB: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    """Token ids [TILE] of the tile-th TILE / SUB sub-blocks of the list and their logits, -inf past the end."""
    lane = tl.arange(0, TILE)
    place = tile * (TILE // SUB) + lane // SUB
    exists = place < num_visits
    token_ids = tl.load(visits + place, mask=exists, other=0) * SUB + lane % SUB
    return token_ids, row_values(logits_row, counts_row, words, token_ids, exists & (token_ids < VOCAB), HAS_COUNTS)


@triton.jit
def _weigh(y, maximum, temperature, MASS: tl.constexpr):
    """int64 masses of logits y, or 1 for each where they are counted."""
    if MASS:
        z = tl.div_rn(y - maximum, tl.zeros_like(y) + temperature)
        weights = tl.maximum((tl.exp(z) * ONE).to(tl.int64), 1)
    else:
        weights = tl.where(y == y, 1, 0).to(tl.int64)
    return weights


@triton.jit
def _inside(key, token_ids, low, high, cut_key, cut_id):
    """Whether uint32 keys are in [low, high) and (key, id) is not behind the cut; int64 bounds below 2^32."""
    low, high, cut_key = low.to(tl.uint32), high.to(tl.uint32), cut_key.to(tl.uint32)
    return (key >= low) & (key < high) & ((key > cut_key) | ((key == cut_key) & (token_ids <= cut_id)))


@triton.jit
def _gather(
    logits_row,
    counts_row,
    words,
    visits,
    num_visits,
    found,
    found_ids,
    maximum,
    temperature,
    low,
    high,
    cut_key,
    cut_id,
    MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    FOUND: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    """Copy the first FOUND logits inside by rising id; returns how many there are, and the mass of all."""
    number = tl.cast(0, tl.int64)
    total = tl.cast(0, tl.int64)
    tl.debug_barrier()
    token_ids, y = _visited(logits_row, counts_row, words, visits, num_visits, 0, VOCAB, SUB, TILE, HAS_COUNTS)
    for tile in range(tl.cdiv(num_visits, TILE // SUB)):
        # The next tile is on its way while this one is worked on.
        next_ids, next_y = _visited(
            logits_row, counts_row, words, visits, num_visits, tile + 1, VOCAB, SUB, TILE, HAS_COUNTS
        )
        inside = _inside(ordered_key(y), token_ids, low, high, cut_key, cut_id)
        place = number + tl.cumsum(inside.to(tl.int32), 0) - 1
        stored = inside & (place < FOUND)
        tl.store(found + place, y, mask=stored)
        tl.store(found_ids + place, token_ids, mask=stored)
        number += tl.sum(inside.to(tl.int32), 0)
        if MASS:
            total += tl.sum(tl.where(inside, _weigh(y, maximum, temperature, MASS), 0), 0)
        token_ids, y = next_ids, next_y
    tl.debug_barrier()
    return number, total


@triton.jit
def _narrow(
    logits_row,
    counts_row,
    words,
    visits,
    num_visits,
    maximum,
    temperature,
    low,
    high,
    cut_key,
    cut_id,
    above,
    number,
    target,
    MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    FOUND: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    """Quarter [low, high) until FOUND logits or one key are inside; `above` is the mass from high on."""
    while (number > FOUND) & (high - low > 1):
        quarter = tl.maximum((high - low) // 4, 1)
        first = low + quarter
        second = tl.minimum(first + quarter, high)
        third = tl.minimum(second + quarter, high)
        masses = tl.zeros([TILE], tl.int64)
        masses2 = tl.zeros([TILE], tl.int64)
        masses3 = tl.zeros([TILE], tl.int64)
        # Three counts of at most 2^20 in one word.
        counts = tl.zeros([TILE], tl.int64)
        for tile in range(tl.cdiv(num_visits, TILE // SUB)):
            token_ids, y = _visited(
                logits_row, counts_row, words, visits, num_visits, tile, VOCAB, SUB, TILE, HAS_COUNTS
            )
            key = ordered_key(y)
            inside = _inside(key, token_ids, first, high, cut_key, cut_id)
            inside2 = inside & (key >= second.to(tl.uint32))
            inside3 = inside & (key >= third.to(tl.uint32))
            counts += inside.to(tl.int64) + (inside2.to(tl.int64) << 20) + (inside3.to(tl.int64) << 40)
            if MASS:
                weights = _weigh(y, maximum, temperature, MASS)
                masses += tl.where(inside, weights, 0)
                masses2 += tl.where(inside2, weights, 0)
                masses3 += tl.where(inside3, weights, 0)
        packed = tl.sum(counts, 0)
        number1, number2, number3 = packed & 0xFFFFF, (packed >> 20) & 0xFFFFF, packed >> 40
        if MASS:
            mass1, mass2, mass3 = tl.sum(masses, 0), tl.sum(masses2, 0), tl.sum(masses3, 0)
        else:
            mass1, mass2, mass3 = number1, number2, number3
        in1, in2, in3 = above + mass1 >= target, above + mass2 >= target, above + mass3 >= target
        number = tl.where(
            in3, number3, tl.where(in2, number2 - number3, tl.where(in1, number1 - number2, number - number1))
        )
        above += tl.where(in3, 0, tl.where(in2, mass3, tl.where(in1, mass2, mass1)))
        high = tl.where(in3, high, tl.where(in2, third, tl.where(in1, second, first)))
        low = tl.where(in3, third, tl.where(in2, second, tl.where(in1, first, low)))
    return low, high, above, number


@triton.jit
def _last_of_ties(
    logits_row,
    counts_row,
    words,
    visits,
    num_visits,
    key,
    cut_key,
    cut_id,
    kept,
    VOCAB: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    """The id of the kept-th logit with a key; the last one's where there are fewer."""
    before = tl.cast(0, tl.int64)
    last = tl.cast(-1, tl.int32)
    token_ids, y = _visited(logits_row, counts_row, words, visits, num_visits, 0, VOCAB, SUB, TILE, HAS_COUNTS)
    for tile in range(tl.cdiv(num_visits, TILE // SUB)):
        # The next tile is on its way while this one is worked on.
        next_ids, next_y = _visited(
            logits_row, counts_row, words, visits, num_visits, tile + 1, VOCAB, SUB, TILE, HAS_COUNTS
        )
        tied = _inside(ordered_key(y), token_ids, key, key + 1, cut_key, cut_id)
        place = before + tl.cumsum(tied.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(tied & (place <= kept), token_ids, -1), 0))
        before += tl.sum(tied.to(tl.int32), 0)
        token_ids, y = next_ids, next_y
    return last


@triton.jit
def _search(
    logits_row,
    counts_row,
    words,
    visits,
    num_visits,
    found,
    found_ids,
    maximum,
    temperature,
    low,
    cut_key,
    cut_id,
    target,
    share,
    MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    FOUND: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    """The last (key, id) of the shortest prefix whose mass reaches a target.

    Of the arguments:
        logits_row: and the next two, of the row.
        visits: list of the sub-blocks that hold the prefix, `num_visits` of them.
        found: float32 [FOUND] of scratch; found_ids int32 [FOUND] too.
        low: a key that the prefix surely reaches.
        cut_key: with cut_id, the last pair that may be in the prefix.
        target: int64; below 0: `share` (float64) of the mass of everything from low to the cut.
    """
    high = ordered_key(maximum).to(tl.int64) + 1
    above = tl.cast(0, tl.int64)
    number, total = _gather(
        logits_row, counts_row, words, visits, num_visits, found, found_ids, maximum, temperature,
        low, high, cut_key, cut_id, MASS, VOCAB, SUB, TILE, FOUND, HAS_COUNTS,
    )  # fmt: skip
    if target < 0:
        target = tl.ceil(total.to(tl.float64) * share).to(tl.int64)
    target = tl.maximum(target, 1)
    if number > FOUND:
        low, high, above, number = _narrow(
            logits_row, counts_row, words, visits, num_visits, maximum, temperature,
            low, high, cut_key, cut_id, above, number, target, MASS, VOCAB, SUB, TILE, FOUND, HAS_COUNTS,
        )  # fmt: skip
        number, total = _gather(
            logits_row, counts_row, words, visits, num_visits, found, found_ids, maximum, temperature,
            low, high, cut_key, cut_id, MASS, VOCAB, SUB, TILE, FOUND, HAS_COUNTS,
        )  # fmt: skip
    if number <= FOUND:
        lane = tl.arange(0, FOUND)
        y = tl.load(found + lane, mask=lane < number, other=float("-inf"))
        token_ids = tl.load(found_ids + lane, mask=lane < number, other=NO_ID)
        key = ordered_key(y)
        weights = tl.where(lane < number, _weigh(y, maximum, temperature, MASS), 0)
        while high - low > 1:
            middle = low + (high - low) // 2
            reached = above + tl.sum(tl.where(key >= middle.to(tl.uint32), weights, 0), 0) >= target
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle)
        need = target - above - tl.sum(tl.where(key > low.to(tl.uint32), weights, 0), 0)
        tied = (key == low.to(tl.uint32)) & (lane < number)
        each = tl.maximum(tl.max(tl.where(tied, weights, 0), 0), 1)
        place = tl.cumsum(tied.to(tl.int32), 0)
        last = tl.max(tl.where(tied & ((place - 1) * each < need), token_ids, -1), 0)
    else:
        each = tl.max(_weigh(key_value(tl.zeros([2], tl.uint32) + low.to(tl.uint32)), maximum, temperature, MASS), 0)
        kept = (target - above + each - 1) // each
        last = _last_of_ties(
            logits_row, counts_row, words, visits, num_visits, low, cut_key, cut_id, kept, VOCAB, SUB, TILE, HAS_COUNTS
        )
    return low, last


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
    maximum = tl.max(_maxima(sub_maxima, NUM_SUBS, LENGTH), 0)
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
        low = tl.maximum(_enough_for_top_k(ordered_key(_maxima(sub_maxima, NUM_SUBS, LENGTH)), top_k), cut_key)
        num_visits = _visit(visits, sub_maxima, low, least, maximum, temperature, NUM_SUBS, LENGTH)
        cut_key, cut_id = _search(
            logits_row, counts_row, words, visits, num_visits, found, found_ids, maximum, temperature,
            low, cut_key, cut_id, top_k.to(tl.int64), tl.cast(0.0, tl.float64),
            False, VOCAB, SUB, TILE, FOUND, HAS_COUNTS,
        )  # fmt: skip
    if top_p < 1.0:
        low = cut_key
        target = tl.cast(-1, tl.int64)
        if not limits_k:
            lane = tl.arange(0, LENGTH)
            maxima = _maxima(sub_maxima, NUM_SUBS, LENGTH)
            largest = tl.exp(tl.div_rn(maxima - maximum, tl.zeros_like(maxima) + temperature))
            mass = tl.load(sub_masses + row * NUM_SUBS + lane, mask=lane < NUM_SUBS, other=0.0) * largest
            bound, target = _enough_for_top_p(largest, mass, top_p, maximum, temperature, SUB)
            low = tl.maximum(ordered_key(bound).to(tl.int64), low)
        num_visits = _visit(visits, sub_maxima, low, least, maximum, temperature, NUM_SUBS, LENGTH)
        cut_key, cut_id = _search(
            logits_row, counts_row, words, visits, num_visits, found, found_ids, maximum, temperature,
            low, cut_key, cut_id, target, top_p.to(tl.float64), True, VOCAB, SUB, TILE, FOUND, HAS_COUNTS,
        )  # fmt: skip
    if min_p > 0.0:
        least = tl.log(min_p.to(tl.float64)).to(tl.float32)
    num_visits = _visit(visits, sub_maxima, cut_key, least, maximum, temperature, NUM_SUBS, LENGTH)

    position = tl.load(positions + tl.load(logits_rows + row)) + 1
    first, second = noise_keys(tl.load(words + 7), tl.load(words + 8), tl.load(words + 9), position)
    best = tl.cast(float("-inf"), tl.float32)
    best_id = tl.cast(NO_ID, tl.int32)
    token_ids, y = _visited(logits_row, counts_row, words, visits, num_visits, 0, VOCAB, SUB, TILE, HAS_COUNTS)
    for tile in range(tl.cdiv(num_visits, TILE // SUB)):
        # The next tile is on its way while this one is worked on.
        next_ids, next_y = _visited(
            logits_row, counts_row, words, visits, num_visits, tile + 1, VOCAB, SUB, TILE, HAS_COUNTS
        )
        z = tl.div_rn(y - maximum, tl.zeros_like(y) + temperature)
        high = tl.cast(0xFFFFFFFF, tl.int64)
        kept = _inside(ordered_key(y), token_ids, cut_key, high, cut_key, cut_id) & (z >= least)
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
