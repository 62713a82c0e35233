"""vLLM on W1, W2 and W3; one JSON object on the last line.

usage: python vllm_offline.py FOLDER RUNS
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median

os.environ |= {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")


def main() -> None:
    started = time.perf_counter()
    import vllm
    from draw import demo_workloads

    draw = demo_workloads()
    model, runs = sys.argv[1], int(sys.argv[2])
    limits = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    llm = vllm.LLM(model=model, dtype="bfloat16", enable_prefix_caching=True, disable_log_stats=True, **limits)

    def seconds(requests: list[tuple[list[int], int]], output: int | None = None) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        lengths = [output or asked for _, asked in requests]
        params = [vllm.SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True) for n in lengths]
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - begun
        assert [len(one.outputs[0].token_ids) for one in outputs] == lengths
        return taken

    seconds(draw("W2", 99), 8)
    figures = {"engine": f"vllm {vllm.__version__}", "ready_s": round(time.perf_counter() - started, 1)}
    for name in ("W1", "W3"):
        requests = [draw(name, repeat) for repeat in range(runs)]
        output = sum(asked for _, asked in requests[0])
        figures[f"{name} output tok/s"] = round(output / median(seconds(one) for one in requests), 1)
    first = median(seconds(draw("W2", 50 + repeat), 1) for repeat in range(runs))
    whole = median(seconds(draw("W2", repeat)) for repeat in range(runs))
    figures |= {"W2 TTFT ms": round(first * 1e3, 1), "W2 TPOT ms": round((whole - first) / 127 * 1e3, 2)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
