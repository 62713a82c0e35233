"""Building a runner on a GPU: what it asks for, and its parts."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch

from octavo import _core
from octavo.errors import NotEnoughMemory, UnsupportedModel
from octavo.kernels import sample
from octavo.kernels.attention import CHUNK, AttentionShape
from octavo.kernels.attention_decode import serves_on_hopper
from octavo.kernels.attention_work import AttentionWork, work_bytes
from octavo.kernels.linear import configure_cublas
from octavo.kernels.step import PlanLayout
from octavo.layers.backends.cuda import MLP_ROWS, CudaBackend, attention_shape, check_kernels
from octavo.layers.dummy_weights import DummyWeights
from octavo.runner.cuda import CudaRunner
from octavo.runner.cuda_step import CudaStep
from octavo.runner.device import WHOLE_DEVICE, Gpu, find_gpu
from octavo.runner.graphs import step_sizes
from octavo.runner.interface import ModelInfo
from octavo.runner.kernel_warmup import KernelCompiler
from octavo.runner.memory import DeviceNeeds, MemoryPlan, format_bytes
from octavo.runner.memory_meter import MemoryMeter
from octavo.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.layers.decoder import Decoder
    from octavo.layers.parameter import Weights
    from octavo.loading.progress import Progress

__all__ = ["build_cuda_runner", "cuda_needs", "group_min_blocks", "launch_steps", "make_step"]

_LOG = logging.getLogger(__name__)

RESERVE_BYTES = 600 << 20
"""Loaded kernels, CUDA graphs and libraries' workspaces, at least; the context itself is there before free memory is
measured."""

_LIBRARIES_BYTES = 300 << 20
_LAUNCHES_A_LAYER = 9
_LAUNCH_BYTES = 2 << 10
"""Device memory of one launch in a graph; an estimate that is not measured yet."""

GROUP_MIN_TOKENS = CHUNK
"""Shared first tokens from which on reading them once for all rows is worth an item of its own."""


def cuda_needs(config: EngineConfig, decoder: Decoder, max_num_seqs: int) -> DeviceNeeds:
    """Memory that a GPU needs besides weights, activations and KV cache, for `max_num_seqs` sequences.

    Raises:
        UnsupportedModel: heads that the kernels lack.
    """
    check_kernels(decoder)
    max_tokens = config.batched_tokens("cuda")
    shapes = _attention_shapes(config, decoder)

    def scratch(length: int) -> int:
        attention = [work_bytes(max_num_seqs, length, max_tokens, shape, window) for window, shape in shapes.items()]
        return sum(attention) + sample.workspace_bytes(max_num_seqs, decoder.vocab_size)

    return DeviceNeeds(
        device="cuda",
        max_num_seqs=max_num_seqs,
        process_bytes=_reserve_bytes(len(decoder.blocks), max_num_seqs, max_tokens),
        process="kernels, graphs and libraries",
        mlp_rows=MLP_ROWS,
        head_rows=lambda _vocab_size: max_num_seqs,
        kv_itemsize=None if config.kv_cache_dtype == "auto" else 1,
        work_bytes=scratch,
        # The others, and all masks, are pinned memory of the host.
        num_arenas=1,
        num_mask_arenas=0,
    )


def _attention_shapes(config: EngineConfig, decoder: Decoder) -> dict[int, AttentionShape]:
    """Attention as the kernels know it, by window: layers of one window share their work lists and partial results."""
    shapes: dict[int, AttentionShape] = {}
    for block in decoder.blocks:
        spec = block.attention.spec
        shape = attention_shape(spec, config.block_size, kv_fp8=config.kv_cache_dtype != "auto")
        if shapes.setdefault(spec.window, shape) != shape:
            raise UnsupportedModel(
                f"{decoder.architecture}: layers of one window with different heads are not supported on a GPU; "
                "run the model with `device: cpu`"
            )
    return dict(sorted(shapes.items()))


def _reserve_bytes(num_layers: int, max_num_seqs: int, max_tokens: int) -> int:
    """`RESERVE_BYTES`, or more where many sizes of step and many layers make for many launches in graphs."""
    launches = len(step_sizes(max_num_seqs, max_tokens)) * num_layers * _LAUNCHES_A_LAYER
    return max(RESERVE_BYTES, _LIBRARIES_BYTES + launches * _LAUNCH_BYTES)


def group_min_blocks(config: EngineConfig, decoder: Decoder) -> int:
    """First blocks that decode rows must share to be read once for all of them; 0 for never.

    The core compares the blocks of the first cache group with full attention, so there must be no other.
    """
    return -(-GROUP_MIN_TOKENS // config.block_size) if decoder.cache_layout.windows.count(0) == 1 else 0


def make_step(
    config: EngineConfig,
    decoder: Decoder,
    plan: MemoryPlan,
    open_weights: Callable[[], Weights],
    device: torch.device,
    progress: Progress | None = None,
) -> tuple[Callable[[PlanLayout], CudaStep], int, int]:
    """Load a model and make room for its steps.

    Args:
        config: the settings.
        decoder: the model, without weights.
        plan: of the memory; its dtype is the model's.
        open_weights: gives the model's tensors.
        device: where to; on `meta`, steps can be compiled and not run.
        progress: told of the loading.

    Returns:
        (makes the step once the plan's layout is known, bytes of the weights, bytes of the KV cache).
    """
    dtype = getattr(torch, plan.dtype)
    backend = CudaBackend(dtype, config.block_size, device, config.kv_cache_dtype)
    decoder.load(open_weights(), backend, num_positions=plan.max_model_len, progress=progress)
    cache = backend.kv_cache(decoder.cache_layout, plan.num_blocks, config.block_size)
    max_tokens = plan.max_num_batched_tokens
    decoder.bind(max_tokens, plan.head_rows)
    works = {
        window: AttentionWork(
            plan.max_num_seqs,
            plan.max_model_len,
            max_tokens,
            shape,
            window,
            device,
            on_hopper=serves_on_hopper(device, dtype, shape),
        )
        for window, shape in _attention_shapes(config, decoder).items()
    }

    def make(layout: PlanLayout) -> CudaStep:
        return CudaStep(
            decoder,
            cache,
            works,
            layout,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=plan.max_model_len,
            block_size=plan.block_size,
            max_logprobs=MAX_LOGPROBS,
            device=device,
        )

    return make, decoder.num_bytes, cache.num_bytes


def build_cuda_runner(
    config: EngineConfig,
    decoder: Decoder,
    plan: MemoryPlan,
    info: ModelInfo,
    open_weights: Callable[[], Weights],
    progress: Progress | None,
) -> CudaRunner:
    """Load a model on the GPU, its kernels compiled meanwhile.

    Changes of torch's settings for the whole process are undone when the runner is closed.

    Raises:
        ModelError: files that are missing, corrupt, unsupported or contradictory.
        NotEnoughMemory: another process took what the plan counted on.
    """
    restore = configure_cublas()
    gpu = find_gpu()
    device = torch.device("cuda", gpu.ordinal)
    meter = MemoryMeter(device)
    try:
        make, weights_bytes, kv_bytes = _load(config, decoder, plan, open_weights, gpu, progress)
    except BaseException as error:
        restore()
        _free(error)
        if isinstance(error, torch.OutOfMemoryError):
            raise NotEnoughMemory(f"{plan.model}: the GPU's memory ran out while loading.\n{plan.render()}") from error
        raise

    def make_and_check(layout: PlanLayout) -> CudaStep:
        try:
            step = make(layout)
        except torch.OutOfMemoryError as error:
            raise NotEnoughMemory(f"{plan.model}: the GPU's memory ran out.\n{plan.render()}") from error
        _check(plan, meter, gpu)
        return step

    info = msgspec.structs.replace(
        info, weights_bytes=weights_bytes, kv_bytes=kv_bytes, group_min_blocks=group_min_blocks(config, decoder)
    )
    return CudaRunner(
        make_and_check,
        info,
        max_num_seqs=plan.max_num_seqs,
        max_tokens=plan.max_num_batched_tokens,
        device=device,
        on_close=restore,
    )


def _load(
    config: EngineConfig,
    decoder: Decoder,
    plan: MemoryPlan,
    open_weights: Callable[[], Weights],
    gpu: Gpu,
    progress: Progress | None,
) -> tuple[Callable[[PlanLayout], CudaStep], int, int]:
    """Make the step while the kernels compile."""
    small = decoder.representative()
    compiler = KernelCompiler(lambda: launch_steps(config, small, plan, torch.device("meta")), gpu.ordinal)
    made = make_step(config, decoder, plan, open_weights, torch.device("cuda", gpu.ordinal), progress)
    # What loading took for a while goes back, so that the sum of what is taken is of what stays.
    _give_back()
    compiler.wait()
    return made


def _free(error: BaseException) -> None:
    """Let go of the memory of a build that failed, so that another can be tried while its error is still at hand."""
    # The calls that it came through hold the weights.
    failed: BaseException | None = error
    while failed is not None:
        traceback.clear_frames(failed.__traceback__)
        failed = failed.__cause__
    # The error at hand is to be told, also where the device is beyond giving back.
    with contextlib.suppress(RuntimeError):
        _give_back()


def _give_back() -> None:
    """Have torch give back the memory that no tensor uses."""
    with WHOLE_DEVICE:
        torch.cuda.empty_cache()


def _check(plan: MemoryPlan, meter: MemoryMeter, gpu: Gpu) -> None:
    """Compare what this engine took, and what is left on the device, with the plan.

    Args:
        plan: of the memory.
        meter: that ran since before anything was loaded.
        gpu: as it was then.

    Raises:
        NotEnoughMemory: less is left than graphs and libraries are still to take.
    """
    taken = meter.stop()
    free, _ = torch.cuda.mem_get_info(gpu.ordinal)
    planned = plan.total_bytes - plan.process_bytes
    _LOG.info(
        "GPU memory: planned %s, taken %s, free %s",
        format_bytes(planned),
        "unknown" if taken is None else format_bytes(taken),
        format_bytes(free),
    )
    # Graphs and libraries may have taken some of what is theirs.
    if taken is not None and taken > planned + plan.process_bytes // 2:
        _LOG.warning(
            "GPU memory: %s were planned and %s are taken; please report this",
            format_bytes(planned),
            format_bytes(taken),
        )
    if free < plan.process_bytes // 2:
        raise NotEnoughMemory(
            f"{plan.model}: {format_bytes(free)} of the GPU's memory are left of {format_bytes(gpu.free_bytes)}, and "
            f"CUDA graphs need up to {format_bytes(plan.process_bytes)}: another process took what was free when "
            "loading began; lower gpu_memory_utilization or end that process"
        )


def launch_steps(config: EngineConfig, decoder: Decoder, plan: MemoryPlan, device: torch.device) -> None:
    """Make a step with random weights; launch every kind and size of it once, and what only some steps need.

    On `meta` this compiles every kernel of a model: give it `Decoder.representative` then.
    """
    make, _, _ = make_step(config, decoder, plan, lambda: DummyWeights(decoder.parameters(), 0), device)
    core = _core.Core(
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        vocab_size=decoder.vocab_size,
        eos_token_ids=[],
        windows=list(decoder.cache_layout.windows),
    )
    step = make(PlanLayout.of(core.layout(), core.arena_len()))
    for size in step_sizes(plan.max_num_seqs, plan.max_num_batched_tokens):
        step(size)
    step.count_history(torch.empty(1, dtype=torch.int32, device=device), 0, 1)
    step.copy_blocks(0)
