"""`/openapi.json` says what the server does, and `/docs` shows it without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable

import httpx
import jsonschema
import pytest
from octavo.server.docs import PAGE
from octavo.server.state import ServerState
from server_fakes import FakeEngine
from server_harness import Running, application
from starlette.routing import Route


def test_every_route_is_in_it(server: Running) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    served = set()
    for route in application(ServerState()).routes:
        assert isinstance(route, Route)
        path = re.sub(r"{(\w+)(:\w+)?}", r"{\1}", route.path)
        served |= {(path, method.lower()) for method in route.methods or () if method != "HEAD"}
    said = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert said == served
    assert {("/v1/chat/completions", "post"), ("/v1/models/{name}", "get"), ("/docs", "get")} <= said
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)
    summaries = [operation["summary"] for methods in document["paths"].values() for operation in methods.values()]
    assert all(summaries)


def test_schemas_are_schemas_and_references_lead_somewhere(server: Running) -> None:
    text = httpx.get(f"{server.url}/openapi.json").text
    schemas = json.loads(text)["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in schemas
    assert schemas["ChatCompletionRequest"]["properties"]["temperature"]["anyOf"][0] == {
        "type": "number",
        "minimum": 0,
        "maximum": 2,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_the_examples_work(start: Callable[..., Running], stream: bool) -> None:
    server = start(FakeEngine(reply="Hello!"))
    document = httpx.get(f"{server.url}/openapi.json").json()
    tried = 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            example = content.get("example")
            if example is None or (stream and "text/event-stream" not in operation["responses"]["200"]["content"]):
                continue
            if path.startswith("/api/"):
                example["model"] = "fake"
            body = example | ({"stream": True} if stream else {})
            done = httpx.request(method, server.url + path, json=body)
            assert done.status_code == 200, (path, done.text)
            tried += 1
    assert tried >= (5 if stream else 10)


def test_root_path(start: Callable[..., Running]) -> None:
    server = start(root_path="/llm")
    assert httpx.get(f"{server.url}/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_docs_need_nothing_from_elsewhere(server: Running) -> None:
    done = httpx.get(f"{server.url}/docs")
    assert done.headers["content-type"] == "text/html; charset=utf-8"
    policy = done.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", done.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "http:" not in done.text
    assert "https:" not in done.text
    assert "innerHTML" not in done.text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to read JavaScript")
def test_the_script_of_the_docs_is_javascript() -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)
    done = subprocess.run(["node", "--check", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
