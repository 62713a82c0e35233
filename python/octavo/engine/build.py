"""From settings to a loop that can step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from octavo._core import Core
from octavo.config import EngineConfig
from octavo.engine.loop import EngineLoop
from octavo.errors import ModelNotFound
from octavo.loading.progress import Progress
from octavo.runner.interface import ModelInfo

if TYPE_CHECKING:
    from octavo._core import TokenTable
    from octavo.loading.resolve import ModelSource
    from octavo.runner.interface import Runner
    from octavo.text.tokenizer import Tokenizer

__all__ = ["build_engine", "build_loop", "load_tokenizer"]


def load_tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer, or the one the settings name; None where random weights come without one.

    Raises:
        ModelError: the tokenizer's files are missing, corrupt or unknown.
    """
    from octavo.text.tokenizer import Tokenizer

    try:
        return Tokenizer.from_source(source, config.tokenizer)
    except ModelNotFound:
        if config.tokenizer is None and config.load_format == "dummy":
            return None
        raise


def build_engine(config: EngineConfig, progress: Progress) -> tuple[EngineLoop, ModelInfo, Tokenizer | None]:
    """Load a model and join it to a core.

    Raises:
        ModelError, ConfigError: it cannot be served like this.
    """
    from octavo.loading.resolve import resolve_model
    from octavo.runner import build_runner

    source = resolve_model(config.model, progress=progress)
    with ThreadPoolExecutor(1, thread_name_prefix="octavo-tokenizer") as thread:
        # Weights load for longer than a tokenizer, and mostly without the interpreter.
        reading = thread.submit(load_tokenizer, config, source)
        runner, info = build_runner(config, source, progress)
        try:
            tokenizer = reading.result()
            table = None
            if tokenizer is not None:
                table = tokenizer.token_table(info.vocab_size)
                end_tokens = {*info.eos_token_ids, *tokenizer.eos_token_ids}
                info = msgspec.structs.replace(info, eos_token_ids=tuple(sorted(end_tokens)))
            return build_loop(config, runner, info, table), info, tokenizer
        except BaseException:
            runner.close()
            raise


def build_loop(config: EngineConfig, runner: Runner, info: ModelInfo, table: TokenTable | None) -> EngineLoop:
    """A core as large as the runner's KV cache, and the loop around the two."""
    overlap = config.overlap if config.overlap is not None else info.device != "cpu"
    core = Core(
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.batched_tokens(info.device),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=list(info.eos_token_ids),
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        group_min_blocks=info.group_min_blocks,
        token_table=table,
    )
    return EngineLoop(core, runner, overlap=overlap)
