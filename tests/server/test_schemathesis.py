"""Requests made from `/openapi.json`: none breaks the server, and what it answers is what the document says.

`OCTAVO_FUZZ_EXAMPLES` requests a route; few by default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from octavo.server.apis.openapi.document import document
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from server_fakes import FakeEngine
from server_harness import Running, application

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "20"))


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Running]:
    server = Running(FakeEngine(reply="Yes, 🎉.", constrains_output=True), ServerState(ServerSettings()))
    yield server
    # It serves as before, and nothing still runs.
    body = {"prompt": "Hi", "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200
    assert server.engine.running == 0
    server.stop()


@pytest.fixture(scope="module")
def schema(fuzzed: Running) -> Any:
    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")


# Fields that the schema lets be anything and the server refuses, or that make no sense at random.
TAMED: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "Hi",
    "input": "Hi",
    "inputs": "Hi",
    "system": "Be brief",
}
REFUSED = [
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "use_beam_search",
    "logits_processors",
    "prompt_logprobs",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "grammar",
    "regex",
    "ebnf",
    "output_config",
    "output_format",
    "format",
    "chat_template",
    "functions",
    "function_call",
    "tools",
    "tool_choice",
    "suffix",
    "previous_response_id",
    "store",
    "conversation",
    "background",
    "truncation",
    "thinking",
    "mcp_servers",
    "text",
    "best_of",
    "min_tokens",
    "stream_options",
    "truncate_prompt_tokens",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "timeout",
    "cache_salt",
    "max_new_tokens",
    "priority",
]


def operations() -> list[tuple[str, str, str]]:
    paths = document(application(ServerState()).routes)["paths"]
    return [
        (method, path, kind)
        for path, methods in paths.items()
        for method, operation in methods.items()
        for kind in (("right", "tamed", "wrong") if "requestBody" in operation else ("right",))
    ]


@pytest.mark.parametrize(("method", "path", "kind"), operations())
def test_no_request_breaks_the_server(schema: Any, method: str, path: str, kind: str) -> None:
    """`right` bodies are of the schema, `wrong` ones are not, `tamed` ones are right and mostly served."""
    operation = schema[path][method.upper()]
    mode = schemathesis.GenerationMode("negative" if kind == "wrong" else "positive")
    named = schemathesis.specs.openapi.checks
    checks = [
        schemathesis.checks.not_a_server_error,
        named.status_code_conformance,
        named.content_type_conformance,
        named.response_schema_conformance,
    ]
    served = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        nonlocal served
        if kind == "tamed" and isinstance(case.body, dict):
            case.body = {key: value for key, value in case.body.items() if key not in REFUSED and key not in TAMED}
            case.body |= {key: TAMED[key] for key in fields if key in TAMED and not (chat and key == "prompt")}
            if path == "/v1/messages":
                case.body["max_tokens"] = 5
        served += case.call_and_validate(checks=checks, timeout=20).status_code == 200

    body = operation.definition.raw.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = body.get("schema", {}).get("$ref", "").split("/")[-1]
    fields = schema.raw_schema["components"]["schemas"][name]["properties"] if name else {}
    chat = "messages" in fields or "input" in fields
    call()
    if kind == "tamed":
        assert served
