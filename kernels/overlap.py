"""Programmatic dependent launch: a kernel's programs take their places while the kernel before it ends (Hopper on).

Every kernel of a step that declares `PDL` says when the next one's programs may take their places (`start_next`; they
do once all of its own have said so) and waits until the kernel before has ended and what it wrote can be read
(`await_previous`). No program may leave without having waited: so each kernel ends after the one before it, and that
holds along the whole chain. `follow` is both at once.

Before it waits, a kernel may read only what no kernel of the step writes (weights, tables of angles) and what the
step's plan says: `plan_attention` starts nothing early, so what it and those before it wrote is there for all after it.

When to start the next kernel: at once, where its programs find room beside these; at the end, where these fill the
multiprocessors for long. Programs that come early then sit on the few that have room, several to one, and read their
weights from there: it cost llama3-8b a fifth of its step at 8 rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

__all__ = ["await_previous", "compiles_follow", "follow", "overlaps", "start_next"]


@functools.cache
def overlaps() -> bool:
    """Whether the card in use launches dependents early: compute capability 9.0 or more."""
    return compiles_follow() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def compiles_follow() -> bool:
    """Whether this Triton can compile `follow`: what 3.4 has for it takes other arguments than its compiler gives."""
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 5)


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel's programs take their places once all programs have come here; nothing where PDL is False."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Wait until the kernel before has ended; a second time it takes no time. Nothing where PDL is False."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def follow(PDL: tl.constexpr):
    """`start_next`, then `await_previous`."""
    start_next(PDL)
    await_previous(PDL)
