"""The files in deploy/ name existing metrics, labels, routes and options."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import functools
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import octavo
import openai
import pytest
import yaml
from octavo.cli import _USAGE
from octavo.cli.app import app
from octavo.server import lifecycle
from octavo.server.access.hosts import allowed_hosts
from octavo.server.access.middleware import HostCheck
from octavo.server.app import _MODULES
from octavo.server.service_manager import notify
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import FakeEngine
from server_harness import Running
from typer.main import get_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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


@functools.cache
def options_of_serve() -> frozenset[str]:
    return frozenset(name for option in get_command(app).commands["serve"].params for name in option.opts)


def check_options(arguments: list[str]) -> None:
    """All that begin with -- are options, and the command line takes them together."""
    for argument in arguments:
        if argument.startswith("--"):
            assert argument.split("=")[0] in options_of_serve(), argument
    # A model of that name is not looked for: what is checked is the line itself, to its end.
    parsed = get_command(app).commands["serve"].make_context("serve", list(arguments))
    assert parsed.params["models"]


def option_value(arguments: list[str], name: str) -> str:
    """Of `--name=value` or `--name value`."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return words[words.index(name) + 1]


def server_paths() -> set[str]:
    state = ServerState()
    return {route.path for module in _MODULES for route in module.routes(state)}


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The documents of the Kubernetes file, by kind."""
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/octavo.yaml").read_text()))
    by_kind = {document["kind"]: document for document in documents}
    assert sorted(by_kind) == ["PodDisruptionBudget", "Service", "StatefulSet"]
    return by_kind


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (container,) = manifest["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_kubernetes(manifest: dict[str, Any]) -> None:
    replicas = manifest["StatefulSet"]["spec"]
    pod = replicas["template"]["spec"]
    container = container_of(manifest)
    assert container["command"] == ["octavo"]
    assert container["args"][0] == "serve"
    check_options(container["args"][1:])
    assert option_value(container["args"], "--port") == str(container["ports"][0]["containerPort"])
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in server_paths()
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
    needed = sum(float(option_value(container["args"], name)) for name in ("--drain-delay", "--shutdown-timeout"))
    # What ends without time of its own takes up to so much more.
    assert pod["terminationGracePeriodSeconds"] >= needed + lifecycle._GRACEFUL_SHUTDOWN_S + 5
    # A pod is taken off the endpoints when it is not ready, and is asked again that often.
    assert float(option_value(container["args"], "--drain-delay")) >= container["readinessProbe"]["periodSeconds"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in replicas["volumeClaimTemplates"]}
    assert mounts == claims | {volume["name"] for volume in pod["volumes"]}
    labels = replicas["template"]["metadata"]["labels"]
    for selector in (
        replicas["selector"]["matchLabels"],
        manifest["Service"]["spec"]["selector"],
        manifest["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    # What is written goes to a volume, as nothing else can be written to.
    places = tuple(mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly"))
    for variable in container["env"]:
        assert variable["name"] == "HF_TOKEN" or variable["value"].startswith(places)


def test_a_rollout_needs_no_second_gpu(manifest: dict[str, Any]) -> None:
    """A Deployment with its default would start the new pod beside the old one, which has the GPU and the volume."""
    replicas = manifest["StatefulSet"]["spec"]
    assert replicas["updateStrategy"]["type"] == "RollingUpdate"
    assert replicas["volumeClaimTemplates"][0]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert container_of(manifest)["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_host_names_of_a_cluster_are_allowed(manifest: dict[str, Any]) -> None:
    arguments = container_of(manifest)["args"]
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("--allowed-hosts")]
    allowed = allowed_hosts(given, option_value(arguments, "--host"), has_keys=True)
    answered: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answered.append(dict(scope["headers"])[b"host"].decode())

    async def ask() -> None:
        check = HostCheck(app, allowed)
        for host in hosts:
            await check({"type": "http", "http_version": "1.1", "headers": [(b"host", host.encode())]}, None, None)

    service = manifest["Service"]["metadata"]["name"]
    hosts = [
        f"{service}:8000",
        f"{service}.llm.svc.cluster.local",
        "10.1.2.3:8000",
        "[fd00::7]:8000",
        "llm.example.com",
    ]
    asyncio.run(ask())
    assert answered == hosts


@pytest.mark.parametrize("path", ["kubernetes/ingress.yaml", "kubernetes/httproute.yaml"])
def test_ways_in(path: str, manifest: dict[str, Any]) -> None:
    (document,) = yaml.safe_load_all((DEPLOY / path).read_text())
    (rule,) = document["spec"]["rules"]
    port = manifest["Service"]["spec"]["ports"][0]
    if document["kind"] == "HTTPRoute":
        assert set(rule["timeouts"].values()) == {"0s"}
        (prefix,) = (match["path"]["value"] for match in rule["matches"])
        (backend,) = rule["backendRefs"]
        assert backend == {"name": manifest["Service"]["metadata"]["name"], "port": port["port"]}
    else:
        annotations = document["metadata"]["annotations"]
        assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
        size = int(annotations["nginx.ingress.kubernetes.io/proxy-body-size"].removesuffix("m")) << 20
        assert size > ServerSettings().max_body_bytes
        (found,) = rule["http"]["paths"]
        prefix = found["path"]
        service = found["backend"]["service"]
        assert service == {"name": manifest["Service"]["metadata"]["name"], "port": {"name": port["name"]}}
    let_in = {route for route in server_paths() if route.startswith(f"{prefix}/")}
    assert {"/v1/chat/completions", "/v1/models"} <= let_in
    assert not let_in & {"/metrics", "/health"}


@pytest.mark.parametrize(
    ("path", "endpoints"), [("servicemonitor", "endpoints"), ("podmonitor", "podMetricsEndpoints")]
)
def test_monitors_find_the_pods(path: str, endpoints: str, manifest: dict[str, Any]) -> None:
    (document,) = yaml.safe_load_all((DEPLOY / f"prometheus/{path}.yaml").read_text())
    (endpoint,) = document["spec"][endpoints]
    assert endpoint["path"] in server_paths()
    selected = manifest["Service"] if path == "servicemonitor" else manifest["StatefulSet"]["spec"]["template"]
    assert document["spec"]["selector"]["matchLabels"].items() <= selected["metadata"]["labels"].items()
    names = {port["name"] for port in manifest["Service"]["spec"]["ports"] + container_of(manifest)["ports"]}
    assert {endpoint["port"]} == names


def test_keda_scales_what_is_served(manifest: dict[str, Any]) -> None:
    (document,) = yaml.safe_load_all((DEPLOY / "keda/scaledobject.yaml").read_text())
    target = document["spec"]["scaleTargetRef"]
    found = manifest[target["kind"]]
    assert (target["apiVersion"], target["name"]) == (found["apiVersion"], found["metadata"]["name"])
    name = option_value(container_of(manifest)["args"], "--served-model-name")
    for query in queries_of("keda/scaledobject.yaml"):
        assert re.findall(r'model_name="([^"]*)"', query) == [name]


def dockerfile() -> list[tuple[str, str]]:
    """Instructions and what follows them."""
    text = re.sub(
        r"\\\n", " ", re.sub(r"^\s*#.*\n", "", (DEPLOY / "docker/Dockerfile").read_text(), flags=re.MULTILINE)
    )
    return [(line.split()[0], line.split(None, 1)[1]) for line in text.splitlines() if line]


def test_docker(manifest: dict[str, Any]) -> None:
    instructions = dockerfile()
    bases = [rest.split()[0] for name, rest in instructions if name == "FROM"]
    assert all(re.fullmatch(r"[a-z]+:\d[\w.-]+", base) for base in bases), "every base has a tag"
    cargo = tomllib.loads((DEPLOY.parent / "Cargo.toml").read_text())
    assert bases[0].startswith(f"rust:{cargo['workspace']['package']['rust-version']}-")
    # The extension links the C library of the stage that it was built in.
    assert bases[1] == bases[2]
    last = instructions[[name for name, _ in instructions].index("FROM", 5) :]
    values: dict[str, list[str]] = {}
    for name, rest in last:
        values.setdefault(name, []).append(rest)
    pod = manifest["StatefulSet"]["spec"]["template"]["spec"]["securityContext"]
    assert values["USER"] == [f"{pod['runAsUser']}:{pod['runAsGroup']}"]
    assert f"useradd --uid {pod['runAsUser']} " in " ".join(values["RUN"])
    assert json.loads(values["ENTRYPOINT"][0]) == container_of(manifest)["command"]
    command = json.loads(values["CMD"][0])
    assert command[0] == "serve"
    check_options(command[1:])
    assert values["EXPOSE"] == [str(container_of(manifest)["ports"][0]["containerPort"])]
    (pinned,) = re.findall(r"^TORCH \?= (\S+)$", (DEPLOY.parent / "Makefile").read_text(), re.MULTILINE)
    assert values["ARG"] == [f"TORCH={pinned}"]
    (maturin,) = (found for _, rest in instructions if (found := re.search(r"'(maturin[^']+)'", rest)))
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    assert [maturin[1]] == project["build-system"]["requires"]
    assert re.search(r"\[otel\]", " ".join(values["RUN"]))
    assert "otel" in project["project"]["optional-dependencies"]
    # One variable of the image may be overruled by the manifest's, and they agree.
    image = dict(pair.split("=") for pair in " ".join(values["ENV"]).split())
    for variable in container_of(manifest)["env"]:
        if variable["name"] in image:
            assert variable["value"] == image[variable["name"]]
    for text in (container_of(manifest)["image"], (DEPLOY / "docker/Dockerfile").read_text()):
        assert set(re.findall(r"octavo:([\d.]+)", text)) == {octavo.__version__}


def test_dockers_context_is_what_the_wheel_needs(tmp_path: Path) -> None:
    root = DEPLOY.parent
    lines = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    taken = [line[1:] for line in lines if line.startswith("!")]
    for name in taken:
        if (root / name).is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(root / name, tmp_path / name, symlinks=True, ignore=ignored)
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(root / name, tmp_path / name)
    command = ["cargo", "metadata", "--locked", "--offline", "--format-version", "1", "--no-deps"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["packages"]) == len(list(tmp_path.glob("**/Cargo.toml"))) - 1
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    for file in (project["readme"], *project["license-files"]):
        assert (tmp_path / file).is_file()
    assert (tmp_path / "python/octavo/kernels/__init__.py").is_file(), "through a link"


def test_systemd(tmp_path: Path) -> None:
    file = DEPLOY / "systemd/octavo.service"
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    unit.optionxform = str
    unit.read(file)
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[1] == "serve"
    check_options(words[2:])
    needed = sum(float(option_value(words, name)) for name in ("--drain-delay", "--shutdown-timeout"))
    assert float(unit["Service"]["TimeoutStopSec"]) >= needed + lifecycle._GRACEFUL_SHUTDOWN_S + 5
    assert unit["Service"]["Type"] == "notify"
    assert unit["Service"]["RestartPreventExitStatus"] == str(_USAGE)
    if shutil.which("systemd-analyze"):
        # It looks for the program too.
        own = tmp_path / "octavo.service"
        own.write_text(file.read_text().replace(words[0], sys.executable))
        done = subprocess.run(["systemd-analyze", "verify", own], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


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
