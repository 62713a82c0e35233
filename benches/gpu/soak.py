"""A full pool for minutes: random requests, aborts and preemptions, and at the end nothing lost and nothing kept.

    python benches/gpu/soak.py --model benches/shapes/qwen3-0.6b --seconds 480
    python benches/gpu/soak.py --model benches/shapes/qwen3-0.6b --seconds 480 --engines 2

One engine gets a KV cache of `--num-blocks` blocks; two share the card by `--gpu-memory-utilization` of what is free.
Lengths follow the pool, so that it is always full. Prints one JSON object; exits with 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from typing import Any

from octavo import SamplingParams
from octavo.bench.memory import private_bytes
from octavo.config import EngineConfig
from octavo.engine.collect import RequestState, apply
from octavo.engine.loop import EngineLoop
from octavo.engine.loop_builder import build_loop
from octavo.engine.requests import RequestMaker, submit_checked
from octavo.loading.resolve import resolve_model
from octavo.runner import build_runner
from octavo.runner.interface import ModelInfo
from octavo.runner.runner_builder import plan_model

DEVICE = os.environ.get("OCTAVO_TEST_DEVICE", "cuda")
# Of the time, before memory is first looked at: by then every shape of step has been recorded.
WARM_SHARE = 0.25
LAST_ANSWERS_S = 120.0
STUCK_S = 60.0
GROWTH_BYTES = 64 << 20


class Soak:
    """Keeps an engine's queue full, and checks every answer.

    Args:
        loop: the engine.
        info: its model.
        seed: of the requests.
    """

    def __init__(self, loop: EngineLoop, info: ModelInfo, max_num_seqs: int, seed: int) -> None:
        self.loop = loop
        self.counts = dict.fromkeys(("requests", "answers", "finished", "aborted", "tokens", "steps", "full_steps"), 0)
        self._core = loop.core
        self._maker = RequestMaker(info, seed)
        self._rng = random.Random(seed)
        self._info = info
        self._open = 2 * max_num_seqs
        self._states: dict[int, RequestState] = {}
        self._expected: dict[int, SamplingParams] = {}
        pool = (info.num_blocks - 1) * info.block_size
        # Twice as many tokens as the pool holds, if every sequence were at its end.
        self._length = min(max(4 * pool // max_num_seqs, 64), info.max_model_len - 1, pool - info.block_size)
        self._prefixes = [self._draw(self._length // 4) for _ in range(4)]
        self._progress = time.monotonic()

    def run(self, until: float) -> None:
        """Step until the clock says so."""
        while time.monotonic() < until:
            while len(self._states) < self._open:
                self._submit()
            if self._rng.random() < 0.05:
                self._abort(self._rng.choice(list(self._states)))
            self._step()

    def finish(self) -> None:
        """Abort half of what is left, and see the others to their end; abort what takes too long."""
        for request_id in list(self._states)[::2]:
            self._abort(request_id)
        until = time.monotonic() + LAST_ANSWERS_S
        while self._states:
            if time.monotonic() > until:
                for request_id in list(self._states):
                    self._abort(request_id)
            self._step()
        self.loop.drain()

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(10, self._info.vocab_size) for _ in range(count)]

    def _submit(self) -> None:
        rng = self._rng
        request_id = self.counts["requests"] = self.counts["requests"] + 1
        prompt = self._draw(rng.randint(1, self._length // 2))
        if rng.random() < 0.2:
            prompt = rng.choice(self._prefixes) + prompt[: self._length // 4]
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 1, 2, 4)),
            temperature=rng.choice((0.0, 0.0, 0.7, 1.2)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((-1, 1, 40)),
            min_p=rng.choice((0.0, 0.05)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
            presence_penalty=rng.choice((0.0, 0.0, 0.5)),
            logprobs=rng.choice((None, None, None, 0, 1, 5, 20)),
            min_tokens=rng.choice((0, 0, 3)),
            max_tokens=rng.randint(3, max(self._length - len(prompt), 3)),
            ignore_eos=rng.random() < 0.9,
        )
        submit_checked(self._core, self._maker.check(request_id, prompt, params), time.monotonic_ns() // 1000)
        self._states[request_id] = RequestState(str(request_id), None, prompt, params)
        self._expected[request_id] = params

    def _abort(self, request_id: int) -> None:
        if not self._core.abort(request_id):
            raise AssertionError(f"request {request_id} runs, and the core does not know it")
        del self._states[request_id], self._expected[request_id]
        self.counts["aborted"] += 1

    def _step(self) -> None:
        outputs = self.loop.step()
        self.counts["steps"] += 1
        now = time.monotonic()
        if self.counts["steps"] % 16 == 0:
            stats = self._core.stats()
            self.counts["full_steps"] += 16 * (stats["blocks_free"] < 0.05 * stats["blocks_total"])
        if outputs is None or not outputs.token_ids:
            if now - self._progress > STUCK_S:
                raise AssertionError(f"no token for {STUCK_S:.0f} s: {self._core.stats()}")
            return
        self._progress = now
        self.counts["tokens"] += len(outputs.token_ids) // 4
        for request_id, state in apply(outputs, self._states):
            if state.num_unfinished == 0:
                self._check(request_id, state)
                del self._states[request_id], self._expected[request_id]
                self.counts["finished"] += 1

    def _check(self, request_id: int, state: RequestState) -> None:
        """Whole, of the right length, with the log probabilities asked for."""
        params = self._expected[request_id]
        for answer in state.output().outputs:
            self.counts["answers"] += 1
            length = len(answer.token_ids)
            assert answer.finish_reason in ("stop", "length"), answer.finish_reason
            assert answer.finish_reason == "length" or not params.ignore_eos
            assert length == params.max_tokens if answer.finish_reason == "length" else length >= params.min_tokens
            assert all(0 <= token < self._info.vocab_size for token in answer.token_ids)
            if params.logprobs is None:
                assert answer.logprobs is None
                continue
            assert answer.logprobs is not None
            assert len(answer.logprobs) == length
            for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
                assert entry.token_id == token
                assert len(entry.top) == params.logprobs
                assert math.isfinite(entry.logprob)
                assert all(math.isfinite(value) for _, value in entry.top)
                assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)


def memory() -> dict[str, int]:
    """Bytes: free on the device, taken by torch there, and this process's own."""
    taken = {"process": private_bytes(os.getpid())}
    if DEVICE == "cuda":
        import torch

        torch.cuda.synchronize()
        taken["device_free"] = torch.cuda.mem_get_info()[0]
        taken["torch_peak"] = torch.cuda.max_memory_allocated()
        taken["torch_reserved"] = torch.cuda.memory_reserved()
    return taken


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """One engine in this process."""
    limits = {} if options.num_blocks is None else {"num_blocks": options.num_blocks}
    config = EngineConfig(
        model=options.model,
        device=DEVICE,  # type: ignore[arg-type]
        dtype="bfloat16",
        load_format="dummy",
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        gpu_memory_utilization=options.gpu_memory_utilization,
        **limits,
    )
    source = resolve_model(config.model)
    plan = plan_model(config, source)
    runner, info = build_runner(config, source)
    loop = build_loop(config, runner, info, None)
    begin = time.monotonic()
    work = Soak(loop, info, config.max_num_seqs, options.seed)
    work.run(begin + WARM_SHARE * options.seconds)
    warm = memory()
    work.run(begin + options.seconds)
    end = memory()
    work.finish()
    seconds = time.monotonic() - begin
    stats = loop.core.stats()
    loop.core.check_invariants()
    wrong = [name for name in ("blocks_used", "running", "waiting", "deferred") if stats[name]]
    if stats["blocks_free"] != stats["blocks_total"]:
        wrong.append("blocks_free")
    if work.counts["finished"] + work.counts["aborted"] != work.counts["requests"]:
        wrong.append("requests")
    # The other engine's growth shows in what is free on the device.
    for name in ("torch_peak", "torch_reserved", "process"):
        if end.get(name, 0) - warm.get(name, 0) > GROWTH_BYTES:
            wrong.append(name)
    if "device_free" in end and warm["device_free"] - end["device_free"] > GROWTH_BYTES:
        wrong.append("device_free")
    loop.close()
    return {
        "wrong": wrong,
        "seconds": round(seconds, 1),
        **work.counts,
        "tokens_s": round(work.counts["tokens"] / seconds),
        "preemptions": stats["preemptions"],
        "evictions": stats["evictions"],
        "prefix_hit_tokens": stats["prefix_hit_tokens"],
        "blocks": {name: stats[f"blocks_{name}"] for name in ("total", "free", "used")},
        "planned_bytes": plan.total_bytes,
        "memory_warm": warm,
        "memory_end": end,
    }


