"""KV cache of each layer, and how layers share its blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

__all__ = ["KvCacheLayout", "KvCacheSpec"]


@dataclasses.dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """KV cache of a layer for each token.

    Attributes:
        num_kv_heads: heads of keys, and of values.
        head_dim: channels of a head.
        window: tokens that a query can see, itself included; 0 for all before it.
    """

    num_kv_heads: int
    head_dim: int
    window: int = 0

    def bytes_per_token(self, itemsize: int) -> int:
        """Keys and values of one token."""
        return 2 * self.num_kv_heads * self.head_dim * itemsize

    def block_shape(self, block_size: int) -> tuple[int, int, int, int]:
        """[keys and values, heads, tokens, channels] of one block of this layer."""
        return 2, self.num_kv_heads, block_size, self.head_dim


@dataclasses.dataclass(frozen=True)
class KvCacheLayout:
    """Division of a model's layers into cache groups that share blocks.

    Layers with one window form cache groups of at most `layers_per_block` layers. A sequence has a block table for each
    group, and a block holds `block_size` tokens of all layers of one group. All groups draw from one pool, so memory
    moves freely between layers that keep everything and layers that keep a window.

    Attributes:
        spec: of one layer; all layers of a model have blocks of one shape.
        layers_per_block: layers whose keys and values one block holds.
        windows: of each group; 0 for full attention.
        places: (group, index within the block) of each layer.
    """

    spec: KvCacheSpec
    layers_per_block: int
    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, specs: Sequence[KvCacheSpec]) -> KvCacheLayout:
        """The layout of a model's layers.

        A block holds as many layers as the smallest set of layers with one window has, or fewer where that would leave
        more of the blocks empty.

        Raises:
            ValueError: blocks of different shapes.
        """
        first = specs[0]
        if any((spec.num_kv_heads, spec.head_dim) != (first.num_kv_heads, first.head_dim) for spec in specs):
            raise ValueError("all layers of a model need KV blocks of one shape")
        layers: dict[int, list[int]] = {}
        for layer, spec in enumerate(specs):
            layers.setdefault(spec.window, []).append(layer)
        counts = [len(members) for members in layers.values()]
        # Fewest padded layers; among equals the largest block, which needs the fewest tables.
        size = min(range(1, min(counts) + 1), key=lambda size: (_padded(counts, size), -size))
        if _padded(counts, min(counts)) * 8 <= sum(counts) * 9:
            size = min(counts)
        windows: list[int] = []
        places = [(0, 0)] * len(specs)
        for window in sorted(layers):
            for index, layer in enumerate(layers[window]):
                if index % size == 0:
                    windows.append(window)
                places[layer] = (len(windows) - 1, index % size)
        return cls(first, size, tuple(windows), tuple(places))

    def block_bytes(self, block_size: int, itemsize: int) -> int:
        """One block, all layers in it."""
        return self.layers_per_block * block_size * self.spec.bytes_per_token(itemsize)

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """The whole cache: [layers_per_block, num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return self.layers_per_block, num_blocks, *self.spec.block_shape(block_size)


def _padded(counts: Sequence[int], size: int) -> int:
    """Layers that blocks of `size` layers have room for."""
    return sum(-(-count // size) * size for count in counts)
