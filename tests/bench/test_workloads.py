"""The draws are fixed for ever: these digests were taken from the published definition of the workloads."""

from __future__ import annotations

import hashlib
import json

import pytest
from octavo.bench import workloads

DIGESTS = {
    "offline 0": "6faacac81dbd98ac",
    "short 0": "2bab4dbc0b51f875",
    "shared 0": "172cb95c1033e0fd",
    "latency 1 1 0": "4076c7fc926f88fd",
    "latency 8 129 0": "b9f6b1d9c55c1a40",
    "latency 32 129 0": "131d55c90b0fd6ab",
    "prefill 512 0": "c77143da3ba33378",
    "prefill 8192 0": "37088e6eeb9ffe04",
    "W1 0": "1373a00f4b5d6571",
    "W2 0": "d41f18d28fe59236",
    "W3 0": "047d2d6b713af83a",
    "W4 0": "6c8cc41614128a3a",
    "offline 3": "15ab7b53cc3f42e4",
    "short 3": "007a57b8059490d6",
    "shared 3": "f06d41ff53567648",
    "latency 1 1 3": "fc01531938a43355",
    "latency 8 129 3": "633b3cf442757fa2",
    "latency 32 129 3": "1704387dd2e84c53",
    "prefill 512 3": "0b8f62180d3b088b",
    "prefill 8192 3": "95062c5233a481b7",
    "W1 3": "08de1b1cea737777",
    "W2 3": "8db445ec0b28a427",
    "W3 3": "03aac2cd808ad21b",
    "W4 3": "d944d1ec35b39979",
}


@pytest.mark.parametrize("key", DIGESTS)
def test_draws_are_the_published_ones(key: str) -> None:
    name, *numbers = key.split()
    arguments = [int(number) for number in numbers]
    drawn = workloads.demo(name, *arguments) if name.startswith("W") else getattr(workloads, name)(*arguments)
    assert hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16] == DIGESTS[key]


def test_repeats_keep_lengths_and_change_tokens() -> None:
    first, second = workloads.demo("W1", 0), workloads.demo("W1", 1)
    assert [(len(prompt), output) for prompt, output in first] == [(len(prompt), output) for prompt, output in second]
    assert all(a[0] != b[0] for a, b in zip(first, second, strict=True))


def test_unknown_demo_workload() -> None:
    with pytest.raises(KeyError):
        workloads.demo("W5")
