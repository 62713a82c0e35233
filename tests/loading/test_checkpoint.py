from __future__ import annotations

import ctypes
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from octavo.errors import CorruptFile, ModelNotFound
from octavo.loading.model_files import open_weights
from octavo.loading.resolve import resolve_model
from octavo.loading.weights import WeightSource
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def same(weights: WeightSource, tensors: dict[str, torch.Tensor]) -> None:
    assert sorted(weights.names()) == sorted(tensors)
    for name, expected in tensors.items():
        assert weights.describe(name)[1] == tuple(expected.shape)
        assert torch.equal(weights.to_torch(name), expected), name


def as_bin(folder: Path, destination: Path, *, zipped: bool = True) -> Path:
    """The same checkpoint in `.bin` files."""
    destination.mkdir()
    shutil.copy(folder / "config.json", destination)
    for path in folder.glob("*.safetensors"):
        name = path.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
        torch.save(load_file(path), destination / name, _use_new_zipfile_serialization=zipped)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (destination / "pytorch_model.bin.index.json").write_text(text)
    return destination


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_safetensors_file(make_checkpoint, tied, dtype):
    folder, tensors = make_checkpoint(tie_word_embeddings=tied, dtype=dtype)
    weights = open_weights(resolve_model(str(folder)))
    same(weights, tensors)
    assert ("lm_head.weight" in weights) is not tied
    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    assert weights.describe("model.norm.weight") == (kind, (64,))


def test_shards(make_checkpoint):
    folder, tensors = make_checkpoint(max_shard_size="60KB", num_key_value_heads=1)
    assert len(list(folder.glob("*.safetensors"))) > 2
    weights = open_weights(resolve_model(str(folder)))
    weights.prefetch()
    same(weights, tensors)


@pytest.mark.parametrize("zipped", [True, False], ids=["mapped", "before torch 1.6"])
def test_bin(make_checkpoint, tmp_path, zipped):
    folder, tensors = make_checkpoint(dtype="bfloat16")
    same(open_weights(resolve_model(str(as_bin(folder, tmp_path / "bin", zipped=zipped)))), tensors)


def test_bin_shards(make_checkpoint, tmp_path):
    folder, tensors = make_checkpoint(max_shard_size="60KB")
    same(open_weights(resolve_model(str(as_bin(folder, tmp_path / "bin")))), tensors)


def test_safetensors_are_preferred(make_checkpoint, tmp_path):
    folder, tensors = make_checkpoint()
    copy = tmp_path / "both"
    shutil.copytree(folder, copy)
    torch.save({"other": torch.zeros(1)}, copy / "pytorch_model.bin")
    same(open_weights(resolve_model(str(copy))), tensors)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_beside_a_whole_file_is_not_read(make_checkpoint, tmp_path, kind):
    folder, tensors = make_checkpoint()
    if kind == "bin":
        copy = as_bin(folder, tmp_path / "stale")
    else:
        copy = tmp_path / "stale"
        shutil.copytree(folder, copy)
    stale = {"weight_map": {"lm_head.weight": f"gone-00002-of-00002.{kind}"}}
    name = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    (copy / f"{name}.index.json").write_text(json.dumps(stale))
    same(open_weights(resolve_model(str(copy))), tensors)
    assert len(AutoModelForCausalLM.from_pretrained(copy).state_dict()) >= len(tensors)


