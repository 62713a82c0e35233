"""What test_compiled_ahead.py runs in a process of its own: prints the kernels on the disk, before and after."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from octavo import LLM, SamplingParams


def kernels() -> int:
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))


def modules() -> list[str]:
    """What takes long to import and nothing needs."""
    heavy = ("transformers", "torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor")
    return [name for name in heavy if name in sys.modules]


def main(model: str) -> dict[str, object]:
    with LLM(model, device="cuda", load_format="dummy", max_num_seqs=128, max_model_len=4096, num_blocks=4096) as llm:
        before = kernels()
        plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        for batch in (1, 2, 7, 40, 128):
            llm.generate([[3 + i, 5, 7, 11] * (1 + i % 90) for i in range(batch)], plain, use_tqdm=False)
        llm.generate([list(range(3000))], plain, use_tqdm=False)
        shared = list(range(1000, 2500))
        llm.generate([shared], plain, use_tqdm=False)
        llm.generate([[*shared, i] for i in range(24)], plain, use_tqdm=False)
        varied = [
            SamplingParams(temperature=1.0, top_p=0.8, max_tokens=9, seed=1, ignore_eos=True),
            SamplingParams(temperature=0.7, top_k=5, min_p=0.01, max_tokens=9, logprobs=5, ignore_eos=True),
            SamplingParams(presence_penalty=0.5, repetition_penalty=1.1, max_tokens=9, ignore_eos=True),
            SamplingParams(temperature=1.0, n=3, max_tokens=9, ignore_eos=True),
            SamplingParams(temperature=0.0, min_tokens=4, max_tokens=9),
        ]
        llm.generate([[i + 1] * 33 for i in range(len(varied))], varied, use_tqdm=False)
        return {"before": before, "after": kernels(), "imported": modules()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])) + "\n")
