"""An engine in this process that answers drawn requests and times them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from octavo.bench.workloads import Request
from octavo.config import EngineConfig
from octavo.engine.llm import LLM
from octavo.sampling_params import SamplingParams

__all__ = ["OfflineEngine", "offline_engine"]


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


@contextmanager
def offline_engine(config: EngineConfig) -> Iterator[OfflineEngine]:
    """Load a model in this process, warm it up, unload it at the end.

    Raises:
        OctavoError: it cannot be loaded.
    """
    settings = {name: getattr(config, name) for name in config.__struct_fields__ if name != "model"}
    with LLM(config.model, **settings) as llm:
        engine = OfflineEngine(llm)
        engine.seconds([(list(range(100, 164)), 8)])
        yield engine
