"""What test_launches.py runs in a process of its own, where Triton compiles: prints how often each kernel is made."""

from __future__ import annotations

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
from octavo.layers.decoder import Decoder
from octavo.loading.model_config import config_from_json
from octavo.models.registry import build_decoder
from octavo.runner.cuda_build import cuda_needs, launch_steps
from octavo.runner.memory import plan_memory
from offline_driver import compile_for
from triton import knobs

KEYS: dict[str, Any] = {
    "vocab_size": 5000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 512,
}


def decoder_of(architecture: str, windows: tuple[int, ...]) -> Decoder:
    """A decoder whose layers slide where a window is given."""
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    raw = {"architectures": [architecture], **KEYS, "layer_types": types}
    return build_decoder(config_from_json(raw, {}, "config.json"))


class NoCompiler(Executor):
    """Takes compilations for done."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn)
        return future


def main(capability: int, architecture: str, windows: tuple[int, ...]) -> None:
    decoder = decoder_of(architecture, windows)
    compile_for(capability)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        major=capability // 10, minor=capability % 10, multi_processor_count=100
    )
    config = EngineConfig(model="m", max_num_seqs=48, max_num_batched_tokens=1024, max_model_len=2048, num_blocks=400)
    plan = plan_memory(
        config,
        decoder,
        name="m",
        dtype="bfloat16",
        free_bytes=8 << 30,
        needs=cuda_needs(config, decoder, config.sequence_counts("cuda")[-1]),
    )
    made: Counter[str] = Counter()

    def count(**known: Any) -> None:
        made[known["fn"].jit_function.__name__] += 1

    knobs.runtime.jit_post_compile_hook = count
    with triton.AsyncCompileMode(NoCompiler()), compile_only():
        launch_steps(config, decoder.representative(), plan, torch.device("meta"))
    ahead = made.copy()
    with triton.AsyncCompileMode(NoCompiler()), compile_only():
        # All layers, as service launches them.
        launch_steps(config, decoder, plan, torch.device("meta"))
    sys.stdout.write(json.dumps({"ahead": ahead, "missed": made - ahead}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], tuple(json.loads(sys.argv[3])))
