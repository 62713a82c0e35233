"""The standard workloads, token by token, so that a figure means the same on every machine and in every engine.

Each function gives (prompt token ids, output tokens) pairs. Lengths never change; `repeat` draws fresh prompts of the
same lengths, so that no repeat finds an earlier one's blocks in a prefix cache. `random.Random` gives the same numbers
on every interpreter. Ids lie in [10, 30000) for the GPU shapes and in [17, 49152) for the demo model (W1 to W4), so no
tokenizer is needed and no control token is drawn.
"""

# ruff: noqa: S311 - reproducible draws, nothing secret

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

__all__ = [
    "DEMO_WORKLOADS",
    "WARM_UP",
    "Request",
    "context",
    "demo",
    "latency",
    "offline",
    "prefill",
    "shared",
    "short",
    "size",
]

Request = tuple[list[int], int]

DEMO_WORKLOADS = ("W1", "W2", "W3", "W4")
# Answered before what is measured; found in no workload.
WARM_UP: Request = (list(range(100, 164)), 8)
_GPU_IDS = (10, 30000)
_DEMO_IDS = (17, 49152)


def _draw(rng: random.Random, count: int, ids: tuple[int, int] = _GPU_IDS) -> list[int]:
    return [rng.randrange(*ids) for _ in range(count)]


def context(requests: Sequence[Request]) -> int:
    """Tokens of prompt and output together of the longest request."""
    return max(len(prompt) + output for prompt, output in requests)


def size(requests: Sequence[Request]) -> str:
    """A description of the workload."""
    prompts, outputs = sum(len(prompt) for prompt, _ in requests), sum(output for _, output in requests)
    return f"{len(requests)} request{'s' * (len(requests) != 1)}, {prompts} + {outputs} tokens"


def offline(repeat: int = 0) -> list[Request]:
    """256 requests, prompt U[100, 1024], output U[100, 1024]."""
    lengths = random.Random(0)
    tokens = random.Random(f"offline {repeat}")
    requests = []
    for _ in range(256):
        prompt_length = lengths.randint(100, 1024)
        requests.append((_draw(tokens, prompt_length), lengths.randint(100, 1024)))
    return requests


def latency(batch: int, output: int, repeat: int = 0) -> list[Request]:
    """`batch` prompts of 1024 tokens, `output` output tokens each."""
    tokens = random.Random(f"latency {batch} {output} {repeat}")
    return [(_draw(tokens, 1024), output) for _ in range(batch)]


def prefill(prompt: int, repeat: int = 0) -> list[Request]:
    """One prompt of `prompt` tokens, one output token."""
    return [(_draw(random.Random(f"prefill {prompt} {repeat}"), prompt), 1)]


def shared(repeat: int = 0) -> tuple[list[int], list[Request]]:
    """A prefix of 4096 tokens to be computed once, then 256 requests of it and 64 own tokens, output 128."""
    tokens = random.Random(f"shared {repeat}")
    prefix = _draw(tokens, 4096)
    return prefix, [(prefix + _draw(tokens, 64), 128) for _ in range(256)]


def short(repeat: int = 0, count: int = 2048) -> list[Request]:
    """`count` requests of 16 prompt tokens and 16 output tokens."""
    tokens = random.Random(f"short {repeat}")
    return [(_draw(tokens, 16), 16) for _ in range(count)]


def _keyed(*key: object) -> random.Random:
    return random.Random(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little"))


def demo(name: str, repeat: int = 0) -> list[Request]:
    """The demo model's workloads on a CPU.

    W1: 64 requests at once, prompt U[64, 512], output U[32, 128]. W2: one request, 128 + 128. W3: 32 requests that
    share 1024 tokens, 32 own, output 32. W4: W1's first 48 lengths, for 8 streaming clients.

    Raises:
        KeyError: any other name.
    """
    lengths, tokens = _keyed(0, "len"), _keyed(0, "tok", name, repeat)
    if name in ("W1", "W4"):
        sizes = [(lengths.randint(64, 512), lengths.randint(32, 128)) for _ in range(64)]
        count = 64 if name == "W1" else 48
        return [(_draw(tokens, prompt, _DEMO_IDS), output) for prompt, output in sizes[:count]]
    if name == "W2":
        return [(_draw(tokens, 128, _DEMO_IDS), 128)]
    if name == "W3":
        prefix = _draw(tokens, 1024, _DEMO_IDS)
        return [(prefix + _draw(tokens, 32, _DEMO_IDS), 32) for _ in range(32)]
    raise KeyError(name)
