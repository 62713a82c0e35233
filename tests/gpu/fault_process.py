"""What test_faults.py runs in processes of their own: an engine whose device fails in the middle of its answers.

    python fault_process.py local MODEL
    python fault_process.py worker --fd N --parent PID

A failed device takes the CUDA context of its process with it, and so whatever else the process has there.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import octavo.engine.loop_builder
from octavo import LLM, SamplingParams
from octavo.engine import worker
from octavo.errors import EngineDead, OctavoError
from small_models import ON_CPU, SETTINGS

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
PROMPTS = [[3 + number, 5, 7, 11] * (1 + number) for number in range(6)]
# Prompts and first tokens are there by then, and some graphs.
FAULT_STEP = 20


def break_device() -> None:
    """Have the current stream's next kernel write where no memory is; the CPU's stand-in fails in its own way."""
    if ON_CPU:
        raise EngineDead("a step failed: an illegal memory access was encountered")
    from wild_store import wild_store

    wild_store()


def build_and_break(*arguments: Any) -> Any:
    """As `build_engine`; the device fails between two steps."""
    loop, info, tokenizer = BUILD(*arguments)
    launch, steps = loop.runner.launch, 0

    def launch_and_break(plan: Any) -> Any:
        nonlocal steps
        steps += 1
        handle = launch(plan)
        if steps == FAULT_STEP:
            break_device()
        return handle

    loop.runner.launch = launch_and_break
    return loop, info, tokenizer


def refusal(llm: LLM) -> list[str]:
    """What a call raises."""
    try:
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    except OctavoError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def local(model: str) -> dict[str, Any]:
    """An engine in this process: what its callers see, and how long its end takes."""
    llm = LLM(model, **SETTINGS)
    errors = [refusal(llm), refusal(llm)]
    begin = time.monotonic()
    llm.close()
    return {"errors": errors, "close_s": time.monotonic() - begin, "closed": refusal(llm)}


BUILD = octavo.engine.loop_builder.build_engine

if __name__ == "__main__":
    octavo.engine.loop_builder.build_engine = build_and_break
    if sys.argv[1] == "worker":
        sys.exit(worker.main(sys.argv[2:]))
    sys.stdout.write(json.dumps(local(sys.argv[2])) + "\n")