def side_by_side(options: argparse.Namespace) -> list[dict[str, Any]]:
    """As many processes at once."""
    arguments = [sys.executable, __file__, "--model", options.model, "--seconds", str(options.seconds)]
    arguments += ["--max-num-seqs", str(options.max_num_seqs), "--max-model-len", str(options.max_model_len)]
    arguments += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if options.num_blocks is not None:
        arguments += ["--num-blocks", str(options.num_blocks)]
    processes = [
        subprocess.Popen([*arguments, "--seed", str(options.seed + number)], stdout=subprocess.PIPE, text=True)
        for number in range(options.engines)
    ]
    results = []
    for process in processes:
        said, _ = process.communicate()
        lines = said.strip().splitlines()
        told = json.loads(lines[-1])["engines"] if lines else [{"wrong": [f"exit code {process.returncode}"]}]
        results += told
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="A full pool for minutes.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=9000)
    parser.add_argument("--num-blocks", type=int, help="of one engine's KV cache; 3000 when there is one engine")
    parser.add_argument("--gpu-memory-utilization", type=float, help="of one engine; 0.9 by the number of engines")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.gpu_memory_utilization is None:
        options.gpu_memory_utilization = round(0.9 / options.engines, 3)
        if options.num_blocks is None and options.engines == 1:
            options.num_blocks = 3000
    results = side_by_side(options) if options.engines > 1 else [soak(options)]
    print(json.dumps({"model": options.model, "engines": results}))
    return int(any(result["wrong"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
