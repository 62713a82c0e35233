"""From settings and a model's files to a runner that is ready."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from octavo import _core
from octavo.errors import ConfigError, NotEnoughMemory
from octavo.layers.backends.cpu import MLP_ROWS, check_kernels
from octavo.loading.model_config import ModelConfig
from octavo.loading.model_files import load_model_config
from octavo.loading.progress import Progress
from octavo.models.registry import build_decoder
from octavo.runner.device import find_gpu, resolve_device, resolve_dtype, why_cpu
from octavo.runner.host import free_memory
from octavo.runner.interface import ModelInfo, Runner
from octavo.runner.memory import MemoryPlan, cpu_needs, plan_memory

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.layers.decoder import Decoder
    from octavo.layers.parameter import Weights
    from octavo.loading.resolve import ModelSource

__all__ = ["build_runner", "plan_model"]

_KEPT_BLOCKS = 0.9
"""Share of the KV cache's blocks that must remain with more sequences."""


def plan_model(config: EngineConfig, source: ModelSource) -> MemoryPlan:
    """The memory plan of a model, from its files' headers alone. For a CPU it imports no torch.

    Raises:
        ModelError, ConfigError, NotEnoughMemory: as `build_runner`, as far as they show without loading.
    """
    if source.kind == "fake":
        raise ConfigError("load_format: a fake model takes no memory that could be planned; use `auto` or `dummy`")
    return _plan(config, source, _decoder(config, source, load_model_config(source))[0])


def _decoder(config: EngineConfig, source: ModelSource, model: ModelConfig) -> tuple[Decoder, Callable[[], Weights]]:
    """The model without weights, and what opens them.

    A folder may hold a head against its configuration, which is then used. A GGUF file cannot contradict itself.
    """
    decoder = build_decoder(model)
    if not decoder.head.tied or config.load_format == "dummy" or source.kind != "folder":
        return decoder, functools.partial(_open, config, source, decoder)
    weights = _open(config, source, decoder)
    decoder.head.untie(weights)
    return decoder, lambda: weights


def _plan(config: EngineConfig, source: ModelSource, decoder: Decoder) -> MemoryPlan:
    """The plan for the most sequences that cost little of the KV cache; see `EngineConfig.max_num_seqs`."""
    device = resolve_device(config)
    if device == "cuda":
        from octavo.runner.cuda_build import cuda_needs

        needs, free_bytes = functools.partial(cuda_needs, config, decoder), find_gpu().free_bytes
    else:
        if config.kv_cache_dtype != "auto":
            raise ConfigError(
                f"kv_cache_dtype: `{config.kv_cache_dtype}` is not supported on a CPU; use `auto`{why_cpu(config)}"
            )
        check_kernels(decoder)
        needs, free_bytes = functools.partial(cpu_needs, MLP_ROWS), free_memory()
    dtype = resolve_dtype(config, device)

    def plan(count: int) -> MemoryPlan:
        return plan_memory(config, decoder, name=source.name, dtype=dtype, free_bytes=free_bytes, needs=needs(count))

    *larger, least = config.sequence_counts(device)
    usual = plan(least)
    for count in larger:
        with contextlib.suppress(NotEnoughMemory):
            found = plan(count)
            if found.max_model_len == usual.max_model_len and found.num_blocks >= _KEPT_BLOCKS * usual.num_blocks:
                return found
    return usual


def build_runner(
    config: EngineConfig, source: ModelSource, progress: Progress | None = None
) -> tuple[Runner, ModelInfo]:
    """Plan the memory, load the weights and make the runner. On a CPU nothing of it needs torch.

    Args:
        config: the settings.
        source: the model's files.
        progress: told of the loading.

    Raises:
        ModelError: files that are missing, corrupt, unsupported or contradictory.
        ConfigError: settings that cannot work here.
        NotEnoughMemory: with the figures.
    """
    model = load_model_config(source)
    decoder, open_weights = _decoder(config, source, model)
    plan = _plan(config, source, decoder)
    info = ModelInfo(
        name=source.name,
        architecture=decoder.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=decoder.vocab_size,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_num_seqs=plan.max_num_seqs,
        dtype=plan.dtype,
        device=plan.device,
        weights_bytes=plan.weights_bytes,
        kv_bytes=plan.kv_bytes,
        cache_windows=decoder.cache_layout.windows,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults={**source.sampling_defaults, **model.sampling_defaults},
    )
    build = _build_cpu_runner
    if plan.device == "cuda":
        from octavo.runner.cuda_build import build_cuda_runner as build
    try:
        runner = build(config, decoder, plan, info, open_weights, progress)
    except MemoryError as error:
        raise NotEnoughMemory(f"{plan.model}: memory ran out while loading.\n{plan.render()}") from error
    return runner, runner.info


def _build_cpu_runner(
    config: EngineConfig,
    decoder: Decoder,
    plan: MemoryPlan,
    info: ModelInfo,
    open_weights: Callable[[], Weights],
    progress: Progress | None,
) -> Runner:
    from octavo.layers.backends.cpu import CpuBackend
    from octavo.runner.runner import ModelRunner
    from octavo.runner.sampler import CpuSampler

    if config.num_threads is not None:
        _core.cpu_set_num_threads(config.num_threads)
    backend = CpuBackend(plan.dtype, config.block_size)
    # Before the weights, so that its pages are made resident while they load.
    cache = backend.kv_cache(decoder.cache_layout, plan.num_blocks, config.block_size)
    decoder.load(open_weights(), backend, num_positions=plan.max_model_len, progress=progress)
    decoder.bind(plan.max_num_batched_tokens, plan.head_rows)
    info = msgspec.structs.replace(info, weights_bytes=decoder.num_bytes, kv_bytes=cache.num_bytes)
    return ModelRunner(decoder, cache, CpuSampler(), info, plan.max_num_seqs)


def _open(config: EngineConfig, source: ModelSource, decoder: Decoder) -> Weights:
    if config.load_format == "dummy":
        from octavo.layers.dummy_weights import DummyWeights

        return DummyWeights(decoder.parameters(), config.seed)
    from octavo.loading.model_files import open_weights

    # A tied head may still lie in the files: it has a name there.
    tensors = [*decoder.parameters(), *decoder.head.own.parameters()]
    return open_weights(source, tensors, decoder.prefixes)
