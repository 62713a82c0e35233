"""Attention of prompt rows on a device against a naive one in float64, and its sameness however a prompt is cut."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_steps import Step, make_step
from kernel_devices import INTERPRETED, in_one_dtype
from octavo.kernels.attention import AttentionShape
from octavo.kernels.attention_decode import decode_attention
from octavo.kernels.attention_prefill import prefill_attention
from octavo.kernels.attention_prefill_tables import PrefillConfig
from torch import Tensor

# Small for the interpreter; what a GPU would take otherwise.
CONFIG = PrefillConfig(16, 4, 2, 3) if INTERPRETED else None


def attend(step: Step, window: int = 0, config: PrefillConfig | None = CONFIG) -> Tensor:
    """The kernel's answers [tokens, num_heads * head_dim], NaN where it wrote none."""
    work = step.work(window) if config is None else step.work(window, prompt_rows=config.rows)
    step.plan(work, mixed=True)
    out = torch.full((len(step.qkv), step.shape.num_heads * step.shape.head_dim), math.nan, dtype=step.qkv.dtype)
    out = out.to(step.qkv.device)
    prefill_attention(
        step.qkv,
        out,
        step.cache,
        step.tables,
        work,
        step.shape,
        tokens=len(step.qkv),
        config=config,
    )
    assert out[step.num_tokens :].isnan().all()
    return out[: step.num_tokens].cpu()


def check(
    rows: list[tuple[int, int]],
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    window: int = 0,
) -> None:
    """Weights are rounded to the dtype, and so is the answer: a few of its steps at the values' size."""
    step = make_step(shape, rows, dtype, device, padding=3)
    got = attend(step, window)
    right = step.expected(window)
    first = int(step.query_start[int(step.counts[2])])
    assert got[:first].isnan().all()
    worst = max(2 * torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(got[first:].double(), right[first:], rtol=worst, atol=worst)


# A whole short prompt, one token of one, the rest of a long one behind a cached prefix, a lone query past two chunks.
RAGGED = [(70, 70), (1, 1), (300, 21), (515, 1), (256, 3)]


@pytest.mark.parametrize("block_size", [16, 32])
def test_ragged_rows(dtype: torch.dtype, device: torch.device, block_size: int) -> None:
    check(RAGGED, AttentionShape(4, 2, 64, block_size, 0.125), dtype, device)


@in_one_dtype
def test_decode_rows_are_left_alone(dtype: torch.dtype, device: torch.device) -> None:
    check([(40, 1), (7, 1), (50, 19), (130, 2)], AttentionShape(2, 1, 64, 16, 0.125), dtype, device)


@in_one_dtype
def test_nothing_to_do(dtype: torch.dtype, device: torch.device) -> None:
    assert attend(make_step(AttentionShape(2, 1, 64, 16, 0.125), [(40, 1), (7, 1)], dtype, device)).isnan().all()


@in_one_dtype
@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16])
def test_every_group_size(dtype: torch.dtype, device: torch.device, group: int) -> None:
    check([(39, 39), (140, 3)], AttentionShape(2 * group, 2, 64, 16, 0.125), dtype, device)


@pytest.mark.parametrize("head_dim", [80, 96, 112, 128, 192, 256])
def test_every_head_size(dtype: torch.dtype, device: torch.device, head_dim: int) -> None:
    shape = AttentionShape(4, 2, head_dim, 16, head_dim**-0.5)
    check([(50, 50), (330, 7)], shape, dtype, device)


@in_one_dtype
@pytest.mark.parametrize("window", [1, 50, 64, 300])
def test_windows(dtype: torch.dtype, device: torch.device, window: int) -> None:
    check([(90, 90), (700, 20), (300, 1)], AttentionShape(2, 1, 64, 16, 0.125), dtype, device, window)


def test_soft_caps(dtype: torch.dtype, device: torch.device) -> None:
    check([(70, 70), (300, 5)], AttentionShape(2, 1, 64, 16, 0.5, softcap=5.0), dtype, device)


def test_fp8_cache(dtype: torch.dtype, device: torch.device) -> None:
    check([(70, 70), (300, 5)], AttentionShape(4, 2, 64, 16, 0.125, kv_fp8=True), dtype, device)


