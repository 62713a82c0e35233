"""From settings to a loop that can step."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo._core import Core
from octavo.config import EngineConfig
from octavo.engine.constraints import OutputConstraints
from octavo.engine.loop import EngineLoop
from octavo.errors import ConfigError, ModelNotFound
from octavo.loading.progress import Progress
from octavo.runner.interface import ModelInfo

if TYPE_CHECKING:
    from octavo._core import TokenTable
    from octavo.loading.resolve import ModelSource
    from octavo.runner.interface import Runner
    from octavo.text.tokenizer import Tokenizer

__all__ = ["build_engine", "build_loop", "find_model", "load_tokenizer"]

_FAKE_MODEL_LEN = 8192
_FAKE_BLOCK_TOKENS = 1 << 20


def find_model(config: EngineConfig, progress: Progress | None = None) -> ModelSource:
    """The files that the settings name, fetched when they are not on this machine yet; none for a fake model.

    Raises:
        ModelError: as `resolve_model`.
    """
    from octavo.loading.resolve import ModelSource, resolve_model

    if config.load_format == "fake":
        return ModelSource("fake", Path(config.model), config.model.partition("?")[0] or "fake")
    return resolve_model(config.model, progress=progress)


def load_tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer, or the one the settings name; None where random weights come without one.

    Raises:
        ModelError: the tokenizer's files are missing, corrupt or unknown.
    """
    from octavo.text.tokenizer import Tokenizer

    if source.kind == "fake":
        from octavo.text.fake_tokenizer import fake_tokenizer

        return fake_tokenizer()
    try:
        return Tokenizer.from_source(source, config.tokenizer)
    except ModelNotFound:
        if config.tokenizer is None and config.load_format == "dummy":
            return None
        raise


def build_engine(config: EngineConfig, progress: Progress) -> tuple[EngineLoop, ModelInfo, Tokenizer | None]:
    """Load a model and join it to a core.

    Raises:
        ModelError, ConfigError: the model cannot be served with these settings.
    """
    source = find_model(config, progress)
    if source.kind == "fake":
        return _build_fake(config, source, progress)
    from octavo.runner import build_runner

    with ThreadPoolExecutor(1, thread_name_prefix="octavo-tokenizer") as thread:
        # Weights load for longer than a tokenizer, and mostly without the interpreter.
        reading = thread.submit(load_tokenizer, config, source)
        runner, info = build_runner(config, source, progress)
        try:
            tokenizer = reading.result()
            table = None
            if tokenizer is not None:
                table = tokenizer.token_table(info.vocab_size)
                end_tokens = sorted({*info.eos_token_ids, *tokenizer.eos_token_ids})
                sampled = tuple(token for token in end_tokens if token < info.vocab_size)
                info = msgspec.structs.replace(info, eos_token_ids=sampled)
            return build_loop(config, runner, info, table), info, tokenizer
        except BaseException:
            runner.close()
            raise


def _build_fake(
    config: EngineConfig, source: ModelSource, progress: Progress
) -> tuple[EngineLoop, ModelInfo, Tokenizer]:
    """A core as of any model, and a runner that writes the fake tokenizer's passage."""
    from octavo.runner.fake import FakeOptions, FakeTextRunner, fake_model_info
    from octavo.text.fake_tokenizer import PASSAGE, fake_tokenizer

    options = FakeOptions.of(config.model)
    if config.tokenizer is not None:
        raise ConfigError("tokenizer: a fake model writes with its own; leave it out")
    progress("Loading", 0, 1)
    time.sleep(options.load_ms / 1e3)
    tokenizer = fake_tokenizer()
    passage = [(token, tokenizer.token_bytes(token)) for token in tokenizer.encode(PASSAGE)]
    max_model_len = config.max_model_len or _FAKE_MODEL_LEN
    info = msgspec.structs.replace(
        fake_model_info(
            vocab_size=tokenizer.vocab_size,
            num_blocks=config.num_blocks or max(_FAKE_BLOCK_TOKENS, 4 * max_model_len) // config.block_size + 1,
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_num_seqs=config.sequence_counts("cpu")[0],
        ),
        name=source.name,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    runner = FakeTextRunner(info, passage, tokenizer.eos_token_ids[0], options)
    progress("Loading", 1, 1)
    return build_loop(config, runner, info, tokenizer.token_table(info.vocab_size)), info, tokenizer


def build_loop(config: EngineConfig, runner: Runner, info: ModelInfo, table: TokenTable | None) -> EngineLoop:
    """A core as large as the runner's KV cache, and the loop around the two."""
    overlap = config.overlap if config.overlap is not None else info.device != "cpu"
    core = Core(
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=config.batched_tokens(info.device),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=list(info.eos_token_ids),
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        group_min_blocks=info.group_min_blocks,
        windows=list(info.cache_windows),
        token_table=table,
    )
    constraints = OutputConstraints(table, info.eos_token_ids, info.vocab_size)
    return EngineLoop(core, runner, overlap=overlap, constraints=constraints)
