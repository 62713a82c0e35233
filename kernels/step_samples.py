"""The last kernel of a step: it writes the samples to the ring of results in host memory."""

from __future__ import annotations

import triton
import triton.language as tl
from octavo._core import NUM_ARENAS, PARAM_LEN
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.launch import launch
from octavo.kernels.overlap import follow
from octavo.kernels.step import DeviceState, Samples
from torch import Tensor

__all__ = ["compile_cases", "publish"]

_PUBLISH_ROWS = 64


@triton.jit(do_not_specialize=["ring_rows"])
def _publish_kernel(
    turn,
    counts,
    slots,
    slot_params,
    ids,
    logprobs,
    top_ids,
    top_logprobs,
    ring_ids,
    ring_logprobs,
    ring_top_ids,
    ring_top_logprobs,
    ring_rows,
    MAX_LOGPROBS: tl.constexpr,
    TOP: tl.constexpr,
    PARAM_LEN: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_ARENAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: it must be the last to look at `turn`."""
    follow(PDL)
    arena = tl.load(turn)
    num_logits = tl.load(counts + 3)
    base = arena.to(tl.int64) * ring_rows
    columns = tl.arange(0, TOP)
    for start in range(0, num_logits, ROWS):
        i = start + tl.arange(0, ROWS)
        given = i < num_logits
        tl.store(ring_ids + base + i, tl.load(ids + i, mask=given, other=0), mask=given)
        slot = tl.load(slots + i, mask=given, other=0)
        asked = given & ((tl.load(slot_params + slot * PARAM_LEN + 10, mask=given, other=0) & 2) != 0)
        if tl.max(asked.to(tl.int32), axis=0) > 0:
            tl.store(ring_logprobs + base + i, tl.load(logprobs + i, mask=asked, other=0.0), mask=asked)
            width = tl.load(slot_params + slot * PARAM_LEN + 11, mask=asked, other=0)
            wanted = columns[None, :] < tl.minimum(width, MAX_LOGPROBS)[:, None]
            at = i[:, None] * MAX_LOGPROBS + columns[None, :]
            there = base * MAX_LOGPROBS + at
            tl.store(ring_top_ids + there, tl.load(top_ids + at, mask=wanted, other=0), mask=wanted)
            tl.store(ring_top_logprobs + there, tl.load(top_logprobs + at, mask=wanted, other=0.0), mask=wanted)
    tl.debug_barrier()
    tl.store(turn, (arena + 1) % NUM_ARENAS)


def publish(state: DeviceState, counts: Tensor, logits_slots: Tensor, samples: Samples, ring: Samples) -> None:
    """Leave the step's samples in the ring of results, at its arena's place, and pass the turn on.

    Log probabilities go out for the rows that asked for them, as many as they asked for.

    Args:
        state: of the device; `turn` is moved on.
        counts: int32[16] of the step.
        logits_slots: int32[R], the slot of each sample.
        samples: what was sampled, on the device.
        ring: where it goes, in pinned host memory.
    """
    max_logprobs = samples.top_ids.shape[1]
    launch(
        _publish_kernel,
        (1,),
        state.turn,
        counts,
        logits_slots,
        state.params,
        samples.ids,
        samples.logprobs,
        samples.top_ids,
        samples.top_logprobs,
        ring.ids,
        ring.logprobs,
        ring.top_ids,
        ring.top_logprobs,
        ring.ids.shape[1],
        MAX_LOGPROBS=max_logprobs,
        TOP=triton.next_power_of_2(max(max_logprobs, 1)),
        PARAM_LEN=PARAM_LEN,
        ROWS=_PUBLISH_ROWS,
        NUM_ARENAS=NUM_ARENAS,
        num_warps=4,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """The kernel once: what it compiles to does not depend on the model."""
    del capability
    sampled = {
        f"{place}{name}": kind
        for place in ("", "ring_")
        for name, kind in (("ids", "*i32"), ("logprobs", "*fp32"), ("top_ids", "*i32"), ("top_logprobs", "*fp32"))
    }
    published = dict.fromkeys(("turn", "counts", "slots", "slot_params"), "*i32") | sampled | {"ring_rows": "i32"}
    constants = {
        "MAX_LOGPROBS": 20,
        "TOP": 32,
        "PARAM_LEN": PARAM_LEN,
        "ROWS": _PUBLISH_ROWS,
        "NUM_ARENAS": NUM_ARENAS,
    }
    return [CompileCase(_publish_kernel, published, constants)]
