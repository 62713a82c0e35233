"""Time of Hopper's own attention kernels beside the portable ones, at the shapes of real layers.

    PYTHONPATH=tests/kernels python benches/gpu/attention.py

Prints a table: microseconds of one layer's launch, with bytes a second (decode) or products a second (prompts).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attention_steps import make_step
from octavo.kernels.attention import AttentionShape
from octavo.kernels.attention_decode import decode_attention
from octavo.kernels.attention_decode_tables import decode_config, hopper_decode_config
from octavo.kernels.attention_prefill import prefill_attention
from octavo.kernels.attention_prefill_tables import PrefillConfig, prefill_config

CALLS = 20
SHAPES = {
    "Qwen3 8B": AttentionShape(32, 8, 128, 16, 0.0884),
    "Gemma 2 27B": AttentionShape(32, 16, 128, 16, 0.0833, softcap=50.0),
    "Gemma 2 2B": AttentionShape(8, 4, 256, 16, 0.0625, softcap=50.0),
    "Gemma 3 4B": AttentionShape(8, 4, 256, 16, 0.0625),
    "Gemma 3 1B": AttentionShape(4, 1, 256, 16, 0.0625),
}
BATCHES = ((1, 4096), (64, 2048), (256, 1024))
PROMPT = 8192


def microseconds(call: Callable[[], None]) -> float:
    """Best of 5 replays of a graph with `CALLS` calls."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return min(times)


def decode(name: str, shape: AttentionShape, batch: int, length: int) -> None:
    """One row of the table a launch."""
    step = make_step(shape, [(length, 1)] * batch, torch.bfloat16, torch.device("cuda"))
    num_bytes = 2 * 2 * batch * length * shape.num_kv_heads * shape.head_dim
    own = hopper_decode_config(shape.head_dim, batch)
    configs = {"portable": decode_config(90, shape, batch), f"hopper x{own.hopper_stages}": own}
    for label, config in configs.items():
        work = step.work(on_hopper=config.hopper_stages > 0)
        step.plan(work)
        out = torch.empty(batch, shape.num_heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")

        def call(config=config, work=work, out=out) -> None:  # type: ignore[no-untyped-def]
            decode_attention(
                step.qkv, out, step.cache, step.tables, work, shape, tokens=batch, grouped=False, config=config
            )

        time = microseconds(call)
        print(
            f"{name:12} decode {batch:3} x {length} {label:22} {time:8.1f} us {num_bytes / time / 1e6:6.2f} TB/s",
            flush=True,
        )


def prompt(name: str, shape: AttentionShape, window: int) -> None:
    """One row of the table a launch."""
    step = make_step(shape, [(PROMPT, PROMPT)], torch.bfloat16, torch.device("cuda"))
    usual = prefill_config(90, shape.head_dim)
    portable = PrefillConfig(usual.rows, usual.num_warps, usual.num_stages)
    configs = {"portable": portable} | {
        f"hopper x{stages}": PrefillConfig(128, 8, 2, hopper_stages=stages) for stages in (2, 3)
    }
    seen = window * PROMPT if window else PROMPT * PROMPT / 2
    for label, config in configs.items():
        work = step.work(window, prompt_rows=config.rows)
        step.plan(work, mixed=True)
        out = torch.empty(PROMPT, shape.num_heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")

        def call(config=config, work=work, out=out) -> None:  # type: ignore[no-untyped-def]
            prefill_attention(step.qkv, out, step.cache, step.tables, work, shape, tokens=PROMPT, config=config)

        time = microseconds(call)
        rate = 4 * seen * shape.num_heads * shape.head_dim / time / 1e6
        print(
            f"{name:12} prompt of {PROMPT}, window {window:4} {label:10} {time:8.1f} us {rate:6.1f} TFLOP/s",
            flush=True,
        )


if __name__ == "__main__":
    for name, shape in SHAPES.items():
        for batch, length in BATCHES:
            decode(name, shape, batch, length)
        for window in (0, 1024):
            prompt(name, shape, window)