def test_files_of_any_name_without_an_index(make_checkpoint, tmp_path):
    folder, tensors = make_checkpoint()
    shutil.copy(folder / "config.json", tmp_path)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, tmp_path / "b.safetensors")
    save_file({"copy": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    same(open_weights(resolve_model(str(tmp_path))), tensors)


def test_the_pointer_is_the_tensor_and_outlives_the_source(make_checkpoint):
    folder, tensors = make_checkpoint()
    part = open_weights(resolve_model(str(folder))).get("model.layers.1.mlp.up_proj.weight")
    expected = tensors["model.layers.1.mlp.up_proj.weight"]
    assert (part.kind, part.shape, part.num_bytes) == ("F32", (96, 64), 96 * 64 * 4)
    assert ctypes.string_at(part.pointer, part.num_bytes) == expected.numpy().tobytes()


def test_a_view_that_is_not_contiguous_comes_out_in_order(tmp_path):
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
    (tmp_path / "config.json").write_text("{}")
    torch.save({"w": tensor}, tmp_path / "pytorch_model.bin")
    weights = open_weights(resolve_model(str(tmp_path)))
    assert torch.equal(weights.to_torch("w"), tensor)


def test_conversion(make_checkpoint):
    folder, tensors = make_checkpoint()
    weights = open_weights(resolve_model(str(folder)))
    converted = weights.to_torch("model.embed_tokens.weight", torch.bfloat16)
    assert torch.equal(converted, tensors["model.embed_tokens.weight"].to(torch.bfloat16))


def test_links_into_a_blob_store_are_followed(make_checkpoint, tmp_path):
    folder, tensors = make_checkpoint()
    snapshot = tmp_path / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    same(open_weights(resolve_model(str(snapshot))), tensors)


def test_missing_tensor(make_checkpoint):
    folder, _ = make_checkpoint()
    weights = open_weights(resolve_model(str(folder)))
    with pytest.raises(CorruptFile, match=r"lacks the tensor `model\.layers\.9"):
        weights.get("model.layers.9.mlp.up_proj.weight")
    with pytest.raises(CorruptFile, match="lack tensors: a, b"):
        weights.require(["model.norm.weight", "a", "b"])


def test_missing_shard(make_checkpoint, tmp_path):
    folder, _ = make_checkpoint(max_shard_size="60KB")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    victim = sorted(copy.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CorruptFile, match=f"shards are missing: {victim.name}"):
        open_weights(resolve_model(str(copy)))


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/hostname", "sub/../../x.safetensors", "..\\x.safetensors", "", 7, "a\0b"]
)
def test_an_index_cannot_leave_its_folder(make_checkpoint, tmp_path, file):
    folder, tensors = make_checkpoint()
    inside = tmp_path / "model"
    shutil.copytree(folder, inside)
    (inside / "model.safetensors").rename(inside / "shard.safetensors")
    (tmp_path / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"weight_map": dict.fromkeys(tensors, file)}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptFile, match="not a file of this folder"):
        open_weights(resolve_model(str(inside)))


def test_an_index_that_names_the_wrong_shard(make_checkpoint, tmp_path):
    folder, _ = make_checkpoint(max_shard_size="60KB")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = list(index["weight_map"])
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][names[0]] = next(file for file in files if file != index["weight_map"][names[0]])
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptFile, match="that the index places there"):
        open_weights(resolve_model(str(copy)))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_an_index_that_is_none(make_checkpoint, tmp_path, text):
    folder, _ = make_checkpoint()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").rename(copy / "shard.safetensors")
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptFile):
        open_weights(resolve_model(str(copy)))


def test_one_name_in_two_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(CorruptFile, match=r"`w` lies in a\.safetensors and in b\.safetensors"):
        open_weights(resolve_model(str(tmp_path)))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_safetensors(make_checkpoint, tmp_path, keep):
    folder, _ = make_checkpoint()
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:keep])
    with pytest.raises(CorruptFile):
        open_weights(resolve_model(str(tmp_path)))


class Harmful:
    def __reduce__(self):
        return (Path("pickle-ran").touch, ())


@pytest.mark.parametrize("content", ["pickle", "torn", "empty", "list", "nested"])
def test_bin_files_that_are_no_tensors(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "pytorch_model.bin"
    if content == "pickle":
        path.write_bytes(pickle.dumps({"w": Harmful()}))
    elif content == "torn":
        torch.save({"w": torch.zeros(100)}, path)
        path.write_bytes(path.read_bytes()[:300])
    elif content == "empty":
        path.touch()
    elif content == "list":
        torch.save([torch.zeros(1)], path)
    else:
        torch.save({"w": {"deep": torch.zeros(1)}}, path)
    with pytest.raises(CorruptFile, match=r"pytorch_model\.bin"):
        open_weights(resolve_model(str(tmp_path)))
    assert not (tmp_path / "pickle-ran").exists()


def test_a_folder_without_weights(make_checkpoint, tmp_path):
    folder, _ = make_checkpoint()
    shutil.copy(folder / "config.json", tmp_path)
    source = resolve_model(str(tmp_path))
    assert source.kind == "config-only"
    with pytest.raises(ModelNotFound, match="no weights"):
        open_weights(source)
