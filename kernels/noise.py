"""Gumbel noise as a hash of (seed, sample index, position, token), with the integer bits of `reference.noise_bits`.

The logarithms are worked out in float32: they may differ from the reference in the last bits, yet a token's noise is
the same in any batch and any launch.
"""

import triton
import triton.language as tl

__all__ = ["gumbel", "gumbel_bound", "noise_bits", "noise_keys"]


@triton.jit
def _mix(h):
    """The finalizer of MurmurHash3 (Appleby, public domain) on uint32."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _absorb(key, word):
    return _mix(key ^ word) * 5 + 0xE6546B64


@triton.jit
def noise_keys(seed_low, seed_high, sample_index, position):
    """Two uint32 keys of one place of one answer, from int32 words."""
    seed_low = seed_low.to(tl.uint32, bitcast=True)
    seed_high = seed_high.to(tl.uint32, bitcast=True)
    sample_index = sample_index.to(tl.uint32, bitcast=True)
    position = position.to(tl.uint32, bitcast=True)
    first = _absorb(_absorb(_absorb(_absorb(0x243F6A88, seed_low), seed_high), sample_index), position)
    second = _absorb(_absorb(_absorb(_absorb(0x85A308D3, seed_low), seed_high), sample_index), position)
    return first, second


@triton.jit
def noise_bits(token_ids, first, second):
    """The 32 random bits, uint32, of int32 token ids at the place that has these keys."""
    return _mix(_mix(token_ids.to(tl.uint32, bitcast=True) ^ first) + second)


@triton.jit
def _rest(bits):
    """1 - u, float32, where u = (bits + 1/2) / 2^32."""
    return ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def gumbel_bound(bits):
    """No less than the noise of random bits uint32, without a logarithm; where it is above 1.4, by 0.2 at most.

    -ln(-ln(u)) <= -ln(1 - u), and a float's own bits, read as a whole number, are a lower bound of its log2.
    """
    return tl.fma(_rest(bits).to(tl.int32, bitcast=True).to(tl.float32), -8.262958294867817e-08, 88.0306)


@triton.jit
def gumbel(bits):
    """Noise float32 of random bits uint32: -ln(-ln(u)), u = (bits + 1/2) / 2^32."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = _rest(bits)
    # -ln(1 - rest) / rest up to a quarter, fitted at Chebyshev points to 2.4e-9: u near 1 decides who wins, and there
    # a float32 u has too few bits for a logarithm.
    series = tl.fma(rest, 0.33390907312122525, 0.08952038746177837)
    series = tl.fma(series, rest, 0.21425246258664918)
    series = tl.fma(series, rest, 0.24869018847166058)
    series = tl.fma(series, rest, 0.33338975474901883)
    series = tl.fma(series, rest, 0.4999990968916319)
    series = tl.fma(series, rest, 1.000000002346469)
    exponential = tl.where(rest < 0.25, rest * series, tl.log2(u) * -0.6931471805599453)
    return tl.log2(exponential) * -0.6931471805599453
