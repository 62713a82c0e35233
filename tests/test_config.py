"""Engine settings: what is refused, by name and with a remedy."""

from __future__ import annotations

import math
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.errors import ConfigError


def test_defaults() -> None:
    config = EngineConfig(model="demo")
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (16, 256, None)
    assert (config.dtype, config.device, config.scheduling_policy, config.overlap) == ("auto", "auto", "fcfs", None)
    assert config.enable_prefix_caching


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("load_format", "pickle"),
        ("scheduling_policy", "random"),
        ("max_model_len", 0),
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", 0),
        ("block_size", 8),
        ("block_size", 24),
        ("block_size", 0),
        ("num_blocks", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", math.nan),
        ("kv_cache_memory", -5),
        ("num_threads", 0),
        ("num_blocks", 10**30),
        ("max_num_seqs", 1 << 64),
        ("seed", 1 << 64),
        ("trust_remote_code", True),
    ],
)
def test_bad_settings_are_refused_by_name(field: str, value: Any) -> None:
    settings: dict[str, Any] = {"model": "demo", field: value}
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**settings)
    with pytest.raises(ConfigError, match=field):
        EngineConfig.of(**settings)


def test_a_step_must_hold_a_token_of_every_sequence() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        EngineConfig(model="demo", max_num_batched_tokens=16, max_num_seqs=17)


@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": "8"}, {"max_num_seqs": 1.5}, {"overlap": "yes"}, {"model": None}, {"served_model_name": "a"}],
)
def test_wrong_types_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig.of(**{"model": "demo", **settings})


def test_an_unknown_setting_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_size: there is no such setting.*max_num_seqs"):
        EngineConfig.of(model="demo", max_batch_size=8)


def test_names_and_values_make_a_config() -> None:
    config = EngineConfig.of(model="demo", served_model_name=["a", "b"], overlap=True, num_blocks=64)
    assert config == EngineConfig(model="demo", served_model_name=("a", "b"), overlap=True, num_blocks=64)
