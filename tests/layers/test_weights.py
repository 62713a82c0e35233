"""Tensors that do not fit the description are named before anything is loaded."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from octavo.errors import ModelError
from octavo.layers.dummy import DummyWeights
from octavo.layers.spec import DecoderSpec, RotarySpec
from octavo.layers.weights import check_tensors, expected_tensors, to_float32

SPEC = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rotary=RotarySpec(dim=8, max_position=128),
    windows=(0, 0),
    attention_scale=8**-0.5,
)


class Edited(DummyWeights):
    """Dummy weights whose list of tensors was tampered with."""

    def __init__(self, spec: DecoderSpec, **shapes: tuple[int, ...] | None) -> None:
        super().__init__(spec, seed=0)
        for name, shape in shapes.items():
            if shape is None:
                del self._shapes[name]
            else:
                self._shapes[name] = shape


def test_whole_models_pass() -> None:
    for changes in ({}, {"tied_embeddings": True}, {"qkv_bias": True, "qk_norm": True, "mlp_bias": True}):
        spec = dataclasses.replace(SPEC, **changes)
        check_tensors(spec, DummyWeights(spec, seed=0))


def test_missing_tensors_are_named() -> None:
    weights = Edited(SPEC, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight, which LlamaForCausalLM needs"):
        check_tensors(SPEC, weights)


def test_long_lists_are_cut() -> None:
    deeper = dataclasses.replace(SPEC, num_layers=3, windows=(0,) * 3)
    with pytest.raises(ModelError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight.* and 5 more tensors"):
        check_tensors(deeper, DummyWeights(SPEC, seed=0))


def test_unknown_tensors_are_named() -> None:
    weights = Edited(SPEC, **{"model.layers.0.self_attn.q_proj.bias": (32,)})
    with pytest.raises(ModelError, match=r"hold model\.layers\.0\.self_attn\.q_proj\.bias, which"):
        check_tensors(SPEC, weights)


def test_misshapen_tensors_are_named() -> None:
    weights = Edited(SPEC, **{"model.norm.weight": (31,)})
    with pytest.raises(ModelError, match=r"do not fit its description: model\.norm\.weight \(\[31\], not \[32\]\)"):
        check_tensors(SPEC, weights)


def test_repeated_heads_and_rotary_tables_are_no_mistake() -> None:
    tied = dataclasses.replace(SPEC, tied_embeddings=True)
    weights = Edited(
        tied,
        **{"lm_head.weight": (64, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": (4,)},
    )
    check_tensors(tied, weights)


def test_parameters_are_counted_as_listed() -> None:
    for changes in (
        {},
        {"tied_embeddings": True, "qkv_bias": True},
        {"qk_norm": True, "mlp_bias": True, "output_bias": True},
    ):
        spec = dataclasses.replace(SPEC, **changes)
        listed = sum(torch.Size(shape).numel() for shape in expected_tensors(spec).values())
        assert spec.num_parameters() == listed


def test_dummy_weights_depend_on_seed_and_name_only() -> None:
    def draw(seed: int, layer: int) -> npt.NDArray[np.float32]:
        return to_float32(DummyWeights(SPEC, seed).get(f"model.layers.{layer}.mlp.up_proj.weight"))

    first = draw(1, 0)
    assert first.shape == (48, 32)
    assert np.array_equal(first, draw(1, 0))
    assert not np.array_equal(first, draw(2, 0))
    assert not np.array_equal(first, draw(1, 1))
    assert first.std() == pytest.approx(0.02, rel=0.1)
    assert abs(first.mean()) < 0.002
    assert np.array_equal(to_float32(DummyWeights(SPEC, 0).get("model.norm.weight")), np.ones(32))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_stored_tensors_are_widened(kind: str, dtype: torch.dtype) -> None:
    stored = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    part = SimpleNamespace(
        kind=kind, shape=(7, 5), pointer=stored.data_ptr(), num_bytes=stored.numel() * stored.element_size()
    )
    assert torch.equal(torch.from_numpy(to_float32(part)), stored.float())
