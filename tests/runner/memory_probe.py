"""Run in a process of its own by test_memory_reality: load random weights, fill the cache, say what it took."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from octavo._core import Core
from octavo.config import EngineConfig
from octavo.loading.resolve import resolve_model
from octavo.runner import build_runner, plan_model


def resident() -> int:
    """Bytes of this process in memory, mapped file pages apart."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def main() -> None:
    config = EngineConfig(
        model=sys.argv[1],
        device="cpu",
        load_format="dummy",
        dtype="bfloat16",
        max_num_seqs=16,
        max_num_batched_tokens=512,
        kv_cache_memory=96 << 20,
    )
    source = resolve_model(config.model)
    plan = plan_model(config, source)
    values = {
        "plan_weights": plan.weights_bytes,
        "plan_total": plan.total_bytes,
        "workspace": plan.workspace_bytes,
        "kv": plan.kv_bytes,
        "before": resident(),
    }
    runner, info = build_runner(config, source)
    runner._cache.populator.wait()
    values |= {"built": resident(), "info_weights": info.weights_bytes}
    core = Core(
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.batched_tokens("cpu"),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=[],
    )
    runner.attach(core)
    values["attached"] = resident()
    generator = np.random.default_rng(0)
    length = 400
    # Finished prompts stay cached, so in the end every block has been written.
    for index in range(info.num_blocks * info.block_size // length + 1):
        prompt = generator.integers(0, info.vocab_size, length).astype(np.int32)
        core.submit(index, prompt.tobytes(), arrival_us=index, max_tokens=1, temperature=0.0, logprobs=5)
    while core.has_work():
        step = core.plan()
        assert step is not None
        runner.launch(step).result()
        core.commit(step.step)
    values["full"] = resident()
    values["torch"] = "torch" in sys.modules
    print(json.dumps(values))


if __name__ == "__main__":
    main()
