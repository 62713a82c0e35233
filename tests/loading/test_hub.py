"""Against a small hub on 127.0.0.1, each case in a process of its own: the hub's package reads its settings once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, serve_hub

PROGRAM = """
import json, sys
from octavo.errors import OctavoError
from octavo.loading.resolve import resolve_model, resolve_tokenizer
results = []
for call, name in json.loads(sys.argv[1]):
    try:
        source = {"model": resolve_model, "tokenizer": resolve_tokenizer}[call](name)
        folder = source.path if source.path.is_dir() else source.path.parent
        results.append([source.kind, source.name, sorted(path.name for path in folder.iterdir())])
    except OctavoError as error:
        results.append([type(error).__name__, str(error), []])
print(json.dumps(results))
"""
FILES = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "chat_template.jinja": b"x", "README.md": b"text"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as hub:
        yield hub


def ask(hub: Hub, home: Path, *calls: tuple[str, str], **environment: str) -> list[list]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(calls)],
        env={**clean, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "Fetching" not in result.stderr, "no progress bar where there is no terminal"
    return json.loads(result.stdout)


def test_a_repository_is_fetched_once_and_serves_offline(hub, tmp_path):
    hub.repositories["acme/tiny"] = {
        **FILES,
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"the same again",
        "consolidated.safetensors": b"and again",
        "onnx/model.safetensors": b"elsewhere",
    }
    expected = ["folder", "acme/tiny", ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]]
    assert ask(hub, tmp_path, ("model", "acme/tiny")) == [expected]
    assert hub.fetched() == {"chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"}
    hub.requests.clear()
    assert ask(hub, tmp_path, ("model", "acme/tiny")) == [expected]
    assert not hub.fetched()
    hub.requests.clear()
    assert ask(hub, tmp_path, ("model", "acme/tiny"), HF_HUB_OFFLINE="1") == [expected]
    assert not hub.requests
    unreachable = Hub()
    unreachable.url = "http://127.0.0.1:9"
    assert ask(unreachable, tmp_path, ("model", "acme/tiny")) == [expected]


def test_other_weights_where_there_are_no_safetensors(hub, tmp_path):
    hub.repositories["acme/bin"] = {**FILES, "pytorch_model.bin": b"weights", "training_args.bin": b"x"}
    hub.repositories["acme/gguf"] = {"m.Q4_0.gguf": b"GGUF", "README.md": b"text"}
    hub.repositories["acme/many"] = {"m.Q4_0.gguf": b"GGUF", "m.Q8_0.gguf": b"GGUF"}
    binary, single, many = ask(hub, tmp_path, ("model", "acme/bin"), ("model", "acme/gguf"), ("model", "acme/many"))
    assert binary[0] == "folder"
    assert "pytorch_model.bin" in binary[2]
    assert "training_args.bin" not in binary[2]
    assert single == ["gguf", "acme/gguf", ["m.Q4_0.gguf"]]
    assert many[0] == "ModelNotFound"
    assert "m.Q4_0.gguf, m.Q8_0.gguf" in many[1]


def test_a_tokenizer_fetches_no_weights(hub, tmp_path):
    hub.repositories["acme/tiny"] = {**FILES, "model.safetensors": b"weights"}
    [[kind, name, files]] = ask(hub, tmp_path, ("tokenizer", "acme/tiny"))
    assert (kind, name) == ("config-only", "acme/tiny")
    assert files == ["chat_template.jinja", "config.json", "tokenizer.json"]


def test_errors_name_the_remedy(hub, tmp_path):
    hub.gated.add("acme/gated")
    hub.repositories["acme/empty"] = {"README.md": b"text"}
    missing, gated, empty = ask(hub, tmp_path, ("model", "acme/none"), ("model", "acme/gated"), ("model", "acme/empty"))
    assert missing[0] == gated[0] == empty[0] == "ModelNotFound"
    assert "check the spelling" in missing[1]
    assert "licence" in gated[1]
    assert "HF_TOKEN" in gated[1]
    assert "neither weights nor a config.json" in empty[1]
    [offline] = ask(hub, tmp_path, ("model", "acme/none"), HF_HUB_OFFLINE="1")
    assert offline[0] == "ModelNotFound"
    assert "cannot be reached" in offline[1]
