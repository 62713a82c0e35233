"""What sampling costs on a GPU by what its rows ask for: `python benches/gpu/sample_rows.py [--rows 1 32 256]`.

Prints a table of microseconds: the four launches in one CUDA graph, and `constrain` alone in another. Before a kind is
timed, some of its rows are compared with the plain reference.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from octavo._core import NUM_ARENAS, PARAM_LEN
from octavo.kernels.sample import SampleWorkspace, sample
from octavo.kernels.sample_constrain import constrain
from octavo.runner.interface import mask_words

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import reference_kernels as reference

_COMPARED = 6
_MAX_LOGPROBS = 20
_NUM_BIASES = 1024

# Of a row: temperature, top_p, min_p, top_k, log probabilities (-1 for none), share of tokens that a mask allows (None
# for no mask), whether there are biases. All but the last two as in the published table.
KINDS: dict[str, tuple[float, float, float, int, int, float | None, bool]] = {
    "greedy": (0.0, 1.0, 0.0, 0, -1, None, False),
    "temperature 0.8": (0.8, 1.0, 0.0, 0, -1, None, False),
    "top_k 50, top_p 0.95": (0.8, 0.95, 0.0, 50, -1, None, False),
    "top_p 0.95": (0.8, 0.95, 0.0, 0, -1, None, False),
    "min_p 0.05": (0.8, 1.0, 0.05, 0, -1, None, False),
    "greedy, 5 log probabilities": (0.0, 1.0, 0.0, 0, 5, None, False),
    "greedy, masks of few tokens": (0.0, 1.0, 0.0, 0, -1, 0.001, False),
    "greedy, masks of half": (0.0, 1.0, 0.0, 0, -1, 0.5, False),
    "greedy, masks of nearly all": (0.0, 1.0, 0.0, 0, -1, 0.999, False),
    f"greedy, {_NUM_BIASES} biases in all": (0.0, 1.0, 0.0, 0, -1, None, True),
    "temperature 0.8, masks of few tokens": (0.8, 1.0, 0.0, 0, -1, 0.001, False),
}


class Rows:
    """Rows of one kind, with all that the launches take. Logits are peaked as a model's: normal, 3 wide."""

    def __init__(self, kind: str, rows: int, vocab_size: int, device: torch.device) -> None:
        self.temperature, self.top_p, self.min_p, self.top_k, logprobs, self.share, self.biased = KINDS[kind]
        self.device, self.rows, self.vocab_size = device, rows, vocab_size
        generator = torch.Generator().manual_seed(rows)
        self.given = torch.randn(rows, vocab_size, generator=generator) * 3
        self.logits = self.given.clone().to(device)
        floats = struct.unpack("<6i", struct.pack("<6f", self.temperature, self.top_p, self.min_p, 1.0, 0.0, 0.0))
        words = [*floats, self.top_k, 7, 0, 0, 2 * (logprobs >= 0), max(logprobs, 0)]
        self.params = self._ints([words + [0] * (PARAM_LEN - len(words))] * rows)
        self.order = torch.arange(rows, dtype=torch.int32, device=device)
        self.counts, self.turn = self._ints([0] * 16), self._ints([0])
        self.counts[3] = rows
        shape = (NUM_ARENAS, rows, mask_words(vocab_size))
        self.masks = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        if self.share is not None:
            self.counts[12] = rows
            bits = torch.rand(rows, 32 * shape[2], generator=generator) < self.share
            bits[:, 5] = True
            words32 = np.packbits(bits.numpy(), axis=1, bitorder="little").view(np.int32)
            self.masks[0] = torch.from_numpy(words32)
        bias = torch.arange(_NUM_BIASES if self.biased else 0, dtype=torch.int32)
        self.counts[7] = len(bias)
        self.bias_logits, self.bias_tokens = (bias % rows).to(device), (bias * 37 % vocab_size).to(device)
        self.bias_values = torch.full((len(bias),), 4.0).view(torch.int32).to(device)
        self.ids, self.last = torch.zeros_like(self.order), torch.zeros_like(self.order)
        self.logprobs = torch.zeros(rows, device=device)
        self.top_ids = torch.zeros(rows, _MAX_LOGPROBS, dtype=torch.int32, device=device)
        self.top_logprobs = torch.zeros(rows, _MAX_LOGPROBS, device=device)
        self.workspace = SampleWorkspace(rows, vocab_size, _MAX_LOGPROBS, device)

    def _ints(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def constrain(self) -> None:
        """The first launch. Repeated, biases add up."""
        constrain(
            self.logits,
            self.counts,
            self.turn,
            self.order,
            self.masks,
            self.bias_logits,
            self.bias_tokens,
            self.bias_values,
            rows=self.rows,
        )

    def sample(self) -> None:
        """All four launches."""
        self.constrain()
        sample(
            self.logits,
            self.counts,
            self.order,
            self.order,
            self.order,
            self.params,
            None,
            self.last,
            self.ids,
            self.logprobs,
            self.top_ids,
            self.top_logprobs,
            self.workspace,
            rows=self.rows,
        )

    def compare(self) -> int:
        """How many of the first rows' tokens are not the reference's, after one step."""
        self.sample()
        wrong = 0
        tokens = zip(self.bias_logits.tolist(), self.bias_tokens.tolist(), strict=True)
        masks = {} if self.share is None else dict(enumerate(self.masks[0]))
        held = reference.constrain(self.given, masks, [(row, token, 4.0) for row, token in tokens])
        for row, token in enumerate(self.ids[:_COMPARED].tolist()):
            wrong += token != reference.sample(
                held[row],
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=7,
                position=row + 1,
            )
        return wrong


def microseconds(call: Callable[[], None], repeats: int) -> float:
    """Of a replay of the calls' graph, the median."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def main() -> None:
    """Print the table; on a machine without a GPU, with TRITON_INTERPRET=1, only compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"| rows' parameters | {' | '.join(f'{rows} rows' for rows in arguments.rows)} | wrong tokens |")
    print("|---" * (len(arguments.rows) + 2) + "|")
    for kind in KINDS:
        cells, wrong = [], 0
        for count in arguments.rows:
            rows = Rows(kind, count, arguments.vocab_size, device)
            wrong += rows.compare()
            times = [math.nan, math.nan]
            if device.type == "cuda":
                times = [microseconds(call, arguments.repeats) for call in (rows.sample, rows.constrain)]
            cells.append(f"{times[0]:.1f} ({times[1]:.1f})")
        print(f"| {kind} | {' | '.join(cells)} | {wrong} |", flush=True)


if __name__ == "__main__":
    main()
