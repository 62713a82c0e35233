"""Engine settings: what is refused, by name and with a remedy."""

from __future__ import annotations

import math
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.errors import ConfigError


def test_defaults() -> None:
    config = EngineConfig(model="demo")
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (16, None, None)
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
    [
        {"max_num_seqs": "8"},
        {"max_num_seqs": 1.5},
        {"overlap": "yes"},
        {"model": None},
        {"served_model_name": "a"},
        {"seed": None},
        {"tokenizer": 3},
        {"stall_timeout": "long"},
        {"kv_cache_memory": 1.5},
        {"enable_prefix_caching": 2},
        {"dtype": 16},
    ],
)
def test_wrong_types_are_refused_by_name(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError) as refused:
        EngineConfig.of(**{"model": "demo", **settings})
    said = str(refused.value)
    assert said.startswith(f"{name}: ")
    assert value is None or repr(value) in said
    assert "Expected" not in said


def test_what_a_setting_may_be_is_said() -> None:
    for settings, said in (
        ({"dtype": "floaty"}, "dtype: 'floaty' is not one of auto, bfloat16, float16, float32"),
        (
            {"max_model_len": "4k"},
            "max_model_len: '4k' is not a whole number; leave it out to let Octavo choose",
        ),
        ({"block_size": "8"}, "block_size: '8' is not a whole number; leave it out for the default"),
        (
            {"kv_cache_memory": "8 apples"},
            "kv_cache_memory: '8 apples' is no size; give bytes, or such as 512MiB or 2GB",
        ),
        (
            {"gpu_memory_utilization": 90},
            "gpu_memory_utilization: 90.0 is not in (0, 1]; it is the share of the device's free memory to take, "
            "such as 0.9",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            EngineConfig.of(**{"model": "demo", **settings})
        assert str(refused.value) == said


def test_sizes_may_be_texts() -> None:
    assert EngineConfig.of(model="demo", kv_cache_memory="8GiB").kv_cache_memory == 8 << 30
    assert EngineConfig.of(model="demo", kv_cache_memory=8 << 30).kv_cache_memory == 8 << 30
    assert EngineConfig.of(model="demo", kv_cache_memory=None).kv_cache_memory is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("num_gpu_blocks_override", "use num_blocks"),
        ("kv_cache_memory_bytes", "use kv_cache_memory"),
        ("tensor_parallel_size", "an engine runs on one GPU; leave it out"),
        ("max_model_length", "did you mean max_model_len"),
        ("gpu_memory_utilisation", "did you mean gpu_memory_utilization"),
    ],
)
def test_another_name_leads_to_ours(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: there is no such setting; {said}"):
        EngineConfig.of(model="demo", **{name: 1})


def test_an_unknown_setting_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_size: there is no such setting.*max_num_seqs"):
        EngineConfig.of(model="demo", max_batch_size=8)


def test_names_and_values_make_a_config() -> None:
    config = EngineConfig.of(model="demo", served_model_name=["a", "b"], overlap=True, num_blocks=64)
    assert config == EngineConfig(model="demo", served_model_name=("a", "b"), overlap=True, num_blocks=64)
