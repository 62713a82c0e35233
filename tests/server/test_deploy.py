"""What lies in deploy/ names metrics, labels, routes and options that there are."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from octavo.server.app import _MODULES
from octavo.server.service_manager import notify
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import FakeEngine
from server_harness import Running

DEPLOY = Path(__file__).parents[2] / "deploy"
KEYWORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan", "atan2", "start", "end"}
FUNCTIONS = {
    "sum", "avg", "min", "max", "count", "rate", "irate", "increase", "histogram_quantile", "label_values", "topk",
    "clamp_min", "absent", "vector",
}  # fmt: skip
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def read_query(query: str) -> tuple[dict[str, set[str]], set[str]]:
    """Metrics a PromQL query selects with the labels it asks of each, and labels it groups by."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', query)
    assert text.count("(") == text.count(")"), query
    assert text.count("{") == text.count("}"), query
    text = re.sub(r"\[[^\]]*\]", "", text)
    groups = {label.strip() for found in GROUPING.findall(text) for label in found.split(",") if label.strip()}
    text = re.sub(r"\bgroup_(?:left|right)\b", " ", GROUPING.sub(" ", text))
    metrics: dict[str, set[str]] = {}
    for match in re.finditer(rf"({NAME.pattern})(\s*\{{[^}}]*\}}|\s*\()?", re.sub(r"\b\d[\w.]*", " ", text)):
        name, rest = match[1], (match[2] or "").strip()
        if rest == "(":
            assert name in FUNCTIONS, f"{name} in {query}"
        elif name not in KEYWORDS:
            labels = {NAME.match(part.strip())[0] for part in rest.strip("{}").split(",") if part.strip()}
            metrics.setdefault(name, set()).update(labels)
    return metrics, groups


def test_reading_queries() -> None:
    query = (
        'histogram_quantile(0.99, sum by(le, x) (rate(vllm:a_bucket{m=~"sum(q)",n="1"}[5m]))) / on() group_left b > 2e3'
    )
    assert read_query(query) == ({"vllm:a_bucket": {"m", "n"}, "b": set()}, {"le", "x"})
    assert read_query("label_values(up, job)")[0] == {"up": set(), "job": set()}
    with pytest.raises(AssertionError, match="summ in"):
        read_query("summ(up)")


@pytest.fixture(scope="module")
def exposed() -> Iterator[dict[str, set[str]]]:
    """Labels of every sample of a live server, by name."""
    server = Running(FakeEngine(), ServerState(ServerSettings()))
    try:
        with server.client() as client:
            client.completions.create(model="fake", prompt=[72] * 20, max_tokens=4)
            with contextlib.suppress(openai.NotFoundError):
                client.completions.create(model="none", prompt=[72])
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
            text = response.read().decode()
    finally:
        server.stop()
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def queries_of(path: str) -> list[str]:
    """All PromQL in a file."""
    text = (DEPLOY / path).read_text()
    if path.endswith("json"):
        board = json.loads(text)
        return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(item for key, item in value.items() if key in ("expr", "query") and isinstance(item, str))
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    for document in yaml.safe_load_all(text):
        walk(document)
    return found


@pytest.mark.parametrize(
    ("path", "least"), [("grafana/octavo.json", 60), ("prometheus/alerts.yaml", 9), ("keda/scaledobject.yaml", 2)]
)
def test_queries_name_what_a_server_exposes(exposed: dict[str, set[str]], path: str, least: int) -> None:
    queries = queries_of(path)
    assert len(queries) >= least
    for query in queries:
        metrics, groups = read_query(query)
        assert metrics, query
        for name, labels in metrics.items():
            assert name in exposed, f"{name} in {query}"
            assert labels <= exposed[name], f"{labels - exposed[name]} of {name} in {query}"
        assert groups <= set().union(*(exposed[name] for name in metrics)), query


def test_the_dashboards_variables(exposed: dict[str, set[str]]) -> None:
    board = json.loads((DEPLOY / "grafana/octavo.json").read_text())
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    for name in ("model_name", "variant"):
        metric, label = re.fullmatch(
            r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", variables[name]["definition"]
        ).groups()
        assert label in exposed[metric]
    used = set(re.findall(r"\$(\w+)", json.dumps(board["panels"])))
    assert used - {"__rate_interval"} <= set(variables)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    titles = " ".join(panel["title"] for panel in board["panels"])
    # Those that vLLM's own dashboards have.
    for asked in (
        "End-to-end", "Token throughput", "Time per output token", "Scheduler", "Time to first token", "Prompt lengths",
        "Answer lengths", "Finish reasons", "Queue, prefill and decode", "max_tokens",
    ):  # fmt: skip
        assert asked in titles


def test_keda_gets_one_number() -> None:
    """A query of several series breaks a scaler."""
    for query in queries_of("keda/scaledobject.yaml"):
        assert re.match(r"(sum|avg|max)\(", query)
        assert " by" not in query


def options_of_serve() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", "--help"], capture_output=True, text=True, check=True,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    return done.stdout


def option_value(arguments: list[str], name: str) -> str:
    """Of `--name=value` or `--name value`."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return words[words.index(name) + 1]


def server_paths() -> set[str]:
    state = ServerState()
    return {route.path for module in _MODULES for route in module.routes(state)}


def test_kubernetes() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/octavo.yaml").read_text()))
    assert [document["kind"] for document in documents] == [
        "Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget",
    ]  # fmt: skip
    pod = documents[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for argument in container["args"]:
        if argument.startswith("--"):
            assert re.search(rf"{argument.split('=')[0]}\b", options_of_serve()), argument
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in server_paths()
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
    needed = sum(float(option_value(container["args"], name)) for name in ("--drain-delay", "--shutdown-timeout"))
    assert pod["terminationGracePeriodSeconds"] > needed
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    labels = documents[0]["spec"]["template"]["metadata"]["labels"]
    for document in (documents[1]["spec"]["selector"], documents[3]["spec"]["selector"]["matchLabels"]):
        assert document.items() <= labels.items()


def test_systemd() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    unit.optionxform = str
    unit.read(DEPLOY / "systemd/octavo.service")
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[1] == "serve"
    for word in words:
        if word.startswith("--"):
            assert re.search(rf"{word}\b", options_of_serve()), word
    needed = sum(float(option_value(words, name)) for name in ("--drain-delay", "--shutdown-timeout"))
    assert float(unit["Service"]["TimeoutStopSec"]) > needed
    assert unit["Service"]["Type"] == "notify"


def test_nginx() -> None:
    text = (DEPLOY / "nginx/octavo.conf").read_text()
    assert text.count("{") == text.count("}")
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    assert all(line.endswith(("{", "}", ";")) for line in lines if line)
    locations = re.findall(r"location = (\S+)", text)
    assert len(locations) >= 3
    assert set(locations) <= server_paths()
    assert "proxy_buffering off;" in text
    body = int(re.search(r"client_max_body_size (\d+)m;", text)[1]) << 20
    assert body > ServerSettings().max_body_bytes


def test_every_yaml_parses() -> None:
    files = sorted(DEPLOY.rglob("*.yaml"))
    assert len(files) >= 5
    for file in files:
        assert all(isinstance(document, dict) for document in yaml.safe_load_all(file.read_text())), file


def test_telling_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        assert notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    path.unlink()
    assert not notify("READY=1")
