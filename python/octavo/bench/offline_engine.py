"""An engine in this process that answers drawn requests and times them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from octavo.bench.command import BenchOptions, Results, check_context, progress
from octavo.bench.workloads import WARM_UP, Request
from octavo.config import EngineConfig
from octavo.engine.llm import LLM
from octavo.sampling_params import SamplingParams

__all__ = ["EngineBench", "OfflineEngine", "offline_engine"]

# Steps that record a shape of the device's work, and play it back.
_STEPS_OF_A_SHAPE = 2
_FINE_ROWS, _ROWS_STRIDE = 32, 8


class OfflineEngine:
    """Answers requests, all at once, greedily and exactly as long as asked.

    Args:
        llm: a loaded model.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together, at most."""
        return self._llm.model.max_model_len

    def seconds(self, requests: Sequence[Request]) -> float:
        """Time from the first submission to the last token.

        Raises:
            RuntimeError: an answer of another length than asked for.
        """
        prompts = [prompt for prompt, _ in requests]
        params = [SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True) for _, output in requests]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        for (_, asked), output in zip(requests, outputs, strict=True):
            if len(output.outputs[0].token_ids) != asked:
                raise RuntimeError(f"an answer has {len(output.outputs[0].token_ids)} tokens instead of {asked}")
        return seconds

    def warm_up(self) -> None:
        """Have the engine do once what it does later, as one that has served for a while has.

        A GPU records a step's work when its shape first comes up, so there every number of rows and every power of two
        of prompt tokens comes up twice. The prompts are found in no workload.
        """
        self.seconds([WARM_UP])
        if self._llm.model.device == "cpu":
            return
        largest = min(self._llm.config.batched_tokens("cuda"), self.max_model_len - 1)
        draw = random.Random("warm up")  # noqa: S311 - reproducible draws
        for _ in range(_STEPS_OF_A_SHAPE):
            size = 16
            while size <= largest:
                self.seconds([([draw.randrange(10, 30000) for _ in range(size)], 1)])
                size *= 2
        most = self._llm.model.max_num_seqs
        counts = [rows for rows in range(most, 0, -1) if rows in (*range(_FINE_ROWS), most) or rows % _ROWS_STRIDE == 0]
        requests = []
        for place, (rows, fewer) in enumerate(itertools.pairwise([*counts, 0]), 1):
            for _ in range(rows - fewer):
                requests.append(([draw.randrange(10, 30000) for _ in range(16)], _STEPS_OF_A_SHAPE * place))
        self.seconds(requests)


@contextmanager
def offline_engine(config: EngineConfig, options: BenchOptions | None = None) -> Iterator[OfflineEngine]:
    """Load a model in this process, warm it up, unload it at the end.

    Raises:
        OctavoError: it cannot be loaded, or its context is too short for the workload of `options`.
    """
    settings = {name: getattr(config, name) for name in config.__struct_fields__ if name != "model"}
    with LLM(config.model, **settings) as llm:
        engine = OfflineEngine(llm)
        if options is not None:
            check_context(options, engine.max_model_len)
        progress("warming up")
        engine.warm_up()
        yield engine


class EngineBench:
    """A bench of an engine in this process: called with settings, it loads one.

    Attributes:
        on: runs it on an engine that is loaded already.
    """

    def __init__(self, on: Callable[[OfflineEngine, BenchOptions], Results]) -> None:
        self.on = on
        self.__doc__ = on.__doc__

    def __call__(self, config: EngineConfig, options: BenchOptions) -> Results:
        """Load an engine and run the bench on it."""
        with offline_engine(config, options) as engine:
            return self.on(engine, options)
