"""Kernels in Gluon are used with the Triton they are written for; with another one portable kernels serve."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch
import triton
from attention_steps import make_step
from octavo.kernels import attention_decode, attention_prefill, linear
from octavo.kernels.attention import AttentionShape
from octavo.kernels.attention_decode import decode_attention, serves_on_hopper
from octavo.kernels.attention_prefill import prefill_attention
from octavo.kernels.attention_prefill_tables import PrefillConfig
from octavo.kernels.gluon_support import GLUON_KERNELS, gluon_serves
from octavo.kernels.linear import Dense

HAS_GLUON = triton.__version__.startswith("3.6.")


@pytest.fixture
def undecided() -> Iterator[None]:
    gluon_serves.cache_clear()
    yield
    gluon_serves.cache_clear()


@pytest.mark.usefixtures("undecided")
@pytest.mark.skipif(not HAS_GLUON, reason="the kernels are written for Triton 3.6")
def test_the_triton_they_are_written_for_serves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.kernels")
    assert gluon_serves()
    assert not caplog.messages


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("version", ["3.5.1", "3.60.0", "3.9.0", "4.6"])
def test_another_triton_does_not_and_that_is_said_once(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo.kernels")
    monkeypatch.setattr(triton, "__version__", version)
    assert not gluon_serves()
    assert not gluon_serves()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert f"they are written for Triton 3.6, and {version} is installed" in record.getMessage()


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("missing", ["triton.experimental.gluon", "triton.experimental.gluon.language.nvidia.ampere"])
def test_names_that_are_missing_break_nothing(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo.kernels")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setitem(sys.modules, missing, None)
    for name in GLUON_KERNELS:
        monkeypatch.delitem(sys.modules, f"octavo.kernels.{name}", raising=False)
    assert not gluon_serves()
    (message,) = caplog.messages
    assert "lacks what they import" in message
    assert missing in message


@pytest.mark.parametrize("rows", [2, 70])
def test_products_fall_back(
    rows: int, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "gluon_serves", lambda: False)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 1024, generator=random).to(device, dtype)
    weight = (torch.randn(32, 1024, generator=random) / 32).to(device, dtype)
    dense = Dense(weight)
    dense._capability = (9, 0)
    for name in ("linear_slab", "linear_hopper"):
        monkeypatch.setitem(sys.modules, f"octavo.kernels.{name}", None)
    out, activated = (
        torch.empty(rows, 32, dtype=dtype, device=device),
        torch.empty(rows, 16, dtype=dtype, device=device),
    )
    dense.forward(x, out, rows)
    dense.gated(x, torch.empty_like(out), activated, rows, "silu")
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    gate, up = expected.chunk(2, dim=1)
    torch.testing.assert_close(activated.double(), torch.nn.functional.silu(gate) * up, atol=3e-2, rtol=3e-2)


def test_prompts_fall_back(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, processors = attention_prefill.device_limits(device)
    monkeypatch.setattr(attention_prefill, "device_limits", lambda _: (90, processors))
    monkeypatch.setattr(attention_prefill, "gluon_serves", lambda: False)
    monkeypatch.setitem(sys.modules, "octavo.kernels.attention_prefill_hopper", None)
    config = PrefillConfig(16, 4, 2, 3, hopper_stages=2)
    step = make_step(AttentionShape(2, 1, 64, 16, 0.125), [(40, 20)], torch.float16, device)
    work = step.work(prompt_rows=config.rows)
    step.plan(work, mixed=True)
    out = torch.zeros(len(step.qkv), 128, dtype=torch.float16, device=device)
    prefill_attention(step.qkv, out, step.cache, step.tables, work, step.shape, tokens=len(step.qkv), config=config)
    assert (out.cpu().double() - step.expected()).abs().max() < 3e-3


def test_decode_rows_fall_back(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "gluon_serves", lambda: False)
    monkeypatch.setattr(attention_decode, "device_limits", lambda _: (90, 2))
    monkeypatch.setitem(sys.modules, "octavo.kernels.attention_decode_hopper", None)
    step = make_step(AttentionShape(2, 1, 64, 16, 0.125), [(40, 1)], torch.float16, device)
    on_hopper = serves_on_hopper(device, torch.float16, step.shape)
    assert not on_hopper
    work = step.work(on_hopper=on_hopper)
    step.plan(work)
    out = torch.zeros(len(step.qkv), 128, dtype=torch.float16, device=device)
    decode_attention(step.qkv, out, step.cache, step.tables, work, step.shape, tokens=1, grouped=False)
    assert (out.cpu().double() - step.expected()).abs().max() < 3e-3
