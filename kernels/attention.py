"""What the attention kernels share: shape, places in the paged cache, and the arithmetic of one tile and one chunk.

A row's answer must not depend on which kernel computes it, nor on what is computed beside it. So decode, shared-prefix
and prompt kernels walk the keys alike: the absolute positions are cut into chunks of `CHUNK`, these into tiles. A
chunk is a fresh online softmax over its tiles in order (Milakov and Gimelshein, arXiv 1805.02867); chunks are merged
in order. A tile or chunk of which a query sees nothing leaves its sums as they are, bit for bit, so a kernel may visit
more tiles than a row needs. Sums over keys are tensor-core products (that of the weights is one with ones), whose
order no layout changes. Launches turn off the contraction of products and sums: every fused one here is spelled out.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from octavo.errors import ConfigError

__all__ = [
    "CHUNK",
    "HEAD_DIMS",
    "AttentionShape",
    "accumulate",
    "add_values",
    "block_offsets",
    "cap_scores",
    "finish",
    "load_dims",
    "log2_factor",
    "merge_chunk",
    "merge_factors",
    "position_offsets",
    "raise_maximum",
    "row_sum",
    "score_tile",
    "weigh_tile",
    "weights",
]

CHUNK = 256
"""Positions of a chunk. Part of the answer's bits."""

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


@dataclass(frozen=True)
class AttentionShape:
    """What does not change while a model runs.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: one of `HEAD_DIMS`.
        block_size: positions of a cache block, a multiple of 16.
        scale: factor of the scores, above 0.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        kv_fp8: the cache is float8_e4m3fn.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    softcap: float = 0.0
    kv_fp8: bool = False

    def __post_init__(self) -> None:
        """Refuse what the kernels cannot do.

        Raises:
            ConfigError: for such a model or block size.
        """
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads: {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"head_dim: {self.head_dim} has no kernel on a GPU; use a model of one of {HEAD_DIMS}, or `device: cpu`"
            )
        if self.block_size % 16:
            raise ConfigError(f"block_size: {self.block_size} is not a multiple of 16; use 16 or 32")

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tile(self) -> int:
        """Positions of a tile. Part of the answer's bits."""
        return 64 if self.head_dim <= 128 else 32

    @property
    def parts(self) -> tuple[int, int]:
        """Powers of two that hold head_dim together; the second is 0 where the first does."""
        return {64: (64, 0), 80: (64, 16), 96: (64, 32), 192: (128, 64), 256: (256, 0)}.get(self.head_dim, (128, 0))

    @property
    def width(self) -> int:
        """Elements of a token's q, k and v together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@triton.jit
def position_offsets(
    table,
    positions,
    visible,
    kv_head,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Elements from the cache's start to the keys at positions [TILE] of one kv head: int64 [TILE].

    table: pointer to the sequence's int32 block ids. visible: bool [TILE]; what is not gets block 0, to be masked.
    block_stride: elements of a block, keys and values of all heads. Its values lie block_stride / 2 further.
    """
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=visible, other=0)
    return block_offsets(blocks, positions, kv_head, block_stride, BLOCK_SIZE, HEAD_DIM)


