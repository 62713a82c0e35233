"""Masks and biases of random rows, and what they make of logits, a logit at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from octavo.kernels.sample_constrain import constrain
from torch import Tensor


@dataclass
class Constraints:
    """Masks by row, as int32 words; (row, token, value) of each bias. Rows are counted among all logits of a step."""

    masks: dict[int, Tensor] = field(default_factory=dict)
    biases: list[tuple[int, int, float]] = field(default_factory=list)

    def naive(self, logits: Tensor, first: int = 0) -> Tensor:
        """What they make of a step's rows of logits from `first` on, worked out token by token."""
        changed = logits.numpy().copy()
        for row, words in self.masks.items():
            if not first <= row < first + len(changed):
                continue
            bits = [int(word) & 0xFFFFFFFF for word in words]
            for token in range(changed.shape[1]):
                if not bits[token // 32] >> token % 32 & 1:
                    changed[row - first, token] = -math.inf
        for row, token, value in self.biases:
            if first <= row < first + len(changed):
                logit = changed[row - first, token]
                changed[row - first, token] = -math.inf if value == -math.inf else logit + np.float32(value)
        return torch.from_numpy(changed)

    def apply(self, logits: Tensor, rows: int) -> None:
        """Have the GPU's kernel change the first rows of logits in place; all arrays go on with what is far outside."""
        vocab_size, device = logits.shape[1], logits.device

        def ints(values: list[int]) -> Tensor:
            return torch.tensor([*values, 1 << 24, 1 << 24], dtype=torch.int32, device=device)

        counts = torch.zeros(16, dtype=torch.int32)
        counts[3], counts[7], counts[12] = rows, len(self.biases), len(self.masks)
        shape = (3, len(self.masks) + 1, -(-vocab_size // 32))
        masks = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        for place, words in zip(masks[2], self.masks.values(), strict=False):
            place.copy_(words)
        values = np.array([value for *_, value in self.biases] + [1.0, -math.inf], dtype=np.float32)
        constrain(
            logits,
            counts.to(device),
            torch.tensor([2], dtype=torch.int32, device=device),
            ints(list(self.masks)),
            masks,
            ints([row for row, *_ in self.biases]),
            ints([token for _, token, _ in self.biases]),
            torch.from_numpy(values.view(np.int32)).to(device),
            rows=logits.shape[0],
        )


def mask_of(tokens: list[int], vocab_size: int) -> Tensor:
    """The words of a mask that allows some tokens."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(words.view(np.int32))


def random_constraints(rng: np.random.Generator, rows: int, vocab_size: int) -> Constraints:
    """Masks that leave one token, few, many, all or all but one, in about half of the rows, and biases and bans.

    Bits past the vocabulary are random. Rows come in no order.
    """
    made = Constraints()
    for row in rng.permutation(rows).tolist():
        kind = rng.integers(0, 9)
        if kind >= 5:
            continue
        share = (1 / vocab_size, 0.01, 0.5, 1.0, 1.0 - 1 / vocab_size)[kind]
        tokens = np.flatnonzero(rng.random(32 * -(-vocab_size // 32)) < share).tolist()
        made.masks[row] = mask_of([*tokens, int(rng.integers(0, vocab_size))], 32 * -(-vocab_size // 32))
    for row in rng.permutation(rows)[: rows // 2].tolist():
        for token in rng.choice(vocab_size, min(vocab_size, int(rng.integers(1, 40))), replace=False).tolist():
            value = -math.inf if rng.random() < 0.3 else float(np.float32(rng.uniform(-100, 100)))
            made.biases.append((row, token, value))
    return made
