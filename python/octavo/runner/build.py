"""From settings and a model's files to a runner that is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo import _core
from octavo.errors import ConfigError, NotEnoughMemory
from octavo.layers.cpu import MLP_ROWS, check_kernels
from octavo.loading.config import ModelConfig, load_model_config
from octavo.loading.progress import Progress
from octavo.models.registry import decoder_spec
from octavo.runner.host import free_memory
from octavo.runner.interface import ModelInfo
from octavo.runner.memory import MemoryPlan, plan_memory

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.layers.weights import Weights
    from octavo.loading.resolve import ModelSource
    from octavo.runner.runner import ModelRunner

__all__ = ["build_runner", "plan_model", "resolve_device", "resolve_dtype"]


def resolve_device(config: EngineConfig) -> str:
    """The device the settings name.

    Raises:
        ConfigError: one that Octavo cannot use yet.
    """
    if config.device == "cuda":
        raise ConfigError("device: `cuda` is not supported by this version, which runs on CPUs only; use `cpu`")
    return "cpu"


def resolve_dtype(config: EngineConfig) -> str:
    """The dtype of weights, activations and KV cache.

    Raises:
        ConfigError: float16, which CPUs compute too slowly to be of use.
    """
    if config.dtype == "auto":
        return "bfloat16" if _core.cpu_info()["bf16_native"] else "float32"
    if config.dtype == "float16":
        raise ConfigError("dtype: `float16` is not supported on a CPU; use `bfloat16` or `float32`")
    return config.dtype


def plan_model(config: EngineConfig, source: ModelSource) -> MemoryPlan:
    """What the model would take, from its files' headers alone; imports no torch.

    Raises:
        ModelError, ConfigError, NotEnoughMemory: as `build_runner`, as far as they show without loading.
    """
    return _plan(config, source, load_model_config(source))


def _plan(config: EngineConfig, source: ModelSource, model: ModelConfig) -> MemoryPlan:
    resolve_device(config)
    spec = decoder_spec(model)
    check_kernels(spec)
    return plan_memory(
        config,
        spec,
        name=source.name,
        dtype=resolve_dtype(config),
        free_bytes=free_memory(),
        mlp_rows=MLP_ROWS,
    )


def build_runner(
    config: EngineConfig, source: ModelSource, progress: Progress | None = None
) -> tuple[ModelRunner, ModelInfo]:
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
    plan = _plan(config, source, model)
    from octavo.layers.cpu import CpuOperations
    from octavo.layers.decoder import Decoder
    from octavo.layers.load import load_weights
    from octavo.runner.runner import ModelRunner
    from octavo.runner.sampler import CpuSampler

    if config.num_threads is not None:
        _core.cpu_set_num_threads(config.num_threads)
    spec = decoder_spec(model)
    operations = CpuOperations(spec, plan.dtype, config.block_size)
    try:
        # Before the weights, so that its pages are made resident while they load.
        cache = operations.kv_cache(plan.num_blocks, config.block_size)
        weights = load_weights(
            spec,
            _open(config, source, model),
            operations,
            num_positions=plan.max_model_len,
            progress=progress,
        )
        decoder = Decoder(
            spec,
            weights,
            operations,
            max_tokens=config.max_num_batched_tokens,
            head_rows=plan.head_rows,
        )
    except MemoryError as error:
        raise NotEnoughMemory(f"{plan.model}: memory ran out while loading.\n{plan.render()}") from error
    info = ModelInfo(
        name=source.name,
        architecture=spec.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=spec.vocab_size,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        dtype=plan.dtype,
        device="cpu",
        weights_bytes=weights.num_bytes,
        kv_bytes=cache.num_bytes,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults={**source.sampling_defaults, **model.sampling_defaults},
    )
    return ModelRunner(decoder, cache, CpuSampler(), info, config.max_num_seqs), info


def _open(config: EngineConfig, source: ModelSource, model: ModelConfig) -> Weights:
    if config.load_format == "dummy":
        from octavo.layers.dummy import DummyWeights

        return DummyWeights(decoder_spec(model), config.seed)
    from octavo.loading.weights import open_weights

    weights = open_weights(source)
    weights.prefetch()
    return weights
