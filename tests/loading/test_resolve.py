from __future__ import annotations

import os
from pathlib import Path

import pytest
from octavo.errors import ConfigError, CorruptFile, ModelNotFound, UnsupportedModel
from octavo.loading.cache import cache_folder
from octavo.loading.resolve import ModelSource, resolve_model, resolve_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    return path


def test_a_folder_with_weights(folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    assert resolve_model(str(folder)) == ModelSource("folder", folder, "my-model")


def test_a_relative_folder(folder, monkeypatch):
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(folder.parent)
    assert resolve_model("my-model") == ModelSource("config-only", folder, "my-model")
    assert resolve_model("my-model/config.json") == ModelSource("config-only", folder, "my-model")


def test_a_home_folder(folder, monkeypatch):
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/my-model").path == folder


def test_a_gguf_file(folder):
    path = folder / "small.Q4_0.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(str(path)) == ModelSource("gguf", path, "small.Q4_0")
    assert resolve_model(str(folder)) == ModelSource("gguf", path, "my-model")


def test_a_gguf_file_under_another_name(folder):
    blob = folder / "b179c9523d0e"
    blob.write_bytes(b"GGUF....")
    assert resolve_model(str(blob)).kind == "gguf"
    blob.write_bytes(b"text")
    with pytest.raises(UnsupportedModel, match="not a GGUF file"):
        resolve_model(str(blob))


def test_what_is_no_gguf_file_comes_with_its_remedy(folder):
    path = folder / "junk.gguf"
    path.write_bytes(b"<html>")
    for name in (path, folder):
        with pytest.raises(CorruptFile, match=r"junk\.gguf' is not a GGUF file: .*; download it again"):
            resolve_model(str(name))


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(UnsupportedModel, match="neither a file nor a folder"):
        resolve_model(str(folder / "pipe"))


def test_nobodys_home():
    with pytest.raises(ModelNotFound, match="no file '~nobody"):
        resolve_model("~nobody-of-that-name/model.gguf")


def test_a_cache_folder_in_nobodys_home(monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(ConfigError, match="OCTAVO_CACHE"):
        cache_folder()


def test_a_folder_with_several_gguf_files(folder):
    for name in ("a.gguf", "b.gguf"):
        (folder / name).touch()
    with pytest.raises(UnsupportedModel, match=r"2 \.gguf files; name one of them: a\.gguf, b\.gguf"):
        resolve_model(str(folder))


def test_a_folder_without_a_model(folder):
    with pytest.raises(UnsupportedModel, match=r"neither a config\.json nor a \.gguf file; name the folder"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "name",
    ["no-such-model", "/no/such/folder", "./no/such", "a/b/c", "x.gguf", "nul\0byte", "x" * 5000, "..", "a/../b"],
)
def test_names_that_are_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ModelNotFound, UnsupportedModel), match="model: "):
        resolve_model(name)


def test_a_tokenizer_needs_no_weights(folder):
    path = folder / "tokenizer.json"
    path.write_text("{}")
    expected = ModelSource("config-only", folder, "my-model")
    assert resolve_tokenizer(str(folder)) == expected
    assert resolve_tokenizer(str(path)) == expected


def test_a_tokenizer_of_a_gguf_file(folder):
    path = folder / "m.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_tokenizer(str(path)).kind == "gguf"


@pytest.mark.parametrize("name", ["no-such-tokenizer", "/no/such/folder"])
def test_a_tokenizer_that_is_nowhere(name):
    with pytest.raises(ModelNotFound):
        resolve_tokenizer(name)
