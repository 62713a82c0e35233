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
from octavo.server.apis.openapi.docs import PAGE
from octavo.server.apis.openapi.document import document
from octavo.server.state import ServerState
from server_fakes import FakeEngine
from server_harness import Running, application
from starlette.routing import Route


def test_every_route_is_in_it(server: Running) -> None:
    described = httpx.get(f"{server.url}/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    served = set()
    for route in application(ServerState()).routes:
        assert isinstance(route, Route)
        path = re.sub(r"{(\w+)(:\w+)?}", r"{\1}", route.path)
        served |= {(path, method.lower()) for method in route.methods or () if method != "HEAD"}
    said = {(path, method) for path, methods in described["paths"].items() for method in methods}
    assert said == served
    assert {("/v1/chat/completions", "post"), ("/v1/models/{name}", "get"), ("/docs", "get")} <= said
    ids = [operation["operationId"] for methods in described["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)
    for path, methods in described["paths"].items():
        for operation in methods.values():
            # Of what it does for who asks, not of the code behind it.
            assert re.fullmatch(r"[A-Z][^`.]{5,70}", operation["summary"]), path
            assert "Raises:" not in operation.get("description", "")


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


def test_every_field_says_what_it_is() -> None:
    described = document(application(ServerState()).routes)
    schemas = described["components"]["schemas"]
    bodies = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for methods in described["paths"].values()
        for operation in methods.values()
        if "requestBody" in operation
    }
    assert len(bodies) >= 9
    silent = {
        field
        for name in bodies
        for field, known in schemas[name]["properties"].items()
        if "description" not in known and field != "name"
    }
    assert not silent
    assert schemas["CompletionRequest"]["properties"]["max_tokens"]["description"].endswith("Default: 16.")


@pytest.mark.parametrize("stream", [False, True])
def test_the_examples_work(start: Callable[..., Running], stream: bool) -> None:
    server = start(FakeEngine(reply="Hello!"))
    described = httpx.get(f"{server.url}/openapi.json").json()
    tried = 0
    for path, methods in described["paths"].items():
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


# As much of a browser as the page needs.
BROWSER = """
class Node {
  constructor(tag) { this.tag = tag; this.children = []; this.listeners = {}; this.textContent = ''; this.value = ''; }
  append(child) { this.children.push(child); }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  get childElementCount() { return this.children.filter((child) => child instanceof Node).length; }
}
const all = (node) => [node, ...node.children.filter((child) => child instanceof Node).flatMap(all)];
const nodes = {};
const calls = [];
globalThis.document = {
  createElement: (tag) => new Node(tag), querySelector: (selector) => (nodes[selector] ||= new Node(selector)),
};
globalThis.fetch = async (url, options) => {
  calls.push([url, options]);
  if (url === 'openapi.json') return { ok: true, json: async () => DOCUMENT };
  return new Response('{"a":1}', { status: 200, headers: { 'content-type': 'application/json' } });
};
"""
VISIT = """
setTimeout(async () => {
  const boxes = all(main).filter((node) => node.tag === 'details');
  boxes.forEach((box) => box.listeners.toggle());
  const chat = boxes.find((box) => all(box).some((node) => node.textContent === '/v1/chat/completions'));
  key.value = 'secret';
  all(chat).find((node) => node.tag === 'button').listeners.click();
  await new Promise((done) => setTimeout(done, 50));
  const rows = all(chat).filter((node) => node.tag === 'tr').map((row) => all(row).map((node) => node.textContent));
  console.log(JSON.stringify({
    operations: boxes.length, call: calls[1], shown: all(chat).find((node) => node.tag === 'pre').textContent,
    rows: rows.map((row) => row.filter(Boolean).join(' ')),
  }));
}, 20);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run JavaScript")
def test_the_docs_show_every_operation_and_try_them() -> None:
    described = document(application(ServerState()).routes)
    (script,) = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)
    program = f"const DOCUMENT = {json.dumps(described)};\n{BROWSER}\n{script}\n{VISIT}"
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["operations"] == sum(map(len, described["paths"].values()))
    url, options = seen["call"]
    assert url == "v1/chat/completions"
    assert options["headers"] == {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    assert json.loads(options["body"])["messages"]
    assert json.loads(seen["shown"].partition("\n\n")[2]) == {"a": 1}
    rows = {row.partition(" ")[0]: row for row in seen["rows"]}
    assert rows["temperature"].startswith("temperature number ≥ 0 ≤ 2 0 takes the likeliest token")
    assert rows["stream"] == "stream boolean Send the output as it is generated."
