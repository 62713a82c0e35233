"""What test_launches.py runs in a process of its own, where Triton compiles: prints how often each kernel is made."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import torch
import triton
from octavo.config import EngineConfig
from octavo.kernels.launch import compile_only
from octavo.layers.spec import DecoderSpec, RotarySpec
from octavo.runner.cuda_build import compile_steps, cuda_needs, launch_steps
from octavo.runner.memory import plan_memory
from offline_driver import compile_for
from triton import knobs

SPEC = DecoderSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=5000,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-6,
    rotary=RotarySpec(dim=64, max_position=4096),
    windows=(0, 512, 0, 512),
    attention_scale=0.125,
    qk_norm=True,
    tied_embeddings=True,
)


class NoCompiler(Executor):
    """Takes compilations for done."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn)
        return future


def main(capability: int, windows: tuple[int, ...]) -> None:
    spec = dataclasses.replace(SPEC, windows=windows)
    compile_for(capability)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        major=capability // 10, minor=capability % 10, multi_processor_count=100
    )
    config = EngineConfig(model="m", max_num_seqs=48, max_num_batched_tokens=1024, max_model_len=2048, num_blocks=200)
    plan = plan_memory(config, spec, name="m", dtype="bfloat16", free_bytes=8 << 30, needs=cuda_needs(config, spec))
    made: Counter[str] = Counter()

    def count(**known: Any) -> None:
        made[known["fn"].jit_function.__name__] += 1

    knobs.runtime.jit_post_compile_hook = count
    with triton.AsyncCompileMode(NoCompiler()), compile_only():
        compile_steps(config, spec, plan)
    ahead = made.copy()
    with triton.AsyncCompileMode(NoCompiler()), compile_only():
        # All layers, as service launches them.
        launch_steps(config, spec, plan, torch.device("meta"))
    sys.stdout.write(json.dumps({"ahead": ahead, "missed": made - ahead}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(json.loads(sys.argv[2])))