@triton.jit
def block_offsets(blocks, positions, kv_head, block_stride, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """As `position_offsets`, of block ids int32 [TILE] already loaded."""
    inside = kv_head * (BLOCK_SIZE * HEAD_DIM) + positions % BLOCK_SIZE * HEAD_DIM
    return blocks.to(tl.int64) * block_stride + inside


@triton.jit
def load_dims(
    base, offsets, visible, DTYPE: tl.constexpr, FIRST: tl.constexpr, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Dimensions FIRST .. FIRST + DIMS of the vectors at base + offsets [N]: DTYPE [N, DIMS], 0 where not visible [N].

    A cache of uint8 holds e4m3 codes, for devices that cannot load the type.
    """
    dims = FIRST + tl.arange(0, DIMS)
    mask = visible[:, None]
    if FIRST + DIMS > HEAD_DIM:
        mask = mask & (dims < HEAD_DIM)[None, :]
    x = tl.load(base + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    if x.dtype == tl.uint8:
        return _decode_e4m3(x, DTYPE)
    return x.to(DTYPE)


@triton.jit
def _decode_e4m3(code, DTYPE: tl.constexpr):
    """The numbers of e4m3 codes, exact for all finite ones: their bits shifted into the wider type, rebiased."""
    wide = code.to(tl.uint16)
    if tl.bfloat16 == DTYPE:
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 4)
        return (bits.to(tl.bfloat16, bitcast=True).to(tl.float32) * 1.329227995784916e36).to(DTYPE)  # 2^120
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DTYPE)


@triton.jit
def log2_factor(scale, SOFTCAP: tl.constexpr):
    """What `score_tile`'s scores are to be multiplied with to be logarithms to base 2."""
    return scale * 0.0 + 1.4426950408889634 if SOFTCAP > 0 else scale * 1.4426950408889634


@triton.jit
def score_tile(q0, q1, k0, k1, scale, D1: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scores [M, TILE] of queries q0 [M, D0], q1 [M, D1] and keys k0 [TILE, D0], k1 [TILE, D1].

    The second parts count where D1 is not 0. `scale` is left to `log2_factor` where there is no softcap.
    """
    s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if D1 > 0:
        s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
    return cap_scores(s, scale, SOFTCAP)


@triton.jit
def cap_scores(s, scale, SOFTCAP: tl.constexpr):
    """Products s of queries and keys, scaled where `log2_factor` leaves the scale out, and capped.

    tanh(x) is 1 - 2 / (exp(2x) + 1), which neither overflows nor turns into NaN.
    """
    if SOFTCAP > 0:
        s = s * scale
        s = SOFTCAP * (1.0 - 2.0 / (tl.exp2(s * (2.0 * 1.4426950408889634 / SOFTCAP)) + 1.0))
    return s


@triton.jit
def weigh_tile(s, m, factor, DTYPE: tl.constexpr):
    """Weights of scores s [M, TILE], -inf where not visible, after scores of at most m [M].

    Returns:
        (p, alpha, m): DTYPE weights [M, TILE], the factor [M] of the sums so far (0 for m of -inf), the new maximum.
    """
    top, finite, alpha = raise_maximum(m, tl.max(s, 1) * factor)
    return weights(s, factor, finite, DTYPE), alpha, top


@triton.jit
def raise_maximum(m, high):
    """The larger of m and high [M], the same with 0 for -inf, and the factor of the sums so far."""
    top = tl.maximum(m, high)
    finite = tl.where(top == float("-inf"), 0.0, top)
    return top, finite, tl.exp2(m - finite)


@triton.jit
def weights(s, factor, finite, DTYPE: tl.constexpr):
    """DTYPE weights of scores s [M, TILE] after the maximum finite [M]."""
    return tl.exp2(tl.fma(s, factor, -finite[:, None])).to(DTYPE)


@triton.jit
def accumulate(p, alpha, v0, v1, total, acc0, acc1, D1: tl.constexpr):
    """The sums of weights and of weighted values times alpha, with a tile's added.

    A sum times 0 is to be a fresh sum's 0, not -0: hence the fused form.
    """
    total = tl.fma(total, alpha[:, None], 0.0)
    acc0 = tl.fma(acc0, alpha[:, None], 0.0)
    if D1 > 0:
        acc1 = tl.fma(acc1, alpha[:, None], 0.0)
    return add_values(p, v0, v1, total, acc0, acc1, D1)


@triton.jit
def add_values(p, v0, v1, total, acc0, acc1, D1: tl.constexpr):
    """The sums with those of weights p [M, N] and of values v0, v1 [N, ...] added: a tile's, or its next part's."""
    ones = tl.full([v0.shape[0], 16], 1.0, v0.dtype)
    total = tl.dot(p, ones, total, input_precision="ieee")
    acc0 = tl.dot(p, v0, acc0, input_precision="ieee")
    if D1 > 0:
        acc1 = tl.dot(p, v1, acc1, input_precision="ieee")
    return total, acc0, acc1


@triton.jit
def row_sum(total):
    """Sum of the weights [M] out of the 16 equal columns that `accumulate` keeps."""
    return tl.max(total, 1)


@triton.jit
def merge_factors(m_all, m):
    """Factors of the merged chunks and of the next, and their new maximum: (new, old factor, next factor), all [M]."""
    top = tl.maximum(m_all, m)
    finite = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(m_all - finite), tl.exp2(m - finite)


@triton.jit
def merge_chunk(merged, old, part, new):
    """The sum merged * old + part * new, of one shape: how the next chunk joins those before it."""
    return tl.fma(merged, old, part * new)


@triton.jit
def finish(acc, total, DTYPE: tl.constexpr):
    """The output [M, D] of merged values acc and weights total [M]."""
    return (acc / total[:, None]).to(DTYPE)
