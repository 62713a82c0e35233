"""`memory`: what Octavo's processes hold against what was planned, and that it does not grow."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import msgspec

from octavo.bench import workloads
from octavo.bench.client import Endpoint
from octavo.bench.command import BenchOptions, Results, check_context, progress
from octavo.bench.server_process import server_process
from octavo.config import EngineConfig

__all__ = ["long_run", "memory", "private_bytes", "process_tree"]

_MIB = 1 << 20
_CLIENTS = 8
_FILLED_KV = 256 * _MIB
_LONG_RUN = 100_000
_WAVE = 1000


def memory(config: EngineConfig, options: BenchOptions) -> Results:
    """Two results: a server after W4, and `long_run`.

    The first: `resident_mib` of all processes, of which `weights_mib` and `kv_mib` were planned, and
    `overhead_mib`, the rest. Mapped file pages are the page cache's and not counted. Blocks take memory once they are
    written, so where the settings name no size the KV cache is one that W4 fills.

    Raises:
        OctavoError: the model cannot be served.
    """
    from octavo.loading.resolve import resolve_model
    from octavo.runner.runner_builder import plan_model

    if config.kv_cache_memory is None and config.num_blocks is None:
        config = msgspec.structs.replace(config, kv_cache_memory=_FILLED_KV)
    plan = plan_model(config, resolve_model(config.model))
    check_context(options, plan.max_model_len)
    requests = workloads.demo("W4")
    progress(f"{options.workload}: a server of {config.model} under {workloads.size(requests)}")
    with server_process(config) as server:
        asyncio.run(_load(Endpoint(server.base_url), requests))
        total = sum(map(private_bytes, process_tree(server.pid)))
    served = {
        "case": "serve",
        "resident_mib": round(total / _MIB, 1),
        "weights_mib": round(plan.weights_bytes / _MIB, 1),
        "kv_mib": round(plan.kv_bytes / _MIB, 1),
        "overhead_mib": round((total - plan.weights_bytes - plan.kv_bytes) / _MIB, 1),
    }
    progress(f"{options.workload}: {_LONG_RUN} requests without a model")
    return [served, long_run(_LONG_RUN)]


async def _load(endpoint: Endpoint, requests: list[workloads.Request]) -> None:
    model = next(iter(await endpoint.models()))
    waiting = iter(requests)

    async def client() -> None:
        for prompt, output in waiting:
            await endpoint.complete(model, prompt, output)

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))


def long_run(requests: int) -> dict[str, str | int | float]:
    """Short requests through the core and the loop without a model.

    Returns:
        `requests`, memory after a tenth of them and after all (`tenth_mib`, `all_mib`), `growth_mib`.
    """
    from octavo.engine.loop_builder import build_loop
    from octavo.engine.requests import RequestMaker, submit_checked
    from octavo.runner.fake import FakeRunner, fake_model_info
    from octavo.sampling_params import SamplingParams

    info = fake_model_info()
    loop = build_loop(EngineConfig(model="fake"), FakeRunner(info), info, None)
    maker = RequestMaker(info, 0)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    tenth = 0
    for wave in range(requests // _WAVE):
        drawn = workloads.short(wave, _WAVE)
        for number, (prompt, _) in enumerate(drawn, start=1 + wave * _WAVE):
            submit_checked(loop.core, maker.check(number, prompt, params), number)
        while loop.has_work():
            loop.step()
        if (wave + 1) * _WAVE == requests // 10:
            gc.collect()
            tenth = private_bytes(os.getpid())
    gc.collect()
    whole = private_bytes(os.getpid())
    finished = loop.core.stats()["finished_length"]
    if finished != requests:
        raise RuntimeError(f"{finished} of {requests} requests finished")
    loop.close()
    return {
        "case": "long run",
        "requests": requests,
        "tenth_mib": round(tenth / _MIB, 2),
        "all_mib": round(whole / _MIB, 2),
        "growth_mib": round((whole - tenth) / _MIB, 2),
    }


def private_bytes(pid: int) -> int:
    """Resident memory of a process that is no file's; its share of what it has in common with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    # Unnamed shared mappings, such as the weights', are kept by the kernel as shared memory.
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def process_tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found
