"""A histogram of the tokens of steps, as plain numbers."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["STEP_TOKEN_BOUNDS", "StepSizes"]

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper ends of the buckets; those of vLLM."""


class StepSizes:
    """Counts steps by their tokens."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._total = 0

    def add(self, num_tokens: int) -> None:
        """Count a step."""
        self._counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        self._total += num_tokens

    def stats(self) -> dict[str, int | float]:
        """`step_tokens`, all tokens; `step_tokens_BOUND`, steps of one bucket, and `step_tokens_more`."""
        names = (*map(str, STEP_TOKEN_BOUNDS), "more")
        counts: dict[str, int | float] = {
            f"step_tokens_{name}": count for name, count in zip(names, self._counts, strict=True)
        }
        return {"step_tokens": self._total, **counts}
