"""Decode attention and shared prefixes against the reference, on a cache whose unused places are NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attention_steps import Step, make_step
from kernel_devices import INTERPRETED, in_one_dtype
from octavo.errors import ConfigError
from octavo.kernels import attention_work
from octavo.kernels.attention import HEAD_DIMS, AttentionShape, load_dims
from octavo.kernels.attention_decode import decode_attention, serves_on_hopper
from octavo.kernels.attention_decode_tables import DecodeConfig
from torch import Tensor

TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
UNTOUCHED = 7.0


def attend(step: Step, window: int = 0, *, grouped: bool = False, **options: Any) -> Tensor:
    """The output [num_tokens, num_heads * head_dim]; what lies behind it must not be written."""
    work = step.work(window)
    # Of partials, too, only what this step wrote may be read.
    work.values.fill_(math.nan)
    work.stats.fill_(math.nan)
    step.plan(work, grouped=grouped)
    width = step.shape.num_heads * step.shape.head_dim
    out = torch.full((len(step.qkv), width), UNTOUCHED, dtype=step.qkv.dtype, device=step.qkv.device)
    options = {"tokens": len(step.qkv)} | options
    decode_attention(step.qkv, out, step.cache, step.tables, work, step.shape, grouped=grouped, **options)
    assert (out[step.num_tokens :] == UNTOUCHED).all()
    return out[: step.num_tokens]


def check(out: Tensor, expected: Tensor) -> None:
    difference = (out.cpu().double() - expected).abs().max()
    assert difference < TOLERANCE[out.dtype], difference


def rows(*lengths: int) -> list[tuple[int, int]]:
    return [(length, 1) for length in lengths]


@pytest.mark.parametrize("block_size", [16, 32])
def test_rows_of_every_length(device: torch.device, dtype: torch.dtype, block_size: int) -> None:
    shape = AttentionShape(4, 2, 64, block_size, 0.125)
    step = make_step(shape, rows(1, 300, 16, 255, 256, 257, 65, 529), dtype, device, padding=3)
    check(attend(step), step.expected())


@pytest.mark.parametrize("tokens", [4, 17, 256])
def test_launches_for_any_number_of_rows(device: torch.device, tokens: int) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    step = make_step(AttentionShape(4, 2, 64, 16, 0.125), rows(17, 300, 256, 529), dtype, device)
    out = attend(step, tokens=tokens)
    check(out, step.expected())
    assert torch.equal(out, attend(step))


def test_programs_that_take_turns_leave_no_item_out(device: torch.device) -> None:
    """Also after a launch with fewer items than programs: what they count by is put back each time."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    few = make_step(AttentionShape(4, 2, 64, 16, 0.125), rows(17), dtype, device)
    # More items than a GPU has programs, of so few rows that programs take no turns.
    many = make_step(few.shape, rows(*([300, 17] if INTERPRETED else [6000, 17] * 30)), dtype, device)
    work = many.work(0)
    out, expected = (torch.empty(len(many.qkv), 4 * 64, dtype=dtype, device=device) for _ in range(2))
    for step, tokens in ((many, 64), (few, 256), (many, 256), (few, 256), (many, 256)):
        step.plan(work)
        out.zero_()
        decode_attention(step.qkv, out, step.cache, step.tables, work, step.shape, tokens=tokens, grouped=False)
        if step is many and tokens == 64:
            expected.copy_(out)
        elif step is many:
            assert torch.equal(out, expected)
        assert work.turns.tolist() == [0, 0]
    check(expected, many.expected())


