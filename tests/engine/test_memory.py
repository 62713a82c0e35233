"""Short requests by the ten thousand leave nothing behind.

python tests/engine/test_memory.py 100000
"""

from __future__ import annotations

import gc
import sys
import time

import psutil
from engine_fakes import fake_config, fake_loop
from octavo.engine.collect import RequestState, apply
from octavo.engine.requests import RequestMaker, submit_checked
from octavo.runner.fake import fake_model_info
from octavo.sampling_params import SamplingParams

_WARM_UP = 5_000
_AT_ONCE = 256


def serve(count: int) -> tuple[int, float]:
    """Serve so many requests of 16 + 16 tokens after a warm-up.

    Returns:
        (bytes that resident memory grew by, requests a second).
    """
    loop = fake_loop(fake_config(max_num_seqs=_AT_ONCE, num_blocks=2048, max_num_batched_tokens=4096))
    maker = RequestMaker(fake_model_info(vocab_size=512), 0)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    states: dict[int, RequestState] = {}
    submitted = finished = 0
    before = begun = 0.0
    while finished < _WARM_UP + count:
        while len(states) < 2 * _AT_ONCE and submitted < _WARM_UP + count:
            submitted += 1
            prompt = [(submitted >> shift) & 255 for shift in range(0, 32, 2)]
            submit_checked(loop.core, maker.check(submitted, prompt, params), submitted)
            states[submitted] = RequestState(str(submitted), None, prompt, params)
        outputs = loop.step()
        if outputs is not None:
            for number, state in apply(outputs, states):
                if state.num_unfinished == 0:
                    assert len(state.output().outputs[0].token_ids) == 16
                    del states[number]
                    finished += 1
        if not before and finished >= _WARM_UP:
            gc.collect()
            before, begun = psutil.Process().memory_info().rss, time.monotonic()
    rate = count / (time.monotonic() - begun)
    gc.collect()
    assert not loop.has_work()
    return psutil.Process().memory_info().rss - int(before), rate


def test_ten_thousand_requests_leave_memory_flat() -> None:
    grown, _ = serve(10_000)
    assert grown < 4 << 20


if __name__ == "__main__":
    number = int(sys.argv[1])
    growth, speed = serve(number)
    print(f"{number} requests, {speed:.0f} a second, resident memory grew by {growth / 1024:.0f} KiB")
