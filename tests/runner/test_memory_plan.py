"""The memory plan: its sums, what it lowers and what it refuses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from decoders import make_decoder
from octavo._core import NUM_ARENAS, PARAM_LEN, Core
from octavo.config import EngineConfig
from octavo.errors import ConfigError, NotEnoughMemory
from octavo.runner.host import free_memory
from octavo.runner.memory import DeviceNeeds, MemoryPlan, cpu_needs, head_rows, plan_memory

MIB, GIB = 1 << 20, 1 << 30

# The shape of SmolLM2-135M.
KEYS: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
DECODER = make_decoder(**KEYS)


def plan(free: int = 16 * GIB, **changes: Any) -> MemoryPlan:
    config = EngineConfig(model="m", **changes)
    return plan_memory(
        config,
        DECODER,
        name="m",
        dtype="bfloat16",
        free_bytes=free,
        needs=cpu_needs(128, config.sequence_counts("cpu")[0]),
    )


def test_sums() -> None:
    made = plan()
    # 134,515,008 parameters, as the model's makers count them, norms in float32, and the rotary table.
    assert made.weights_bytes == 2 * 134_515_008 + 2 * (30 * 2 + 1) * 576 + 8192 * 64 * 4
    assert made.block_bytes == 16 * 30 * 2 * 3 * 64 * 2
    assert made.num_blocks == GIB // made.block_bytes
    assert made.kv_bytes <= GIB < made.kv_bytes + made.block_bytes
    parts = made.process_bytes + made.weights_bytes + made.workspace_bytes + made.state_bytes + made.kv_bytes
    assert made.total_bytes == parts
    assert made.max_model_len == 8192


def test_cache_is_no_larger_than_all_sequences_can_fill() -> None:
    made = plan(max_model_len=100, max_num_seqs=4)
    assert made.num_blocks == 4 * 7 + 1


def test_a_cache_too_small_for_all_groups_is_refused() -> None:
    keys = {**KEYS, "model_type": "gemma3_text", "sliding_window": 512, "head_dim": 64}
    config = EngineConfig(model="m", num_blocks=4)
    needs = cpu_needs(128, config.sequence_counts("cpu")[0])
    decoder = make_decoder("Gemma3ForCausalLM", **keys)
    groups = len(decoder.cache_layout.windows)
    with pytest.raises(
        NotEnoughMemory, match=rf"needs {groups + 1} blocks, and there is room for 4 .*Raise num_blocks"
    ):
        plan_memory(config, decoder, name="m", dtype="bfloat16", free_bytes=16 * GIB, needs=needs)


def test_linear_scaling_can_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    decoder = make_decoder(max_position_embeddings=64, rope_scaling={"rope_type": "linear", "factor": 2.0})

    def length(asked: int | None) -> int:
        config = EngineConfig(model="m", max_model_len=asked)
        needs = cpu_needs(128, config.sequence_counts("cpu")[0])
        made = plan_memory(config, decoder, name="m", dtype="float32", free_bytes=GIB, needs=needs)
        return made.max_model_len

    assert length(None) == length(64) == 64
    assert not caplog.messages
    assert length(128) == 128
    assert "m names 64 positions and scales them linearly up to 128" in caplog.text
    with pytest.raises(ConfigError, match="129 is more than the 128 positions"):
        length(129)


def test_length_is_lowered_to_what_fits() -> None:
    made = plan(kv_cache_memory=40 * MIB)
    assert made.max_model_len == (made.num_blocks - 1) * 16
    assert made.max_model_len < made.model_len_limit == 8192
    assert "(the model allows 8,192)" in made.render()


def test_an_explicit_length_is_never_lowered() -> None:
    with pytest.raises(NotEnoughMemory, match=r"max_model_len 8000 needs 501 blocks, and there is room for 113 of"):
        plan(kv_cache_memory=40 * MIB, max_model_len=8000)


def test_an_explicit_length_may_take_more_than_the_default_cache() -> None:
    config = EngineConfig(model="m", max_model_len=100_000)
    decoder = make_decoder(**{**KEYS, "max_position_embeddings": 131072})
    made = plan_memory(
        config,
        decoder,
        name="m",
        dtype="bfloat16",
        free_bytes=16 * GIB,
        needs=cpu_needs(128, config.sequence_counts("cpu")[0]),
    )
    assert made.kv_bytes > GIB
    assert made.num_blocks == 6251


def test_overrides() -> None:
    assert plan(num_blocks=77).num_blocks == 77
    assert plan(kv_cache_memory=64 * MIB).kv_bytes <= 64 * MIB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 1}, r"num_blocks 1 makes 1 blocks of 360\.0 KiB; two are the least"),
        ({"kv_cache_memory": 1000}, r"kv_cache_memory 1000 B makes 0 blocks"),
        ({"num_blocks": 1_000_000}, r"num_blocks 1000000 asks for 343\.3 GiB of KV cache, and there is room for"),
        ({"kv_cache_memory": 64 * GIB}, r"kv_cache_memory 64\.0 GiB asks for 64\.0 GiB"),
    ],
)
def test_impossible_overrides_are_refused_with_the_figures(changes: dict[str, int], message: str) -> None:
    with pytest.raises(NotEnoughMemory, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"num_blocks": 1_000_000}, r"Lower num_blocks or leave it out, lower max_model_len"),
        ({"kv_cache_memory": 64 * GIB}, r"Lower kv_cache_memory or leave it out, lower max_model_len"),
        ({"kv_cache_memory": 40 * MIB, "max_model_len": 8000}, r"Raise kv_cache_memory, lower max_model_len"),
        ({"num_blocks": 50, "max_model_len": 8000}, r"Raise num_blocks, lower max_model_len"),
        ({"free": 400 * MIB}, r"rest [\w. ]+\. Lower max_model_len"),
    ],
)
def test_the_remedy_is_for_what_does_not_fit(changes: dict[str, int], remedy: str) -> None:
    with pytest.raises(NotEnoughMemory, match=rf"{remedy}, max_num_batched_tokens or max_num_seqs, raise gpu_memory"):
        plan(**changes)


def test_no_room_for_one_block() -> None:
    with pytest.raises(NotEnoughMemory, match=r"not even one block of KV cache fits.*weights take 258\.6 MiB"):
        plan(free=400 * MIB)


def test_lengths_beyond_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: 8193 is more than the 8192 positions that m knows"):
        plan(max_model_len=8193)


def test_share_of_free_memory() -> None:
    assert plan(gpu_memory_utilization=0.5).usable_bytes == 8 * GIB


def gpu_plan(free: int, **changes: Any) -> MemoryPlan:
    """Of a device whose scratch is 64 KiB a position of the longest sequence."""
    config = EngineConfig(model="m", **changes)
    needs = DeviceNeeds(
        device="cuda",
        max_num_seqs=config.sequence_counts("cuda")[-1],
        process_bytes=600 * MIB,
        process="kernels, graphs and libraries",
        mlp_rows=4096,
        head_rows=lambda _vocab_size: config.sequence_counts("cuda")[-1],
        kv_itemsize=None if config.kv_cache_dtype == "auto" else 1,
        work_bytes=lambda length: length << 16,
    )
    return plan_memory(config, DECODER, name="m", dtype="bfloat16", free_bytes=free, needs=needs)


def test_a_gpu_gives_all_of_its_share_to_the_cache() -> None:
    made = gpu_plan(40 * GIB, gpu_memory_utilization=0.8)
    assert made.total_bytes <= made.usable_bytes < made.total_bytes + made.block_bytes
    assert made.process_bytes == 600 * MIB
    assert made.max_num_batched_tokens == 8192
    assert made.head_rows == 256
    assert "kernels, graphs and libraries" in made.render()
    assert made.scratch_bytes == 512 * MIB
    assert re.search(r"^  scratch +512\.0 MiB  attention and sampling$", made.render(), re.MULTILINE)
    assert gpu_plan(40 * GIB, kv_cache_memory=GIB).kv_bytes <= GIB


def test_large_scratch_comes_with_its_remedy() -> None:
    made = gpu_plan(5 * GIB)
    assert re.search(r"^  scratch .*; lower max_num_seqs or max_model_len for less$", made.render(), re.MULTILINE)
    assert "scratch" not in plan().render()


def test_an_8_bit_cache_holds_twice_as_much() -> None:
    assert 2 * gpu_plan(40 * GIB, kv_cache_dtype="fp8").block_bytes == gpu_plan(40 * GIB).block_bytes


@pytest.mark.parametrize(("length", "rows", "tokens"), [(1 << 22, 1, 2048), (1 << 20, 3, 64), (8192, 64, 2048)])
def test_arenas_take_what_the_core_asks_for(length: int, rows: int, tokens: int) -> None:
    decoder = make_decoder(**{**KEYS, "vocab_size": 1, "num_hidden_layers": 1, "max_position_embeddings": 1 << 22})
    config = EngineConfig(model="m", max_model_len=length, max_num_seqs=rows, max_num_batched_tokens=tokens)
    needs = cpu_needs(128, rows)
    made, with_one_more = (
        plan_memory(config, decoder, name="m", dtype="bfloat16", free_bytes=1 << 40, needs=each)
        for each in (needs, dataclasses.replace(needs, num_arenas=NUM_ARENAS + 1))
    )
    core = Core(
        block_size=16,
        num_blocks=made.num_blocks,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        vocab_size=1,
        eos_token_ids=[],
    )
    planned = (with_one_more.state_bytes - made.state_bytes) // 4
    assert planned == pytest.approx(core.arena_len(), rel=0.1, abs=8192)
    # Tables, parameters, last tokens and counts, and a word of masks.
    assert made.state_bytes == 4 * (NUM_ARENAS * planned + rows * (length // 16 + PARAM_LEN + 2 + 1 + NUM_ARENAS))


def test_shorter_sequences_leave_their_scratch_to_the_cache() -> None:
    made = gpu_plan(1700 * MIB, max_num_seqs=8, max_num_batched_tokens=512)
    assert made.max_model_len < made.model_len_limit
    assert made.total_bytes <= made.usable_bytes
    assert (made.num_blocks - 1) * 16 >= made.max_model_len


@pytest.mark.parametrize(("vocab_size", "rows"), [(32, 128), (49152, 128), (128256, 65), (1_000_000, 16)])
def test_logits_stay_bounded(vocab_size: int, rows: int) -> None:
    assert head_rows(vocab_size, 128) == rows


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 9000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\n"


def test_free_memory_without_groups(tmp_path: Path) -> None:
    assert free_memory(write(tmp_path, {"proc/meminfo": MEMINFO})) == 8_000_000 * 1024


def test_free_memory_under_the_limit_of_a_parent_group(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "5\n",
        "sys/fs/cgroup/a/memory.max": "1000000\n",
        "sys/fs/cgroup/a/memory.current": "900000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 50000\n",
    }
    assert free_memory(write(tmp_path, files)) == 150_000


def test_free_memory_inside_a_container(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/not/visible/here\n",
        "sys/fs/cgroup/memory.max": "1000000\n",
        "sys/fs/cgroup/memory.current": "400000\n",
    }
    assert free_memory(write(tmp_path, files)) == 600_000


def test_free_memory_under_an_old_style_group(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "700000\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "900000\n",
    }
    assert free_memory(write(tmp_path, files)) == 600_000


def test_free_memory_here_is_sane() -> None:
    assert 0 < free_memory() < 1 << 50
