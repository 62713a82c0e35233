"""Programmatic dependent launch: a kernel's programs take their places while the kernel before it ends (Hopper on).

Every kernel of a step that declares `PDL` begins with `follow`: it lets the next kernel's programs start as soon as all
of its own have, and waits until the kernel before has ended and what it wrote can be read. So what does not depend on
a step (addresses, weights asked for ahead) is done while other kernels still run. That holds along the whole chain,
because each kernel ends after the one before it: no program may leave without having called `follow`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

__all__ = ["compiles_follow", "follow", "overlaps"]


@functools.cache
def overlaps() -> bool:
    """Whether the card in use launches dependents early: compute capability 9.0 or more."""
    return compiles_follow() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def compiles_follow() -> bool:
    """Whether this Triton can compile `follow`: what 3.4 has for it takes other arguments than its compiler gives."""
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 5)


@triton.jit
def follow(PDL: tl.constexpr):
    """Let the next kernel start, and wait for the one before; nothing where PDL is False."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
