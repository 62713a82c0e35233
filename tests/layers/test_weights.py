"""Tensors that do not fit the description are named before anything is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from decoders import make_decoder
from octavo.errors import ModelError
from octavo.layers.decoder import Decoder
from octavo.layers.dummy_weights import DummyWeights
from octavo.layers.parameter import check_tensors, to_float32


def check(decoder: Decoder, weights: DummyWeights) -> None:
    check_tensors(list(decoder.parameters()), weights, decoder.architecture, ())


class Edited(DummyWeights):
    """Dummy weights whose list of tensors was changed."""

    def __init__(self, decoder: Decoder, **shapes: tuple[int, ...] | None) -> None:
        super().__init__(decoder.parameters(), seed=0)
        for name, shape in shapes.items():
            if shape is None:
                del self._shapes[name]
            else:
                self._shapes[name] = shape


def test_missing_tensors_are_named() -> None:
    decoder = make_decoder()
    weights = Edited(decoder, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight, which LlamaForCausalLM needs"):
        check(decoder, weights)


def test_long_lists_are_cut() -> None:
    with pytest.raises(ModelError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight.* and 5 more tensors"):
        check(make_decoder(num_hidden_layers=3), Edited(make_decoder()))


def test_unknown_tensors_are_named() -> None:
    decoder = make_decoder()
    weights = Edited(decoder, **{"model.layers.0.self_attn.q_proj.bias": (32,)})
    with pytest.raises(ModelError, match=r"hold model\.layers\.0\.self_attn\.q_proj\.bias, which"):
        check(decoder, weights)


def test_misshapen_tensors_are_named() -> None:
    decoder = make_decoder()
    weights = Edited(decoder, **{"model.norm.weight": (31,)})
    with pytest.raises(ModelError, match=r"do not match its configuration: model\.norm\.weight \(\[31\], not \[32\]\)"):
        check(decoder, weights)


def test_stored_rotary_tables_are_ignored() -> None:
    decoder = make_decoder()
    check(decoder, Edited(decoder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}))


def test_dummy_weights_depend_on_seed_and_name_only() -> None:
    def draw(seed: int, layer: int) -> npt.NDArray[np.float32]:
        return to_float32(
            DummyWeights(make_decoder().parameters(), seed).get(f"model.layers.{layer}.mlp.up_proj.weight")
        )

    first = draw(1, 0)
    assert first.shape == (48, 32)
    assert np.array_equal(first, draw(1, 0))
    assert not np.array_equal(first, draw(2, 0))
    assert not np.array_equal(first, draw(1, 1))
    assert first.std() == pytest.approx(0.02, rel=0.1)
    assert abs(first.mean()) < 0.002
    assert np.array_equal(
        to_float32(DummyWeights(make_decoder().parameters(), 0).get("model.norm.weight")), np.ones(32)
    )


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_stored_tensors_are_widened(kind: str, dtype: torch.dtype) -> None:
    stored = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    part = SimpleNamespace(
        kind=kind, shape=(7, 5), pointer=stored.data_ptr(), num_bytes=stored.numel() * stored.element_size()
    )
    assert torch.equal(torch.from_numpy(to_float32(part)), stored.float())
