"""The benches' reports: their fields, their counts, against engines without a model."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from octavo.bench import command, latency, offline_engine, step, workloads
from octavo.bench.command import BENCHES, BenchOptions, run_bench
from octavo.bench.memory import long_run, private_bytes, process_tree
from octavo.bench.serve import percentiles
from octavo.bench.server_process import config_arguments
from octavo.cli import main
from octavo.config import EngineConfig
from octavo.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from octavo.server.state import ServerState
from server_fakes import FakeEngine
from server_harness import Running

CONFIG = EngineConfig(model="fake", max_num_seqs=8, num_blocks=50)


class FakeLLM:
    """Answers as long as asked; `short_by` makes it stop early."""

    short_by = 0
    max_model_len = 8192
    config = CONFIG
    calls: ClassVar[list[list[tuple[int, int]]]] = []

    def __init__(self, model: str, **settings: Any) -> None:
        assert model == "fake"
        assert settings["num_blocks"] == 50
        self.model = SimpleNamespace(max_model_len=self.max_model_len, device="cpu")

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[Any]:
        assert all(one.ignore_eos and one.temperature == 0 for one in params)
        self.calls.append([(len(prompt), one.max_tokens or 0) for prompt, one in zip(prompts, params, strict=True)])
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * (one.max_tokens - self.short_by))])
            for one in params
        ]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr(offline_engine, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "calls", [])
    return FakeLLM


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("offline", {"output_tok_s", "total_tok_s", "seconds"}),
        ("shared", {"output_tok_s", "total_tok_s", "seconds"}),
        ("short", {"requests_s", "output_tok_s"}),
        ("W1", {"output_tok_s", "total_tok_s", "seconds"}),
        ("demo-shared", {"output_tok_s", "total_tok_s", "seconds"}),
        ("W2", {"batch", "ttft_ms", "tpot_ms"}),
        ("latency", {"batch", "ttft_ms", "tpot_ms"}),
        ("prefill", {"prompt_tokens", "ms", "tok_s"}),
    ],
)
def test_fields(llm: type[FakeLLM], name: str, fields: set[str]) -> None:
    report = run_bench(name, CONFIG, BenchOptions(runs=2))
    assert set(report) == {"bench", "version", "machine", "model", "config", "results"}
    assert report["bench"] == name
    assert report["config"]["num_blocks"] == 50
    for result in report["results"]:
        assert set(result) == fields | {"runs"}
        assert result["runs"] == 2
    json.dumps(report)


def test_offline_runs_the_whole_workload_each_time(llm: type[FakeLLM]) -> None:
    run_bench("W1", CONFIG, BenchOptions(runs=2))
    sizes = [(len(prompt), output) for prompt, output in workloads.demo("W1")]
    assert llm.calls[1:] == [sizes, sizes]


def test_latency_takes_the_difference() -> None:
    # 10 ms for the first token of a batch, 2 ms for each one after it.
    engine: Any = SimpleNamespace(seconds=lambda requests: 0.010 + 0.002 * (requests[0][1] - 1))
    results = latency.latency.on(engine, BenchOptions(runs=3, batch=(1, 8)))
    assert results == [{"batch": batch, "ttft_ms": 10.0, "tpot_ms": pytest.approx(2.0), "runs": 3} for batch in (1, 8)]
    assert latency.demo_latency.on(engine, BenchOptions(runs=1))[0]["tpot_ms"] == pytest.approx(2.0)


def test_a_gpu_is_warmed_up_with_every_number_of_rows(llm: type[FakeLLM]) -> None:
    fake = llm("fake", num_blocks=50)
    fake.model = SimpleNamespace(max_model_len=100, max_num_seqs=48, device="cuda")
    fake.config = EngineConfig(model="fake", max_num_seqs=48, max_num_batched_tokens=4096)
    offline_engine.OfflineEngine(fake).warm_up()  # type: ignore[arg-type]
    assert [call[0][0] for call in llm.calls[1:-1]] == [16, 32, 64] * 2
    lengths = [output for _, output in llm.calls[-1]]
    rows_left = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert rows_left == [rows for rows in (48, 40, *range(32, 0, -1)) for _ in range(2)]


def test_prefill_leaves_out_what_does_not_fit(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    report = run_bench("prefill", CONFIG, BenchOptions(runs=1))
    assert [result["prompt_tokens"] for result in report["results"]] == [512, 2048]
    assert "8192 tokens" in capsys.readouterr().err


def test_a_short_answer_fails_the_bench(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "short_by", 1)
    with pytest.raises(RuntimeError, match="tokens instead of"):
        run_bench("W2", CONFIG, BenchOptions(runs=1))


def test_json_is_one_object_and_nothing_else(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "w2.png"
    with pytest.raises(SystemExit) as exited:
        main(["bench", "W2", "--model", "fake", "--num-gpu-blocks-override", "50", "--json", "--plot", str(picture)])
    assert exited.value.code == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["batch"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_table(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "W2", "--model", "fake", "--num-gpu-blocks-override", "50"])
    assert "tpot_ms" in capsys.readouterr().out


def test_every_bench_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "list"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in BENCHES)
    assert command.BENCHES.keys() >= {"offline", "latency", "prefill", "shared", "short", "start", "step", "serve"}


def test_step_measures_the_core() -> None:
    result = step._case(8, 20, 1, CONFIG)
    assert (result["decode_rows"], result["waiting"]) == (8, 20)
    assert 0 < result["plan_us"] < 1000
    assert 0 < result["commit_us"] < 1000
    assert result["step_us"] >= max(result["plan_us"], result["commit_us"])


@pytest.mark.parametrize("option", [{"concurrency": (1, 4)}, {"request_rate": (200.0,)}])
def test_serve_against_an_endpoint(option: dict[str, Any]) -> None:
    server = Running(FakeEngine(0.001, max_model_len=4096), ServerState())
    try:
        options = BenchOptions(
            runs=2, num_prompts=6, base_url=server.url, ttft_slo_ms=60_000, tpot_slo_ms=0.1, **option
        )
        report = run_bench("W4", CONFIG, options)
    finally:
        server.stop()
    key = "concurrency" if "concurrency" in option else "rate"
    assert [result[key] for result in report["results"]] == list(next(iter(option.values())))
    for result in report["results"]:
        assert set(result) == {
            key, "requests_s", "output_tok_s", "goodput_requests_s", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms",
            "requests", "runs",
        }  # fmt: skip
        assert result["requests"] == 6
        # A token takes a millisecond or more, and the limit is a tenth of one.
        assert result["goodput_requests_s"] == 0
        assert result["tpot_ms"]["p50"] >= 1
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert 0 < result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    drawn = [prompt for repeat in range(2) for prompt, _ in workloads.demo("W4", repeat)[:6]]
    assert all(prompt in server.engine.prompts for prompt in drawn)


def test_percentiles_are_interpolated() -> None:
    assert percentiles([float(value) for value in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([1.0, 2.0])["p50"] == 1.5
    assert percentiles([]) == {"p50": 0.0, "p90": 0.0, "p99": 0.0}


def test_options_of_a_server_process() -> None:
    config = EngineConfig(model="m", num_blocks=9, enable_prefix_caching=False, served_model_name=("a",), seed=3)
    assert config_arguments(config) == [
        "--num-gpu-blocks-override", "9", "--no-enable-prefix-caching", "--seed", "3", "--served-model-name", "a",
    ]  # fmt: skip
    assert config_arguments(EngineConfig(model="m")) == []


def test_a_long_run_stays_flat() -> None:
    result = long_run(20_000)
    assert result["requests"] == 20_000
    assert result["growth_mib"] < 8


def test_memory_of_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in process_tree(os.getpid())
        held = bytearray(b"x" * (64 << 20))
        before = private_bytes(os.getpid())
        assert before > len(held)
        with mmap.mmap(-1, 64 << 20) as shared:
            shared.write(b"x" * len(shared))
            assert 60 << 20 < private_bytes(os.getpid()) - before < 70 << 20
