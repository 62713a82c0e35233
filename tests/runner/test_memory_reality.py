"""The memory plan against what a process really takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("memory")  # one probe for all

MIB = 1 << 20
_SCRIPT = Path(__file__).with_name("memory_probe.py")


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config))
    run = subprocess.run(
        [sys.executable, str(_SCRIPT), str(folder)], capture_output=True, text=True, check=True, timeout=240
    )
    values: dict[str, int] = json.loads(run.stdout)
    return values


def test_weights_take_what_was_planned(probe: dict[str, int]) -> None:
    assert probe["info_weights"] == pytest.approx(probe["plan_weights"], rel=0.01)
    grown = probe["built"] - probe["before"]
    planned = probe["plan_weights"] + probe["kv"]
    assert planned < grown < planned + 24 * MIB


def test_the_cache_is_there_before_it_is_used(probe: dict[str, int]) -> None:
    assert probe["kv"] > 90 * MIB
    assert probe["attached"] - probe["built"] < 4 * MIB
    assert probe["full"] - probe["attached"] < probe["workspace"] + 8 * MIB


def test_a_full_engine_takes_no_more_than_planned(probe: dict[str, int]) -> None:
    assert probe["full"] < probe["plan_total"]
    assert probe["full"] > 0.9 * (probe["plan_weights"] + probe["kv"] + probe["workspace"])


def test_no_torch_on_a_cpu(probe: dict[str, int]) -> None:
    assert not probe["torch"]