# Interpreted, which is slow, those around each number of rows that tiles are padded to.
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 11, 16, 20] if INTERPRETED else [*range(1, 17), 20])
def test_query_heads_of_a_kv_head(device: torch.device, group: int) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    step = make_step(AttentionShape(2 * group, 2, 64, 16, 0.125), rows(270, 20), dtype, device)
    check(attend(step), step.expected())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_sizes(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    step = make_step(AttentionShape(4, 2, head_dim, 16, head_dim**-0.5), rows(300, 31), dtype, device)
    check(attend(step), step.expected())


@pytest.mark.parametrize("window", [1, 40, 256, 300, 5000])
def test_window(device: torch.device, window: int) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    step = make_step(AttentionShape(4, 2, 64, 16, 0.125), rows(1, 41, 256, 297, 600), dtype, device, padding=2)
    check(attend(step, window), step.expected(window))


@pytest.mark.parametrize("scale", [0.1, 1e4])
def test_softcap_of_scores_of_any_size(device: torch.device, scale: float) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    step = make_step(AttentionShape(4, 2, 64, 16, scale, softcap=5.0), rows(300, 31), dtype, device)
    check(attend(step), step.expected())


@pytest.mark.parametrize("capability", [80, 90])
def test_fp8_cache(device: torch.device, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, processors = attention_work.device_limits(device)
    monkeypatch.setattr(attention_work, "device_limits", lambda _: (capability, processors))
    step = make_step(AttentionShape(4, 2, 64, 16, 0.125, kv_fp8=True), rows(300, 31), dtype, device)
    out = attend(step)
    check(out, step.expected())


@triton.jit
def _widen_kernel(codes, out):
    lane = tl.arange(0, 16)
    x = load_dims(codes, lane * 16, lane < 16, out.dtype.element_ty, 0, 16, 16)
    tl.store(out + lane[:, None] * 16 + lane[None, :], x)


def test_every_e4m3_code_is_read_exactly(device: torch.device, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(256, dtype=dtype, device=device)
    _widen_kernel[(1,)](codes, out)
    numbers = codes.view(torch.float8_e4m3fn).to(torch.float32)
    finite = ~numbers.isnan()
    assert finite.sum() == 254
    assert torch.equal(out.float()[finite], numbers[finite])


@in_one_dtype
def test_a_row_alone_has_the_bits_it_has_in_a_batch(device: torch.device, dtype: torch.dtype) -> None:
    step = make_step(AttentionShape(4, 2, 64, 16, 0.125), rows(600, 17, 257, 256, 301), dtype, device, padding=1)
    together = attend(step)
    for row in (0, 2, 3):
        for array in (step.slots, step.seq_lens, step.qkv):
            array[0] = array[row].clone()
        step.counts[:3] = 1
        assert torch.equal(attend(step)[0], together[row])
        step = make_step(step.shape, rows(600, 17, 257, 256, 301), dtype, device, padding=1)


# Two groups, one of which shares less than a chunk; a row of its own between them; more rows than one item takes.
GROUPED = [
    (AttentionShape(4, 2, 64, 16, 0.125), rows(600, 700, 530, 300, 290, 559), [((0, 2, 5), 33), ((3, 4), 15)]),
    (AttentionShape(16, 1, 192, 32, 0.1), rows(530, 257, 300, 290, 280, 270), [((1, 2, 3, 4, 5), 8)]),
    (AttentionShape(33, 1, 80, 16, 0.1), rows(290, 270), [((0, 1), 16)]),
]


@pytest.mark.parametrize("case", GROUPED)
def test_shared_prefixes(device: torch.device, case: tuple[AttentionShape, Any, Any]) -> None:
    shape, lengths, groups = case
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    step = make_step(shape, lengths, dtype, device, groups=groups, padding=2)
    shared = attend(step, grouped=True)
    check(shared, step.expected())
    if device.type == "cuda":  # numpy's products depend on their number of rows
        assert torch.equal(shared, attend(step))


def test_a_window_s_layers_do_not_share(device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shape = AttentionShape(4, 2, 64, 16, 0.125)
    step = make_step(shape, rows(600, 700), dtype, device, groups=[((0, 1), 33)])
    assert torch.equal(attend(step, 400, grouped=True), attend(step, 400))


@in_one_dtype
@pytest.mark.parametrize("head_dim", [64, 192])
def test_tiles_in_two_pieces(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    step = make_step(AttentionShape(4, 2, head_dim, 16, 0.1, softcap=9.0), rows(300, 31, 600), dtype, device)
    out = attend(step, 310, config=DecodeConfig(4, 2, 1, pieces=2))
    check(out, step.expected(310))
    if device.type == "cuda":
        assert torch.equal(out, attend(step, 310))


@pytest.mark.gpu
@in_one_dtype
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_launches_differ_in_no_bit(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    step = make_step(AttentionShape(8, 2, head_dim, 16, 0.1), rows(600, 17, 257), dtype, device)
    plain = attend(step)
    for config in (DecodeConfig(2, 2, 1), DecodeConfig(4, 4, 1), DecodeConfig(8, 3, 2, pieces=2)):
        assert torch.equal(attend(step, config=config), plain)


HOPPER = [DecodeConfig(4, 2, 2, hopper_stages=3), DecodeConfig(4, 2, 1, hopper_stages=6)]


def written(step: Step, window: int, tokens: int, grouped: bool, config: DecodeConfig | None) -> list[Tensor]:
    """Bits of the output and of all partials after a launch; the same where nothing was to be written."""
    work = step.work(window)
    work.values.fill_(UNTOUCHED)
    work.stats.fill_(UNTOUCHED)
    step.plan(work, grouped=grouped)
    width = step.shape.num_heads * step.shape.head_dim
    out = torch.full((len(step.qkv), width), UNTOUCHED, dtype=step.qkv.dtype, device=step.qkv.device)
    decode_attention(
        step.qkv, out, step.cache, step.tables, work, step.shape, tokens=tokens, grouped=grouped, config=config
    )
    assert work.turns.tolist() == [0, 0]
    return [out.view(torch.int16), work.values.view(torch.int32), work.stats.view(torch.int32)]


def check_on_hopper(step: Step, window: int = 0, *, grouped: bool = False) -> None:
    """Hopper's own kernel writes the portable one's bits, its items given and taken by turns."""
    if torch.cuda.get_device_capability(step.qkv.device) != (9, 0):
        pytest.skip("a kernel of Hopper")
    right = written(step, window, len(step.qkv), grouped, None)
    for config in HOPPER:
        # For few rows the next kernel starts at once, and items are given.
        for tokens in (16 if len(step.qkv) <= 16 else 256, 256, 256):
            got = written(step, window, tokens, grouped, config)
            assert [torch.equal(a, b) for a, b in zip(got, right, strict=True)] == [True] * 3, (config, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 300, 1000])
def test_whole_rows_on_hopper(device: torch.device, dtype: torch.dtype, window: int) -> None:
    """Rows whose chunks are merged as they come have the bits of those whose partials are merged afterwards."""
    step = make_step(AttentionShape(8, 4, 128, 16, 0.1), rows(*[1300, 17, 256, 2000] * 60), dtype, device, padding=3)
    if not serves_on_hopper(device, dtype, step.shape):
        pytest.skip("a kernel of Hopper")
    right = attend(step, window)
    work = step.work(window, on_hopper=True)
    work.values.fill_(math.nan)
    work.stats.fill_(math.nan)
    step.plan(work)
    partials = work.row_partials[:240:4].tolist()
    assert 0 in partials
    assert max(partials) > 1
    for _ in range(3):
        out = torch.full_like(right, UNTOUCHED)
        decode_attention(step.qkv, out, step.cache, step.tables, work, step.shape, tokens=243, grouped=False)
        assert torch.equal(out, right)


EVERY_LENGTH = rows(1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, 529, 3000)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_length_on_hopper(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    check_on_hopper(make_step(AttentionShape(4, 2, head_dim, block_size, 0.1), EVERY_LENGTH, dtype, device, padding=3))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap_on_hopper(device: torch.device, dtype: torch.dtype, head_dim: int, window: int) -> None:
    shape = AttentionShape(4, 2, head_dim, 16, 0.5, softcap=3.0)
    step = make_step(shape, EVERY_LENGTH, dtype, device, padding=3)
    check_on_hopper(step, window)
    check(attend(step, window), step.expected(window))


@pytest.mark.gpu
@in_one_dtype
@pytest.mark.parametrize("group", [1, 4, 5, 16])
def test_query_heads_on_hopper(device: torch.device, dtype: torch.dtype, group: int) -> None:
    check_on_hopper(make_step(AttentionShape(2 * group, 2, 128, 16, 0.1), rows(1, 270, 20, 600), dtype, device))


@pytest.mark.gpu
@in_one_dtype
@pytest.mark.parametrize("window", [1, 40, 256, 300])
def test_window_on_hopper(device: torch.device, dtype: torch.dtype, window: int) -> None:
    check_on_hopper(make_step(AttentionShape(4, 2, 128, 16, 0.1), EVERY_LENGTH, dtype, device, padding=2), window)


@pytest.mark.gpu
@in_one_dtype
def test_shared_prefixes_on_hopper(device: torch.device, dtype: torch.dtype) -> None:
    lengths = rows(600, 700, 530, 300, 290, 559)
    groups = [((0, 2, 5), 33), ((3, 4), 16)]
    check_on_hopper(make_step(AttentionShape(4, 2, 128, 16, 0.1), lengths, dtype, device, groups=groups), grouped=True)


@pytest.mark.gpu
@in_one_dtype
def test_more_items_than_programs_on_hopper(device: torch.device, dtype: torch.dtype) -> None:
    check_on_hopper(make_step(AttentionShape(8, 4, 128, 16, 0.1), rows(*[1300, 17, 256] * 60), dtype, device))


@pytest.mark.gpu
@in_one_dtype
def test_launches_after_each_other_on_hopper(device: torch.device, dtype: torch.dtype) -> None:
    """Without a pause, with more items than programs, with fewer and with none."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("a kernel of Hopper")
    many = make_step(AttentionShape(8, 4, 128, 16, 0.1), rows(*[1300, 17, 256] * 60), dtype, device)
    few = make_step(many.shape, rows(300, 17), dtype, device)
    none = make_step(many.shape, rows(300, 17), dtype, device)
    none.counts[:3] = 0
    work = many.work()
    steps = [many, few, none] * 4
    outs = []
    for config in (None, HOPPER[0], HOPPER[1]):
        for step in steps:
            step.plan(work)
            out = torch.full((len(step.qkv), 8 * 128), UNTOUCHED, dtype=dtype, device=device)
            options: Any = {"tokens": 256, "grouped": False, "config": config}
            decode_attention(step.qkv, out, step.cache, step.tables, work, step.shape, **options)
            outs.append(out)
    assert work.turns.tolist() == [0, 0]
    for got, right in zip(outs[len(steps) :], outs[: len(steps)] * 2, strict=True):
        assert torch.equal(got, right)
    assert (outs[2] == UNTOUCHED).all()


@pytest.mark.gpu
@in_one_dtype
def test_replayed_graphs_read_the_step_anew(device: torch.device, dtype: torch.dtype) -> None:
    shape = AttentionShape(4, 2, 64, 16, 0.125)
    step = make_step(shape, rows(600, 700, 17), dtype, device)
    work = step.work()
    out = torch.zeros(len(step.qkv), shape.num_heads * shape.head_dim, dtype=dtype, device=device)

    def once() -> None:
        step.plan(work)
        decode_attention(step.qkv, out, step.cache, step.tables, work, shape, tokens=len(step.qkv), grouped=False)

    once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    step.seq_lens.copy_(torch.tensor([17, 256, 3]))
    step.counts[1:3] = 2
    out.fill_(UNTOUCHED)
    graph.replay()
    check(out[:2], step.expected()[:2])
    assert (out[2] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"num_heads": 5}, "num_attention_heads"),
        ({"head_dim": 72}, "head_dim"),
        ({"block_size": 24}, "block_size"),
    ],
)
def test_shapes_without_a_kernel_are_refused(values: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        AttentionShape(**({"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "scale": 1.0} | values))