def test_large_scores(dtype: torch.dtype, device: torch.device) -> None:
    step = make_step(AttentionShape(2, 1, 64, 16, 30.0), [(70, 70), (300, 5)], dtype, device)
    assert attend(step).isfinite().all()


def part_of(step: Step, row: int, length: int, first: int, queries: int) -> Step:
    """A step of one row: `queries` tokens, from token `first` of the step on, of a row that holds `length` keys."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=step.qkv.device)

    return dataclasses.replace(
        step,
        qkv=step.qkv[first : first + queries],
        slots=step.slots[row : row + 1],
        query_start=ints(0, queries),
        seq_lens=ints(length),
        counts=ints(queries, 1, *[0] * 14),
    )


@in_one_dtype
@pytest.mark.parametrize("window", [0, 200])
def test_the_same_however_a_prompt_is_cut(dtype: torch.dtype, device: torch.device, window: int) -> None:
    """The interpreter's products depend on a row's place among the rows, so there cuts keep the places."""
    length = 330 if INTERPRETED else 1000
    pieces = [8, 120, 136, 66] if INTERPRETED else [1, 7, 121, 127, 300, 444]
    shape = AttentionShape(2, 1, 64, 16, 0.125) if INTERPRETED else AttentionShape(16, 8, 128, 16, 0.088)
    step = make_step(shape, [(length, length)], dtype, device)
    whole = attend(step, window)
    at = 0
    for piece in pieces:
        part = part_of(step, 0, at + piece, at, piece)
        assert torch.equal(attend(part, window), whole[at : at + piece])
        at += piece
    assert at == length


@in_one_dtype
def test_the_same_in_company(dtype: torch.dtype, device: torch.device) -> None:
    step = make_step(AttentionShape(4, 2, 64, 16, 0.125), RAGGED, dtype, device)
    together = attend(step)
    first = 0
    for row, (length, queries) in enumerate(RAGGED):
        alone = part_of(step, row, length, first, queries)
        assert torch.equal(attend(alone), together[first : first + queries])
        first += queries


@pytest.mark.gpu
@in_one_dtype
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 128), (7, 128), (1, 192), (2, 256)])
def test_the_same_in_every_launch(dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> None:
    step = make_step(AttentionShape(2 * group, 2, head_dim, 16, 0.1), RAGGED, dtype, device)
    right = attend(step)
    for config in (PrefillConfig(64, 4, 2, 1), PrefillConfig(16, 4, 2, 4), PrefillConfig(64, 4, 1, 2, padded=True)):
        assert torch.equal(attend(step, config=config), right), config


@pytest.mark.gpu
@in_one_dtype
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (4, 64), (8, 80), (1, 128), (2, 128), (8, 128), (2, 256)])
def test_the_same_as_decoding(dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> None:
    step = make_step(AttentionShape(2 * group, 2, head_dim, 16, 0.1), [(700, 1), (64, 1), (1, 1)], dtype, device)
    out = torch.empty(3, 2 * group * head_dim, dtype=dtype, device=device)
    work = step.work()
    step.plan(work)
    decode_attention(step.qkv, out, step.cache, step.tables, work, step.shape, tokens=len(step.qkv), grouped=False)
    step.counts[2] = 0
    assert torch.equal(attend(step), out.cpu())


@pytest.mark.gpu
@in_one_dtype
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"), [(1, 64, 32), (2, 128, 16), (4, 128, 32), (7, 128, 16), (2, 256, 16)]
)
def test_the_same_on_hopper(
    dtype: torch.dtype,
    device: torch.device,
    group: int,
    head_dim: int,
    block_size: int,
    softcap: float,
    stages: int,
    window: int,
) -> None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("a kernel of Hopper")
    # Of a block of 32, less than half is filled at some ends, just half at another.
    rows = [*RAGGED, (600, 600), (80, 80)]
    shape = AttentionShape(2 * group, 2, head_dim, block_size, 0.1, softcap)
    step = make_step(shape, rows, dtype, device, padding=3)
    right = attend(step, window, PrefillConfig(128, 8, 2))
    assert torch.equal(attend(step, window, PrefillConfig(128, 8, 2, hopper_stages=stages)), right)
