"""`/tokenize`, `/detokenize`, `/tokenizer_info`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_fakes import FakeEngine
from server_harness import Running


def post(server: Running, path: str, payload: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=payload, timeout=20)


def test_there_and_back(server: Running) -> None:
    text = "Grüße, 世界 🎉"
    done = post(server, "/tokenize", {"prompt": text}).json()
    assert done == {
        "count": len(text) + 1,
        "max_model_len": 256,
        "tokens": [1, *map(ord, text)],
        "token_strs": None,
    }
    assert post(server, "/detokenize", {"tokens": done["tokens"]}).json() == {"prompt": text}
    bare = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}).json()
    assert bare["token_strs"] == list(text)


def test_messages(server: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    done = post(server, "/tokenize", {"messages": messages, "model": "fake"}).json()
    assert "".join(map(chr, done["tokens"])) == "<user>Hi<assistant>"
    done = post(server, "/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert "".join(map(chr, done["tokens"])) == "<user>Hi"
    # The template wrote no start token, so the tokenizer's is the only one.
    done = post(server, "/tokenize", {"messages": messages, "add_special_tokens": True}).json()
    assert done["tokens"][:2] == [1, ord("<")]


def test_a_start_token_is_there_once(server: Running) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    tokenizer.apply_chat_template = lambda messages, **arguments: "\x01Hi"  # type: ignore[method-assign]
    body = {"messages": [{"role": "user", "content": "Hi"}], "add_special_tokens": True}
    assert post(server, "/tokenize", body).json()["tokens"] == [1, ord("H"), ord("i")]


def test_tokenizer_info(server: Running) -> None:
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    assert info["bos_token"] == "\x01"
    assert info["eos_token"] is None
    assert info["chat_template"] == "{{ messages }}"
    assert info["model_max_length"] == 256
    assert httpx.get(f"{server.url}/tokenizer_info?model=other").status_code == 404


@pytest.mark.parametrize(
    ("path", "payload", "named"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a" * 5000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1 << 25]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_refusals(server: Running, path: str, payload: Any, named: str) -> None:
    done = post(server, path, payload)
    assert done.status_code == 400, done.text
    assert done.json()["error"]["param"] == named


def test_without_a_tokenizer(start: Any) -> None:
    engine = FakeEngine()
    engine.tokenizer = None
    server = start(engine)
    assert post(server, "/tokenize", {"prompt": "a"}).status_code == 400
    assert post(server, "/detokenize", {"tokens": [5]}).status_code == 400
    assert httpx.get(f"{server.url}/tokenizer_info").status_code == 400
