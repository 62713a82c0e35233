"""The configuration file: its keys, its errors, its documentation."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from octavo.cli.serve_plan import ServeOptions, ServePlan, plan_serve
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server import config_file
from octavo.server.config_file import ModelPlan, divide_memory, populate, read_serve_file
from octavo.server.settings import ServerSettings
from registry_fakes import Engines, registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WHOLE = """
[server]
host = "0.0.0.0"
port = 8100
drain_delay = 2
max_loaded_models = 2
model_memory = "4GiB"
idle_unload = 600

[defaults]
max_num_seqs = 64
dtype = "float32"

[models."chat@v1"]
model = "/models/one"
kv_cache_memory = "512MiB"
aliases = ["gpt", "org/gpt"]

[models."chat@v2"]
model = "/models/two"
max_num_seqs = 8
autostart = false
keep_alive = 30
pinned = true

[aliases]
ab = { "chat@v1" = 90, "chat@v2" = 10 }
next = "chat@v2"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text, encoding="utf-8")
    return path


def plan(models: list[str], file: Path | None = None, given: Any = (), **engine: Any) -> ServePlan:
    config = EngineConfig(model="demo", **engine)
    settings = ServerSettings(max_loaded_models=5 if "max_loaded_models" in given else None)
    options = ServeOptions(port=9000)
    return plan_serve(models, None if file is None else str(file), config, settings, options, given)


