"""Rows of logits and how they are sampled, for the tests of every sampler."""

import struct
from dataclasses import dataclass

import reference_kernels as reference
import torch
from torch import Tensor


def bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@dataclass
class Row:
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0
    seed: int = 0
    sample_index: int = 0
    position: int = 0
    logprobs: int = -1
    counts: Tensor | None = None

    def words(self) -> list[int]:
        flags = (1 if self.counts is not None else 0) | (2 if self.logprobs >= 0 else 0)
        floats = (self.temperature, self.top_p, self.min_p, self.repetition, self.presence, self.frequency)
        seed = (signed(self.seed & 0xFFFFFFFF), signed(self.seed >> 32))
        return [*map(bits, floats), self.top_k, *seed, self.sample_index, flags, max(self.logprobs, 0), 0, 0, 0, 0]

    def reference(self, logits: Tensor) -> int:
        if self.counts is not None:
            logits = reference.apply_penalties(logits, self.counts, self.repetition, self.presence, self.frequency)
        return reference.sample(
            logits,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            sample_index=self.sample_index,
            position=self.position,
        )


def normal(count: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


SETTINGS = [
    Row(),
    Row(temperature=0.2),
    Row(temperature=5.0),
    Row(temperature=1e-4),
    Row(temperature=1e6),
    Row(top_k=1),
    Row(top_k=40, temperature=1.3),
    Row(top_k=5000),
    Row(top_p=0.1),
    Row(top_p=0.95, temperature=0.7),
    Row(top_p=0.999, temperature=2.0),
    Row(top_p=0.5, temperature=100.0),
    Row(top_k=50, top_p=0.8),
    Row(min_p=0.05),
    Row(min_p=1.0),
    Row(min_p=0.02, top_k=30, top_p=0.9, temperature=1.5),
]
