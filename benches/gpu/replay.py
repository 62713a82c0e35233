"""One step's decoder and head launched again and again, with parts left out or launched otherwise."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from octavo.kernels import launch, linear
from octavo.kernels.linear_tables import SkinnyTile, SlabTile, TiledTile, WideTile
from octavo.layers.backends.cuda_inputs import has_groups, has_prompts
from octavo.runner.kernel_warmup import KernelCompiler

__all__ = ["Products", "Replay", "Tile", "compiled", "nothing", "replaced", "without_overlap"]

_THREADS = 14
_REPEATS = 10
_WARM_REPLAYS = 2

Tile = SkinnyTile | SlabTile | TiledTile | WideTile | None
Key = TypeVar("Key", bound=Hashable)
Kind = TypeVar("Kind", SkinnyTile, SlabTile, TiledTile, WideTile)


class Replay:
    """The launches of the step that an engine took last, from attention's plan to the logits.

    All of them can be repeated: the plan stays on the device, and the cache gets the same keys and values again.

    Args:
        runner: a `CudaRunner` whose steps are over.
        plan: of its last step.

    Attributes:
        size: of the step's graph.
        decoder: the runner's.
        inputs: the step's.
        cache: the runner's.
        works: attention's lists, by window.
    """

    def __init__(self, runner: Any, plan: Any) -> None:
        step = runner._step
        prompts, groups = plan.num_rows > plan.num_decode_rows, plan.num_groups > 0
        fitting = [
            size
            for size in step._inputs
            if has_prompts(size.kind) == prompts
            and has_groups(size.kind) == groups
            and size.tokens >= plan.num_tokens
            and size.samples >= plan.num_logits
        ]
        self.size = min(fitting, key=lambda size: (size.tokens, size.samples))
        self.decoder = step._decoder
        self.inputs = step.inputs(self.size)
        self.cache = step._cache
        self.works = step._works
        self._step = step
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def __call__(self) -> None:
        """Launch it on the current stream."""
        self._step.compute(self.size)

    def compile(self) -> None:
        """Compile in threads what it launches."""
        KernelCompiler(self, torch.cuda.current_device()).wait()

    def time(self, repeats: int = _REPEATS) -> float:
        """Microseconds of a replay of its graph, the median."""
        with torch.cuda.stream(self._stream):
            # Loads what is new.
            self()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                self()
            finally:
                graph.capture_end()
            for _ in range(_WARM_REPLAYS):
                graph.replay()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))
        return 1e3 * times[len(times) // 2]


class Products:
    """Which product of ours or of cuBLAS computes what, by (N, K, whether two products are gated), where it is forced.

    Attributes:
        forced: what to take; None for cuBLAS. What it lacks is as the tables say.
    """

    def __init__(self) -> None:
        self.forced: dict[tuple[int, int, bool], Tile] = {}

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Have dense layers ask this."""
        slab_table, skinny_table, wide_table = linear.slab_tile, linear.skinny_tile, linear.wide_tile
        middle_table, gated_table = linear.middle_tile, linear.gated_tile

        def slab(capability: tuple[int, int], n: int, k: int, rows: int, *, gated: bool) -> SlabTile | None:
            if (n, k, gated) in self.forced:
                return _only(self.forced[n, k, gated], SlabTile)
            return slab_table(capability, n, k, rows, gated=gated)

        def skinny(capability: tuple[int, int], n: int, k: int, rows: int, *, gated: bool) -> SkinnyTile | None:
            if (n, k, gated) in self.forced:
                return _only(self.forced[n, k, gated], SkinnyTile)
            return skinny_table(capability, n, k, rows, gated=gated)

        def wide(capability: tuple[int, int], n: int, k: int, rows: int, *, gated: bool) -> WideTile | None:
            if (n, k, gated) in self.forced:
                return _only(self.forced[n, k, gated], WideTile)
            return wide_table(capability, n, k, rows, gated=gated)

        def middle(capability: tuple[int, int], n: int, k: int, rows: int) -> TiledTile | None:
            if (n, k, False) in self.forced:
                return _only(self.forced[n, k, False], TiledTile)
            return middle_table(capability, n, k, rows)

        def gated(capability: tuple[int, int], n: int, rows: int) -> TiledTile | None:
            for key, tile in self.forced.items():
                if key[0] == n and key[2]:
                    return _only(tile, TiledTile)
            return gated_table(capability, n, rows)

        with replaced(linear, slab_tile=slab, skinny_tile=skinny, wide_tile=wide, middle_tile=middle, gated_tile=gated):
            yield


def _only(tile: Tile, kind: type[Kind]) -> Kind | None:
    return tile if isinstance(tile, kind) else None


def compiled(calls: Mapping[Key, Callable[[], object]]) -> set[Key]:
    """Compile in threads what some calls launch.

    Returns:
        The calls' names, without those of what cannot be compiled.
    """

    def attempt(call: Callable[[], object]) -> bool:
        try:
            with launch.compile_only():
                call()
        except Exception:
            return False
        return True

    with ThreadPoolExecutor(_THREADS) as threads:
        return {name for name, good in zip(calls, threads.map(attempt, calls.values()), strict=True) if good}


def nothing(*_arguments: Any, **_options: Any) -> None:
    """Stands for a launch that is left out."""


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give a class or module other attributes for a while."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def without_overlap() -> contextlib.AbstractContextManager[None]:
    """Have every kernel start when the one before has ended."""
    return replaced(launch, overlaps=lambda: False)