def test_a_whole_file(tmp_path: Path) -> None:
    made = plan([], written(tmp_path, WHOLE))
    one, two = made.models
    assert (one.id, one.config.model, one.config.kv_cache_memory) == ("chat@v1", "/models/one", 512 << 20)
    assert (one.config.max_num_seqs, two.config.max_num_seqs, two.config.dtype) == (64, 8, "float32")
    assert (one.autostart, two.autostart, two.keep_alive, two.pinned) == (True, False, 30, True)
    assert (made.settings.max_loaded_models, made.settings.model_memory) == (2, 4 << 30)
    assert (made.settings.idle_unload, made.settings.host) == (600, "0.0.0.0")
    assert (made.options.host, made.options.port, made.options.drain_delay) == ("0.0.0.0", 8100, 2)
    models = registry(Engines())
    populate(models, made.models, made.aliases)
    assert models.aliases == {
        "chat": {"chat@v1": 1},
        "gpt": {"chat@v1": 1},
        "org/gpt": {"chat@v1": 1},
        "ab": {"chat@v1": 90, "chat@v2": 10},
        "next": {"chat@v2": 1},
    }
    assert models.default == "chat"


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, WHOLE)
    made = plan(["extra=/models/three"], file, {"port", "max_loaded_models", "dtype"}, dtype="bfloat16")
    assert [model.id for model in made.models] == ["extra", "chat@v1", "chat@v2"]
    assert (made.options.port, made.options.host, made.settings.max_loaded_models) == (9000, "0.0.0.0", 5)
    # A model's own setting is nearer still; what was not given is not the command line's default.
    assert [model.config.dtype for model in made.models] == ["bfloat16"] * 3
    assert [model.config.max_num_seqs for model in made.models] == [None, 64, 8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server", "is not valid TOML"),
        ("[sever]", "sever: this key does not exist; did you mean server?"),
        ("server = 3", r"server: 3 is not a table; write \[server\]"),
        ("[server]\nprot = 1", "server.prot: this key does not exist; did you mean port?"),
        ("[server]\nport = '80'", "server.port: '80' is not an integer"),
        ("[server]\nport = true", "server.port: True is not an integer"),
        ("[server]\nidle_unload = -1", "server.idle_unload: -1.0 is not a number of seconds"),
        ("[server]\nautoload = 'yes'", r"server\..*bool.*autoload"),
        ("[server]\nmodel_memory = 'much'", "server.model_memory: 'much' is no size"),
        ("[defaults]\nmax_num_sqs = 1", "defaults.max_num_sqs: this key does not exist; did you mean max_num_seqs?"),
        ("[models]\nm = '/x'", "models.m: '/x' is not a table"),
        ("[models.m]\ndtype = 'auto'", "models.m: .*missing required field `model`"),
        ("[models.m]\nmodel = 3", r"models.m: Expected `str`, got `int` - at `\$.model`"),
        ("[models.m]\nmodel = 'x'\nblock_size = 7", "models.m.block_size: 7"),
        ("[models.m]\nmodel = 'x'\ndtype = 'int3'", r"models.m.*dtype"),
        ("[models.m]\nmodel = 'x'\nkeep_alive = nan", "models.m.keep_alive: nan is not a number of seconds"),
        ("[models.m]\nmodel = 'x'\nautostrat = true", "models.m.autostrat: .* did you mean autostart?"),
        ("[aliases]\na = 3", "aliases.a: 3 is neither a model nor a table"),
        ("[aliases]\na = { m = -1 }", "aliases.a: 'm' has the weight -1"),
        ("[aliases]\na = {}", "aliases.a: 0 models"),
    ],
)
def test_a_mistake_names_file_key_value_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as refused:
        read_serve_file(file)
    assert str(file) in str(refused.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config: .*nothing.toml cannot be read \(No such file"):
        read_serve_file(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_serve_file(tmp_path)


def test_aliases_for_nothing(tmp_path: Path) -> None:
    made = plan([], written(tmp_path, "[models.m]\nmodel = 'x'\n[aliases]\na = 'n'"))
    with pytest.raises(ConfigError, match=r"aliases.a: the model `n` does not exist; the models are `m`"):
        populate(registry(Engines()), made.models, made.aliases)


def test_models_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    made = plan(["demo", "x@v1=/models/x", f"{tmp_path}/a=b", "fake?step_ms=5"])
    assert [(model.id, model.config.model) for model in made.models] == [
        ("demo", "demo"),
        ("x@v1", "/models/x"),
        (f"{tmp_path}/a=b", f"{tmp_path}/a=b"),
        ("fake?step_ms=5", "fake?step_ms=5"),
    ]
    made = plan(["demo"], served_model_name=("one", "two"))
    assert (made.models[0].id, made.models[0].aliases) == ("one", ("two",))
    with pytest.raises(ConfigError, match="served_model_name: only for a single model; write NAME=MODEL"):
        plan(["demo", "other"], served_model_name=("one",))
    with pytest.raises(typer.BadParameter, match="no model given"):
        plan([])
    with pytest.raises(ConfigError, match="`demo` appears twice; write NAME=MODEL"):
        populate(registry(Engines()), plan(["demo", "demo"]).models, {})


def test_models_without_memory_settings_share_the_memory() -> None:
    def parts(plans: list[ModelPlan]) -> list[float]:
        """Of all memory, what each takes when it is loaded after those before it."""
        free, taken = 1.0, []
        for plan in plans:
            taken.append(round(free * plan.config.gpu_memory_utilization, 3))
            free -= taken[-1]
        return taken

    def models(number: int, **settings: Any) -> list[ModelPlan]:
        return [ModelPlan(id=f"m{place}", config=EngineConfig(model="m", **settings)) for place in range(number)]

    assert parts(divide_memory(models(1))) == [0.9]
    assert parts(divide_memory(models(3))) == [0.3, 0.3, 0.3]
    # With room for two, the third takes the place of one of them.
    assert parts(divide_memory(models(3), 2)[:2]) == [0.45, 0.45]
    assert divide_memory(models(3, kv_cache_memory=1 << 20)) == models(3, kv_cache_memory=1 << 20)
    assert divide_memory(models(2, gpu_memory_utilization=0.2)) == models(2, gpu_memory_utilization=0.2)
    assert parts(plan(["a", "b", "c"]).models) == [0.3, 0.3, 0.3]


def test_the_file_of_all_keys_has_all_keys_and_their_defaults(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "deploy"
    shown = (folder / "serve.toml").read_text(encoding="utf-8")
    whole = re.sub(r"^#(?=[a-z_]+ = )", "", shown, flags=re.MULTILINE)
    for text in (shown, whole):
        made = plan([], written(tmp_path, text))
        populate(registry(Engines()), made.models, made.aliases)
        assert [model.id for model in made.models] == ["chat@v1", "chat@v2"]
    tables = tomllib.loads(whole)
    engine = set(EngineConfig.__struct_fields__) - {"model", "served_model_name"}
    assert set(tables) == {"server", "defaults", "models", "aliases"}
    assert set(tables["server"]) == {*config_file.LISTEN_FIELDS, *ServerSettings.__struct_fields__}
    assert set(tables["defaults"]) == engine
    own = set(config_file._ModelSection.__struct_fields__)
    assert set(tables["models"]["chat@v1"]) == own
    # A default that there is, is the one shown; of what has none an example is.
    content, listening = read_serve_file(tmp_path / "serve.toml"), ServeOptions()
    for key, value in {**content.listen, **content.settings}.items():
        default = getattr(ServerSettings(), key, None)
        if default is None:
            default = getattr(listening, key, None)
        assert value == default or default is None, key
    for key in engine:
        default = getattr(EngineConfig(model="m"), key)
        assert default is None or tables["defaults"][key] == default, key
    example = msgspec.json.decode(msgspec.json.encode(ModelPlan(id="m", config=EngineConfig(model="m"))))
    for key in own - {"model", "keep_alive"}:
        assert tables["models"]["chat@v1"][key] == example[key], key
    assert "serve.toml" in (folder / "README.md").read_text(encoding="utf-8")


def test_a_file_without_models(tmp_path: Path) -> None:
    file = written(tmp_path, "[server]\nport = 8100")
    with pytest.raises(ConfigError, match=r"serve.toml: has no models; .*\[models.NAME\].*model = ") as refused:
        plan([], file)
    assert str(file) in str(refused.value)
    assert [model.id for model in plan(["demo"], file).models] == ["demo"]


def test_the_documented_files_are_valid(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    assert config_file.__doc__ is not None
    described = textwrap.dedent(config_file.__doc__.partition("\n\n")[2])
    for text in (shown, described):
        made = plan([], written(tmp_path, text))
        populate(registry(Engines()), made.models, made.aliases)
        assert [model.id for model in made.models] == ["chat@v1", "chat@v2"]
        assert any(set(alias.weights.values()) == {90, 10} for alias in made.aliases.values())
