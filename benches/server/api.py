"""The API process that is measured: `octavo serve`'s server over `worker.py`, with a real tokenizer and template."""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
from pathlib import Path

import uvloop
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.gc_policy import set_aside
from octavo.engine.loop_builder import load_tokenizer
from octavo.loading.resolve import resolve_model
from octavo.server.lifecycle import Events, serve
from octavo.server.transport.listen import bind

WORKER = (sys.executable, str(Path(__file__).with_name("worker.py")))


async def _start(steps_per_s: float, tokenizer: str) -> AsyncEngine:
    engine = await AsyncEngine.start(EngineConfig(model=f"fake:steps_per_s={steps_per_s}"), worker_command=WORKER)
    config = EngineConfig(model=tokenizer)
    engine.tokenizer = await asyncio.to_thread(lambda: load_tokenizer(config, resolve_model(tokenizer)))
    return engine


async def _serve(options: argparse.Namespace) -> None:
    listener = bind("127.0.0.1", 0)

    def ready(_: object) -> None:
        set_aside()
        print(listener.getsockname()[1], flush=True)

    await serve(
        listener,
        _start(options.steps_per_s, options.tokenizer),
        names=("fake",),
        grace=0.1,
        events=Events(ready=ready),
    )


def main() -> None:
    """Print the port once the server answers; serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps-per-s", type=float, default=0.0)
    parser.add_argument("--tokenizer", default="demo")
    parser.add_argument("--profile", help="a file for cProfile's table of the whole run")
    options = parser.parse_args()
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    uvloop.run(_serve(options))
    if options.profile:
        profile.disable()
        with Path(options.profile).open("w") as stream:
            pstats.Stats(profile, stream=stream).sort_stats("tottime").print_stats(60)


if __name__ == "__main__":
    main()
