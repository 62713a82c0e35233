"""Between a layer's q, k and v and its attention: head norms, rotary positions, the writing of the KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.fp8 import encode_e4m3
from octavo.kernels.launch import launch
from octavo.kernels.overlap import await_previous, start_next

__all__ = ["compile_cases", "rope_and_cache"]

_HEADS = 8
"""Heads of a program: enough to share the loads of cosines and sines, few enough that one token fills several SMs."""


@triton.jit
def _normed(x, factor, weight, dtype: tl.constexpr):
    """Values [HEADS, n] times the head's factor [HEADS], rounded, times the weight [n] of their dimension, rounded."""
    return ((x * factor[:, None]).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _store_cache(target, value, mask, dtype: tl.constexpr, FP8: tl.constexpr):
    """Store values of heads, rounded to the model's dtype and with FP8 encoded."""
    value = value.to(dtype)
    if FP8:
        tl.store(target, encode_e4m3(value.to(tl.float32)), mask=mask)
    else:
        tl.store(target, value, mask=mask)


@triton.jit
def _rope_and_cache_kernel(
    qkv_ptr,
    cache_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A group of HEADS heads of one token: of q in place, or of k and v into the token's slot.

    HALF, REST and WIDE are powers of two that hold half of the turned dimensions, the others, and all of a head.
    """
    start_next(PDL)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    q_parts: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    parts: tl.constexpr = q_parts + (KV_HEADS + HEADS - 1) // HEADS
    token = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    is_q = part < q_parts
    heads = tl.where(is_q, part, part - q_parts) * HEADS + tl.arange(0, HEADS)
    real = heads < tl.where(is_q, Q_HEADS, KV_HEADS)
    source = qkv_ptr + token * ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM) + tl.where(is_q, 0, Q_HEADS * HEAD_DIM)
    rows = heads[:, None] * HEAD_DIM

    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token).to(tl.int64)
    angles = cos_sin_ptr + position * ROTARY + tl.arange(0, HALF)
    turned = tl.arange(0, HALF) < ROTARY // 2
    cos = tl.load(angles, mask=turned, other=0.0)[None, :]
    sin = tl.load(angles + ROTARY // 2, mask=turned, other=0.0)[None, :]
    first = tl.arange(0, HALF)
    second = first + ROTARY // 2
    others = ROTARY + tl.arange(0, REST if REST else 1)
    if Q_NORM or K_NORM:
        is_normed = (Q_NORM and is_q) or (K_NORM and not is_q)
        norm_ptr = q_norm_ptr if is_q else k_norm_ptr
        weight_a = tl.load(norm_ptr + first, mask=turned & is_normed, other=0.0)
        weight_b = tl.load(norm_ptr + second, mask=turned & is_normed, other=0.0)
        if REST:
            weight_rest = tl.load(norm_ptr + others, mask=(others < HEAD_DIM) & is_normed, other=0.0)
    await_previous(PDL)

    # Every load is under way before the first is waited for.
    dims = tl.arange(0, WIDE)[None, :]
    wide_mask = real[:, None] & (dims < HEAD_DIM) & (not is_q)
    values = tl.load(source + KV_HEADS * HEAD_DIM + rows + dims, mask=wide_mask, other=0.0)
    mask = real[:, None] & turned[None, :]
    a = tl.load(source + rows + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + rows + second[None, :], mask=mask, other=0.0).to(tl.float32)
    if REST:
        rest_mask = real[:, None] & (others < HEAD_DIM)[None, :]
        rest = tl.load(source + rows + others[None, :], mask=rest_mask, other=0.0).to(tl.float32)

    if Q_NORM or K_NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if REST:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)
        if is_normed:
            a = _normed(a, factor, weight_a, dtype)
            b = _normed(b, factor, weight_b, dtype)
            if REST:
                rest = _normed(rest, factor, weight_rest, dtype)

    x = a * cos - b * sin
    y = b * cos + a * sin
    if is_q:
        tl.store(source + rows + first[None, :], x.to(dtype), mask=mask)
        tl.store(source + rows + second[None, :], y.to(dtype), mask=mask)
        if REST and Q_NORM:
            tl.store(source + rows + others[None, :], rest.to(dtype), mask=rest_mask)
    elif slot >= 0:
        block = (slot // BLOCK_SIZE).to(tl.int64)
        inside = heads[:, None] * (BLOCK_SIZE * HEAD_DIM) + slot % BLOCK_SIZE * HEAD_DIM
        keys = cache_ptr + block * (2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM) + inside
        _store_cache(keys + first[None, :], x, mask, dtype, FP8)
        _store_cache(keys + second[None, :], y, mask, dtype, FP8)
        if REST:
            _store_cache(keys + others[None, :], rest, rest_mask, dtype, FP8)
        _store_cache(keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM + dims, values, wide_mask, dtype, FP8)


def rope_and_cache(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    num_heads: int,
    tokens: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm and turn q (in place) and k, put k and v into their slots.

    Args:
        qkv: [tokens or more, (num_heads + 2 * num_kv_heads) * head_dim].
        kv_cache: [blocks, 2, num_kv_heads, block_size, head_dim], of the dtype of qkv, or codes of e4m3 numbers
            (float8_e4m3fn or uint8).
        positions: int32[tokens or more].
        slot_mapping: int32[tokens or more], block * block_size + offset; below 0: nothing is written.
        cos_sin: float32 [positions, rotary_dim], cosines then sines.
        num_heads: query heads.
        tokens: how many.
        q_norm: float32[head_dim], the weight of an RMS norm of every query head; None for none.
        k_norm: the same for keys.
        eps: of these norms.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    fp8 = kv_cache.dtype in (torch.float8_e4m3fn, torch.uint8)
    constants = _constants(head_dim, cos_sin.shape[1])
    launch(
        _rope_and_cache_kernel,
        (tokens * (triton.cdiv(num_heads, _HEADS) + triton.cdiv(num_kv_heads, _HEADS)),),
        qkv,
        kv_cache.view(torch.uint8) if fp8 else kv_cache,
        positions,
        slot_mapping,
        cos_sin,
        cos_sin if q_norm is None else q_norm,
        cos_sin if k_norm is None else k_norm,
        eps,
        Q_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        BLOCK_SIZE=block_size,
        FP8=fp8,
        **constants,
        num_warps=_warps(head_dim),
        enable_fp_fusion=False,
    )


def _constants(head_dim: int, rotary_dim: int) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "ROTARY": rotary_dim,
        "HEADS": _HEADS,
        "HALF": triton.next_power_of_2(rotary_dim // 2),
        "REST": triton.next_power_of_2(head_dim - rotary_dim) if rotary_dim < head_dim else 0,
        "WIDE": triton.next_power_of_2(head_dim),
    }


def _warps(head_dim: int) -> int:
    """Of the shape of a head alone: the order of a norm's sums goes by it."""
    return int(max(1, min(4, triton.next_power_of_2(head_dim) * _HEADS // 512)))


def compile_cases(capability: int) -> list[CompileCase]:
    """Plain, with head norms, with partial rotary, and into an e4m3 cache."""
    cases = []
    for q_heads, kv_heads, head_dim, rotary, norm, fp8 in (
        (32, 8, 128, 128, False, False),
        (16, 8, 128, 128, True, False),
        (16, 8, 128, 128, True, True),
        (32, 8, 96, 64, True, False),
        (8, 4, 256, 256, False, True),
    ):
        arguments = {
            "qkv_ptr": "*bf16",
            "cache_ptr": "*u8" if fp8 else "*bf16",
            "positions_ptr": "*i32",
            "slots_ptr": "*i32",
            "cos_sin_ptr": "*fp32",
            "q_norm_ptr": "*fp32",
            "k_norm_ptr": "*fp32",
            "eps": "fp32",
        }
        constants = {
            "Q_HEADS": q_heads,
            "KV_HEADS": kv_heads,
            "Q_NORM": norm,
            "K_NORM": norm,
            "BLOCK_SIZE": 16,
            "FP8": fp8,
            **_constants(head_dim, rotary),
        }
        cases.append(CompileCase(_rope_and_cache_kernel, arguments, constants, num_warps=_warps(head_dim)))
    return cases
