"""transformers, one request after another; W2, and the first eight requests of W1. One JSON object on the last line.

usage: python transformers_generate.py FOLDER RUNS
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median

os.environ |= {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    started = time.perf_counter()
    import torch
    import transformers
    from draw import demo_workloads

    draw = demo_workloads()
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    runs = int(sys.argv[2])

    def seconds(requests: list[tuple[list[int], int]], output: int | None = None) -> float:
        begun = time.perf_counter()
        for prompt, asked in requests:
            ids, count = torch.tensor([prompt]), output or asked
            with torch.inference_mode():
                made = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=2)
            assert made.shape[1] == len(prompt) + count
        return time.perf_counter() - begun

    seconds(draw("W2", 99), 8)
    figures = {"engine": f"transformers {transformers.__version__}", "ready_s": round(time.perf_counter() - started, 1)}
    some = draw("W1", 0)[:8]
    figures["W1 output tok/s"] = round(sum(asked for _, asked in some) / seconds(some), 1)
    first = median(seconds(draw("W2", 50 + repeat), 1) for repeat in range(runs))
    whole = median(seconds(draw("W2", repeat)) for repeat in range(runs))
    figures |= {"W2 TTFT ms": round(first * 1e3, 1), "W2 TPOT ms": round((whole - first) / 127 * 1e3, 2)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
