"""The demo model from end to end, as a person meets it. Fetched once, through pip."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Literal

import openai
import pydantic
import pytest
from octavo.bench.memory import process_tree
from octavo.bench.server_process import ServerProcess, server_process
from octavo.config import EngineConfig
from openai.types import Completion

pytestmark = [pytest.mark.demo, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SMALL = ("--max-model-len", "1024", "--max-num-seqs", "16", "--kv-cache-memory", "64MiB")


def octavo(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    config = EngineConfig(
        model="demo", served_model_name=("demo", "smol"), max_model_len=1024, max_num_seqs=16, kv_cache_memory=64 << 20
    )
    with server_process(config) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def metrics(server: ServerProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}


def test_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=40)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.choices[0].finish_reason in ("stop", "length")
    stream = client.chat.completions.create(
        model="smol",
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stop_texts_and_logprobs(client: openai.OpenAI) -> None:
    request = {"model": "demo", "prompt": "One, two, three, four, five,", "temperature": 0, "max_tokens": 16}
    whole = client.completions.create(**request, logprobs=3)
    choice = whole.choices[0]
    assert "seven" in choice.text
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
    stopped = client.completions.create(**request, stop="seven")
    assert stopped.choices[0].text == choice.text.split("seven")[0]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == "seven"


class Place(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    is_capital: bool
    continent: Literal["Africa", "America", "Asia", "Australia", "Europe"]


def test_answers_of_one_form(client: openai.OpenAI) -> None:
    held = client.chat.completions.parse(model="demo", messages=QUESTION, response_format=Place, temperature=0, n=2)
    places = [choice.message.parsed for choice in held.choices]
    assert places[0] == places[1]
    assert places[0] is not None
    assert (places[0].city, places[0].continent) == ("Paris", "Europe")
    for seed in range(3):
        extra = {"guided_choice": ["Paris", "London"], "seed": seed}
        drawn = client.chat.completions.create(model="demo", messages=QUESTION, extra_body=extra).choices[0]
        assert (drawn.message.content, drawn.finish_reason) in (("Paris", "stop"), ("London", "stop"))


def test_bad_requests_leave_the_server_serving(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context") as long:
        client.completions.create(model="demo", prompt=[100] * 1024)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="demo", prompt=[1 << 30])
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    assert client.completions.create(model="demo", prompt="x", max_tokens=2).usage.completion_tokens <= 2


def test_metrics_move_and_blocks_come_back(client: openai.OpenAI, server: ServerProcess) -> None:
    before = metrics(server)
    prompt = list(range(1000, 1200))
    for _ in range(2):
        client.completions.create(
            model="demo", prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
    after = metrics(server)
    assert after["vllm:generation_tokens_total"] - before.get("vllm:generation_tokens_total", 0) == 16
    assert after["vllm:prompt_tokens_total"] - before.get("vllm:prompt_tokens_total", 0) == 400
    # The second prompt's full blocks were the first one's.
    assert after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"] == 192
    assert after["octavo_kv_cache_blocks_cached"] > before["octavo_kv_cache_blocks_cached"]
    stream = client.completions.create(model="demo", prompt=prompt, max_tokens=500, stream=True)
    next(iter(stream))
    assert metrics(server)["octavo_kv_cache_blocks_used"] > 0
    stream.close()
    for _ in range(100):
        now = metrics(server)
        if now["octavo_kv_cache_blocks_used"] == 0:
            break
    assert now["vllm:num_requests_running"] == 0
    assert now["octavo_kv_cache_blocks_free"] == now["octavo_kv_cache_blocks"]


def answer_after_restart(client: openai.OpenAI, seconds: float) -> Completion:
    """The first answer that is no 503."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return client.completions.create(model="demo", prompt="Once", max_tokens=4)
        except openai.InternalServerError as error:
            if error.status_code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_the_end_of_the_engine_is_told_and_another_takes_its_place() -> None:
    config = EngineConfig(model="demo", max_model_len=1024, max_num_seqs=16, kv_cache_memory=64 << 20)
    with (
        server_process(config) as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        stream = client.completions.create(model="demo", prompt="Once", max_tokens=900, stream=True)
        next(iter(stream))
        (worker,) = process_tree(server.pid)[1:]
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="killed by SIGKILL"):
            list(stream)
        answer = answer_after_restart(client, 60)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert worker not in process_tree(server.pid)
        with urllib.request.urlopen(f"{server.base_url}/health", timeout=10) as health:
            assert health.status == 200


def test_run() -> None:
    done = octavo("run", "demo", "What is the capital of France?", "--max-tokens", "40", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    raw = octavo(
        "run", "demo", "-", "--raw", "--temperature", "0", "--max-tokens", "8", *SMALL, stdin="One, two, three,"
    )
    assert raw.stdout.startswith(" four"), raw


def test_chat_remembers() -> None:
    script = "My name is Alice. Say hello.\nWhat is my name?\n"
    done = octavo("chat", "demo", "--temperature", "0", "--max-tokens", "40", *SMALL, stdin=script)
    assert done.returncode == 0, done.stderr
    assert "Alice" in done.stdout


def test_plan_holds() -> None:
    plan = json.loads(octavo("plan", "demo", "--json", *SMALL).stdout)
    assert plan["num_blocks"] == (64 << 20) // plan["block_bytes"]
    # 134.5 million parameters, the embedding shared with the head.
    assert 134_000_000 < plan["weights_bytes"] / {"bfloat16": 2, "float32": 4}[plan["dtype"]] < 136_000_000
    assert re.search(r"KV cache +6\d\.\d MiB", octavo("plan", "demo", *SMALL).stdout)
    refused = octavo("plan", "demo", "--kv-cache-memory", "1000")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1


def test_bench() -> None:
    done = octavo("bench", "W2", "--runs", "1", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert 0 < result["tpot_ms"] < result["ttft_ms"]
