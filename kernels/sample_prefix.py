"""The search for the shortest prefix of a row's tokens, by falling logit, whose mass reaches a target."""

import triton
import triton.language as tl
from octavo.kernels.sample_row import NO_ID, key_value, ordered_key, row_values

__all__ = ["ONE", "is_inside", "list_visits", "load_visited", "search_prefix", "sub_block_maxima"]

ONE = tl.constexpr(1099511627776.0)
"""The mass of the likeliest token."""


@triton.jit
def sub_block_maxima(sub_maxima, NUM_SUBS: tl.constexpr, LENGTH: tl.constexpr):
    """The largest logits of a row's sub-blocks, loaded again where they are needed: they take few registers then."""
    lane = tl.arange(0, LENGTH)
    return tl.load(sub_maxima + lane, mask=lane < NUM_SUBS, other=float("-inf"))


@triton.jit
def list_visits(visits, sub_maxima, low, least, maximum, temperature, NUM_SUBS: tl.constexpr, LENGTH: tl.constexpr):
    """List the sub-blocks that hold a key from low on and a scaled logit from least on; returns how many."""
    largest = sub_block_maxima(sub_maxima, NUM_SUBS, LENGTH)
    scaled = tl.div_rn(largest - maximum, tl.zeros_like(largest) + temperature)
    kept = (ordered_key(largest) >= low.to(tl.uint32)) & (scaled >= least)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(visits + place, tl.arange(0, LENGTH), mask=kept)
    tl.debug_barrier()
    return tl.sum(kept.to(tl.int32), 0)


@triton.jit
def load_visited(
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
def is_inside(key, token_ids, low, high, cut_key, cut_id):
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
    token_ids, y = load_visited(logits_row, counts_row, words, visits, num_visits, 0, VOCAB, SUB, TILE, HAS_COUNTS)
    for tile in range(tl.cdiv(num_visits, TILE // SUB)):
        # The next tile is on its way while this one is worked on.
        next_ids, next_y = load_visited(
            logits_row, counts_row, words, visits, num_visits, tile + 1, VOCAB, SUB, TILE, HAS_COUNTS
        )
        inside = is_inside(ordered_key(y), token_ids, low, high, cut_key, cut_id)
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
            token_ids, y = load_visited(
                logits_row, counts_row, words, visits, num_visits, tile, VOCAB, SUB, TILE, HAS_COUNTS
            )
            key = ordered_key(y)
            inside = is_inside(key, token_ids, first, high, cut_key, cut_id)
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
    token_ids, y = load_visited(logits_row, counts_row, words, visits, num_visits, 0, VOCAB, SUB, TILE, HAS_COUNTS)
    for tile in range(tl.cdiv(num_visits, TILE // SUB)):
        # The next tile is on its way while this one is worked on.
        next_ids, next_y = load_visited(
            logits_row, counts_row, words, visits, num_visits, tile + 1, VOCAB, SUB, TILE, HAS_COUNTS
        )
        tied = is_inside(ordered_key(y), token_ids, key, key + 1, cut_key, cut_id)
        place = before + tl.cumsum(tied.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(tied & (place <= kept), token_ids, -1), 0))
        before += tl.sum(tied.to(tl.int32), 0)
        token_ids, y = next_ids, next_y
    return last


@triton.jit
def search_prefix(
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
