"""Conversations of any form, through the real template and tokenizer: an answer or a refusal, never a fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from server_harness import Running

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
TEXT = st.text(max_size=12) | st.sampled_from(["<|im_end|>", "{{ 7 * 7 }}", "{% raise %}", "\0", "\u2028", "🎉", ""])
PART = (
    st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "output_text"]), "text": TEXT})
    | st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "tool_result", "thinking"]), "text": JSON})
    | JSON
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]) | JSON,
        "content": TEXT | st.lists(PART, max_size=3) | JSON,
    },
    optional={
        "name": JSON,
        "tool_call_id": JSON,
        "reasoning_content": JSON,
        "type": st.sampled_from(["message", "reasoning", "function_call_output"]),
        "tool_calls": JSON
        | st.lists(
            st.fixed_dictionaries(
                {"function": st.fixed_dictionaries({"name": JSON, "arguments": JSON | st.just('{"a": [1]}')})}
            ),
            max_size=2,
        ),
    },
)
FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
    "/tokenize": "messages",
}


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    async def starting() -> AsyncEngine:
        return await AsyncEngine.start(EngineConfig(model="fake?end_after=5", load_format="fake", max_model_len=512))

    server = Running(None, ServerState(ServerSettings()), starting=starting)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def http(real: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=30) as client:
        yield client


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    messages=st.lists(MESSAGE, max_size=4) | JSON,
    extra=st.dictionaries(
        st.sampled_from(
            [
                "chat_template_kwargs",
                "documents",
                "system",
                "instructions",
                "tools",
                "tool_choice",
                "metadata",
                "continue_final_message",
                "add_generation_prompt",
                "echo",
                "stop",
                "logprobs",
                "reasoning",
            ]
        ),
        JSON,
        max_size=2,
    ),
)
@pytest.mark.parametrize("path", FIELDS)
def test_any_conversation(http: httpx.Client, path: str, messages: Any, extra: dict[str, Any]) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**extra, FIELDS[path]: messages, limit: 3}
    done = http.post(path, json=body)
    assert done.status_code in (200, 400), (body, done.text)
    if done.status_code == 400:
        assert done.json()["error"]["message"]
