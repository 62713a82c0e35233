"""What each part of a step costs in the step, and which launches of products and attention would be faster there.

    python benches/gpu/tune_step.py --model benches/shapes/qwen3-0.6b --batch 1 8 32 128
    python benches/gpu/tune_step.py --model benches/shapes/qwen3-0.6b --batch 32 --context 4352 --shared 4096
    python benches/gpu/tune_step.py --model benches/shapes/qwen3-0.6b --batch --prefill 2048

Rows are brought to steady decoding; then graphs of decoder and head alone are replayed: as the step is, without one
operation, or with other launches of one. Every figure is microseconds of such a replay, the median of some. Kernels
that are timed alone overlap with nothing and find their weights in L2, so what is fastest alone need not be so here.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from octavo.kernels import attention_decode, linear
from octavo.kernels.attention_decode_tables import DecodeConfig, group_config
from octavo.kernels.attention_group import launch_group
from octavo.kernels.attention_work import decode_launch
from octavo.kernels.linear import Dense
from octavo.kernels.linear_hopper import wide_gated, wide_product
from octavo.kernels.linear_skinny import skinny_gated, skinny_product
from octavo.kernels.linear_slab import slab_gated, slab_product
from octavo.kernels.linear_tables import (
    MAX_SKINNY_ROWS,
    MAX_WIDE_ROWS,
    SkinnyTile,
    SlabTile,
    TiledTile,
    WideTile,
    gated_tile,
    middle_tile,
    skinny_tile,
    slab_tile,
    wide_tile,
)
from octavo.kernels.linear_tiled import tiled_gated, tiled_product
from octavo.layers.backends.cuda_inputs import has_groups, has_prompts
from replay import Products, Replay, Tile, compiled, nothing, replaced, without_overlap
from step_engine import DEVICE, Engine, settings, synchronize

PARTS = ("ablate", "products", "attention")
READY_STEPS = 4
OUTPUT = 400
FEW_REPEATS = 6
SHOWN = 5
# Of a step: what is nearer than this is the same.
CLEAR_GAIN = 0.003

# (columns, depth, warps, stages)
SWAPPED = ((16, 256, 2, 5), (32, 256, 2, 4), (32, 128, 2, 5), (32, 128, 4, 5), (64, 128, 4, 5), (64, 64, 4, 6))
UPRIGHT = (
    (8, 512, 2, 4),
    (8, 512, 4, 4),
    (8, 256, 2, 6),
    (16, 256, 2, 5),
    (16, 256, 4, 4),
    (16, 128, 4, 6),
    (32, 128, 4, 5),
    (32, 64, 4, 6),
)
# (columns, warps)
SLABS = ((16, 1), (16, 2), (16, 4), (32, 2), (32, 4))
SLAB_PIECE, MOST_SLAB_PIECES, MOST_SLAB_ROWS = 1024, 3, 32
# (rows, columns, stages)
WIDE = ((64, 16, 8), (64, 32, 8), (64, 64, 4), (64, 64, 6), (64, 64, 8), (128, 32, 8), (128, 64, 6), (128, 128, 4))
WIDE_DEPTH, LEAST_WIDE_ROWS, MOST_WIDE_SUMS = 64, 32, 128 * 128
# (rows, columns, warps, stages)
TILED = ((64, 16, 4, 8), (64, 32, 4, 8), (64, 64, 4, 4), (64, 64, 4, 8), (128, 64, 8, 6), (128, 128, 8, 4))
SHARED_BYTES = 220_000

DECODE_CONFIGS = (
    DecodeConfig(4, 3, 2),
    DecodeConfig(4, 3, 3, 160),
    DecodeConfig(4, 2, 4, 128),
    DecodeConfig(2, 3, 3),
    DecodeConfig(2, 3, 4),
    DecodeConfig(2, 2, 4),
    DecodeConfig(2, 2, 6),
)
HOPPER_CONFIGS = (
    DecodeConfig(4, 2, 2, hopper_stages=2),
    DecodeConfig(4, 2, 2, hopper_stages=3),
    DecodeConfig(4, 2, 1, hopper_stages=4),
    DecodeConfig(4, 2, 1, hopper_stages=6),
    DecodeConfig(4, 2, 3, hopper_stages=2),
)
GROUP_CONFIGS = (
    DecodeConfig(4, 2, 1),
    DecodeConfig(4, 2, 2),
    DecodeConfig(4, 3, 1),
    DecodeConfig(4, 3, 2),
    DecodeConfig(8, 2, 1),
    DecodeConfig(8, 2, 2),
    DecodeConfig(8, 3, 1),
)


def timed(replay: Replay, repeats: int = FEW_REPEATS) -> float | None:
    """As `Replay.time`; None where something cannot be launched."""
    try:
        return replay.time(repeats)
    except Exception as error:
        # Such as Triton's own, of a launch that asks for more than there is.
        print(f"    cannot be launched: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}")
    torch.cuda.synchronize()
    return None


def ranked(times: list[tuple[str, float | None]], whole: float) -> str:
    """The fastest first, each with how far it is from the step as it is."""
    there = sorted(((time, name) for name, time in times if time is not None), key=lambda pair: pair[0])
    return "  ".join(f"{name} {time:.0f} ({time - whole:+.0f})" for time, name in there[:SHOWN])


# -------------------------------------------------------- parts left out


def ablations(replay: Replay) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """(what is left out, what leaves it out) of each."""
    operations, decoder = type(replay.decoder.operations), type(replay.decoder)
    yield "norms", replaced(operations, norm=nothing, add_norm=nothing)
    yield "rotary and cache", replaced(operations, rope_and_cache=nothing)
    yield "attention", replaced(operations, attention=nothing)
    if has_prompts(replay.size.kind):
        yield "activation", replaced(linear, act_and_mul=nothing)
        # The activation is a kernel of its own there, and stays.
        yield "products", replaced(Dense, forward=nothing)
    else:
        yield "merge", replaced(attention_decode, launch_merge=nothing)
        yield "products", replaced(Dense, forward=nothing, gated=nothing)
    if has_groups(replay.size.kind):
        yield "shared prefixes", replaced(attention_decode, launch_group=nothing)
    yield "last layer's MLP and head", replaced(decoder, compute_logits=nothing)


def ablate(replay: Replay, whole: float) -> None:
    """A step without each of its parts, and with launches that overlap nothing."""
    print("  without:", end="")
    for name, change in ablations(replay):
        with change:
            found = timed(replay)
        if found is not None:
            print(f"  {name} {found:.0f} ({found - whole:+.0f})", end="", flush=True)
    print()
    with without_overlap():
        replay.compile()
        found = timed(replay)
    if found is not None:
        print(f"  launches that do not overlap: {found:.0f} ({found - whole:+.0f})")


# -------------------------------------------------------- products


class Product:
    """One of a layer's four.

    Args:
        name: for people.
        dense: the first layer's.
        gated: whether it is gate and up at once.
        activation: then, by which.
        rows: of the step.
    """

    def __init__(self, name: str, dense: Dense, gated: bool, activation: str, rows: int) -> None:
        self.name = name
        self.key = (dense.weight.shape[0] // (1 + gated), dense.weight.shape[1], gated)
        self._dense, self._activation, self._rows = dense, activation, rows
        n, k, _ = self.key
        like: dict[str, Any] = {"dtype": dense.weight.dtype, "device": dense.weight.device}
        generator = torch.Generator(dense.weight.device).manual_seed(0)
        self._x = torch.empty(rows, k, **like).normal_(generator=generator)
        self._scratch = torch.empty(rows, 2 * n, **like)
        self._like = like

    def candidates(self) -> list[SkinnyTile | SlabTile | TiledTile | WideTile]:
        """Tiles that may serve."""
        _, k, gated = self.key
        rows = self._rows
        if rows > MAX_WIDE_ROWS or self._dense.weight.dtype == torch.float32:
            return []
        tiles: list[SkinnyTile | SlabTile | TiledTile | WideTile] = []
        height = next((height for height in (8, 16, 32, 64) if rows <= height), None)
        if height is not None and rows <= MAX_SKINNY_ROWS:
            tiles += [SkinnyTile(True, height, *rest) for rest in SWAPPED]
            tiles += [SkinnyTile(False, max(height, 16), *rest) for rest in UPRIGHT]
            pieces, rest = divmod(k, SLAB_PIECE)
            if rest == 0 and pieces <= MOST_SLAB_PIECES and height <= MOST_SLAB_ROWS:
                for columns, warps in SLABS:
                    if 2 * k * (columns * (1 + gated) + height) <= SHARED_BYTES:
                        tiles.append(SlabTile(height, columns, SLAB_PIECE, pieces, warps))
        if height is None or height > LEAST_WIDE_ROWS:
            if self._dense._capability == (9, 0) and k % WIDE_DEPTH == 0:
                tiles += [WideTile(*rest) for rest in WIDE if rest[0] < 2 * rows and self._fits(*rest)]
            tiles += [TiledTile(*rest) for rest in TILED if rest[0] < 2 * rows]
        return tiles

    def _fits(self, rows: int, columns: int, stages: int) -> bool:
        """Whether a wide tile's sums fit in registers, and what it copies in shared memory."""
        columns *= 1 + self.key[2]
        return rows * columns <= MOST_WIDE_SUMS and 2 * WIDE_DEPTH * stages * (rows + columns) <= SHARED_BYTES

    def force(self, products: Products, tile: Tile) -> None:
        """Have it computed by a tile, or by cuBLAS."""
        n, k, gated = self.key
        products.forced[self.key] = tile
        if gated and tile is None:
            products.forced[2 * n, k, False] = None

    def release(self, products: Products) -> None:
        """Have it computed as the tables say."""
        n, k, _ = self.key
        products.forced.pop(self.key, None)
        products.forced.pop((2 * n, k, False), None)

    def launch(self, tile: SkinnyTile | SlabTile | TiledTile | WideTile) -> None:
        """Launch a tile's kernel, whatever the tables say."""
        x, weight, bias, rows, out = self._x, self._dense.weight, self._dense.bias, self._rows, self._out()
        gated = self.key[2]
        if isinstance(tile, SlabTile) and gated:
            slab_gated(x, weight, out, rows, tile, self._activation)
        elif isinstance(tile, SlabTile):
            slab_product(x, weight, bias, out, rows, tile)
        elif isinstance(tile, WideTile) and gated:
            wide_gated(x, weight, out, rows, tile, self._activation)
        elif isinstance(tile, WideTile):
            wide_product(x, weight, bias, out, rows, tile)
        elif isinstance(tile, TiledTile) and gated:
            tiled_gated(x, weight, out, rows, tile, self._activation)
        elif isinstance(tile, TiledTile):
            tiled_product(x, weight, bias, out, rows, tile)
        elif gated:
            skinny_gated(x, weight, out, rows, tile, self._activation)
        else:
            skinny_product(x, weight, bias, out, rows, tile)

    def result(self) -> torch.Tensor:
        """What the dense layer computes of random numbers, by whatever is in force."""
        out = self._out()
        if self.key[2]:
            self._dense.gated(self._x, self._scratch, out, self._rows, self._activation)
        else:
            self._dense.forward(self._x, out, self._rows)
        return out

    def now(self) -> str:
        """What the tables say."""
        n, k, gated = self.key
        capability, rows = self._dense._capability, self._rows
        tile: Tile = slab_tile(capability, n, k, rows, gated=gated) or wide_tile(capability, n, k, rows, gated=gated)
        tile = tile or skinny_tile(capability, n, k, rows, gated=gated)
        return named(tile or (gated_tile(capability, n, rows) if gated else middle_tile(capability, n, k, rows)))

    def _out(self) -> torch.Tensor:
        return torch.zeros(self._rows, self.key[0], **self._like)


def named(tile: Tile) -> str:
    """Such as `slab 8: 16,2` (rows, columns, warps), or `swapped 8: 32,128,2,5` (columns, depth, warps, stages)."""
    if tile is None:
        return "cublas"
    if isinstance(tile, WideTile):
        return f"wide {tile.rows}: {tile.columns},{tile.stages}"
    if isinstance(tile, TiledTile):
        return f"tiled {tile.rows}: {tile.columns},{tile.warps},{tile.stages}"
    if isinstance(tile, SlabTile):
        return f"slab {tile.rows}: {tile.columns},{tile.warps}"
    way = "swapped" if tile.swap else "upright"
    return f"{way} {tile.rows}: {tile.columns},{tile.depth},{tile.warps},{tile.stages}"


def products_of(replay: Replay) -> list[Product]:
    """The four of a layer that have tiles to choose from."""
    spec, layer, rows = replay.decoder.spec, replay.decoder.weights.layers[0], replay.size.tokens
    found: list[Product] = []
    for name, source, gated in (
        ("qkv", layer.qkv, False),
        ("o", layer.o, False),
        ("gate_up", layer.gate_up, layer.gate_up.dense.bias is None),
        ("down", layer.down, False),
    ):
        product = Product(name, source.dense, gated, spec.activation, rows)
        if all(product.key != other.key for other in found):
            found.append(product)
    return found


def tune_products(replay: Replay) -> None:
    """Each product by each tile, the best of one kept for the next; then all of the best."""
    products, chosen = Products(), products_of(replay)
    calls = {
        (number, tile): functools.partial(product.launch, tile)
        for number, product in enumerate(chosen)
        for tile in product.candidates()
    }
    if not calls:
        print(f"  products: nothing to choose for more than {MAX_WIDE_ROWS} rows")
        return
    begin = time.perf_counter()
    good = compiled(calls)
    print(f"  products: {len(good)} of {len(calls)} launches compiled in {time.perf_counter() - begin:.0f} s")
    with products.in_force():
        for number, product in enumerate(chosen):
            tiles = [tile for which, tile in calls if which == number and (which, tile) in good]
            tune_product(replay, products, product, tiles)
        final = timed(replay)
    if final is not None:
        print(f"    best of each: {final:.0f}")


def tune_product(replay: Replay, products: Products, product: Product, tiles: Sequence[Tile]) -> None:
    """One product by each tile; forces the best where it is clearly better."""
    base = replay.time()
    product.force(products, None)
    expected = product.result()
    found: list[tuple[Tile, float]] = []
    differing = []
    for tile in (None, *tiles):
        product.force(products, tile)
        taken = timed(replay)
        if taken is None:
            continue
        if torch.equal(product.result(), expected):
            found.append((tile, taken))
        else:
            differing.append(named(tile))
    product.release(products)
    times: list[tuple[str, float | None]] = [(named(tile), taken) for tile, taken in found]
    print(f"    {product.name:8} now {product.now()} {base:.0f}:  {ranked(times, base)}", flush=True)
    if differing:
        print(f"    {'':8} OTHER BITS: {', '.join(differing)}")
    best, taken = min(found, key=lambda pair: pair[1], default=(None, base))
    if taken < base * (1 - CLEAR_GAIN):
        product.force(products, best)


# -------------------------------------------------------- attention


def described(config: DecodeConfig) -> str:
    """Such as `4,3,2` (warps, stages, programs), with registers where they are bounded; `hopper` for its own kernel."""
    stages = f"hopper {config.hopper_stages}" if config.hopper_stages else config.num_stages
    text = f"{config.num_warps},{stages},{config.programs}"
    return text + (f",r{config.registers}" if config.registers else "")


def tune_attention(replay: Replay, whole: float) -> None:
    """Each launch of the decode kernel, and of the shared prefixes' where the step has some."""
    decoder, inputs = replay.decoder, replay.inputs
    shape, tokens = decoder.operations.attention_shape, replay.size.tokens
    work = next(iter(replay.works.values()))
    cache, qkv = replay.cache.layers[0], decoder._qkv
    if shape.kv_fp8 and work.capability < 89:
        cache = cache.view(torch.uint8)

    def group(config: DecodeConfig) -> None:
        launch_group(qkv, cache, inputs.block_tables[0], work, shape, work.stats, shape.scale, config)

    now = described(decode_launch(work, tokens))
    times: list[tuple[str, float | None]] = []
    for config in (*DECODE_CONFIGS, *(HOPPER_CONFIGS if work.on_hopper else ())):
        for each in replay.works.values():
            each.launch = config
        replay.compile()
        times.append((described(config), timed(replay)))
    for each in replay.works.values():
        each.launch = None
    print(f"  decode attention, now {now} {whole:.0f}:  {ranked(times, whole)}", flush=True)
    if not has_groups(replay.size.kind) or not work.members:
        return
    good = compiled({config: functools.partial(group, config) for config in GROUP_CONFIGS})
    times = []
    for config in (config for config in GROUP_CONFIGS if config in good):
        with replaced(attention_decode, launch_group=lambda *rest, config=config: launch_group(*rest[:-1], config)):
            times.append((described(config), timed(replay)))
    now = described(group_config(work.capability, shape))
    print(f"  shared prefixes, now {now} {whole:.0f}:  {ranked(times, whole)}", flush=True)


# -------------------------------------------------------- the steps


def tune_decode(engine: Engine, batch: int, context: int, shared: int, what: Sequence[str]) -> None:
    """A decode step of so many rows."""
    plan = engine.settle(batch, context, shared, OUTPUT, READY_STEPS)
    synchronize()
    replay = Replay(engine.runner, plan)
    whole = replay.time()
    print(
        f"== {replay.size.kind} step of {batch} rows (graph of {replay.size.tokens}), context {context}, "
        f"shared {shared}: {whole:.0f} us",
        flush=True,
    )
    if "ablate" in what:
        ablate(replay, whole)
    if "products" in what:
        tune_products(replay)
    if "attention" in what:
        tune_attention(replay, whole)
    engine.abandon(batch)


def tune_prefill(engine: Engine, tokens: int) -> None:
    """The first step of a prompt; once more, as the first of a size may have been run without its graph."""
    for _ in range(2):
        engine.drain()
        engine.submit(tokens, 1)
        plan = engine.step()
        synchronize()
    replay = Replay(engine.runner, plan)
    whole = replay.time()
    print(f"== prompt step of {plan.num_tokens} tokens (graph of {replay.size.tokens}): {whole:.0f} us", flush=True)
    ablate(replay, whole)
    engine.drain()


def main() -> None:
    parser = argparse.ArgumentParser(description="What the parts of a step cost in it, and what would be faster.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1088)
    parser.add_argument("--shared", type=int, default=0, help="tokens of the context that all rows have in common")
    parser.add_argument("--what", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="tokens of prompts to look into likewise")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="other settings of the engine")
    options = parser.parse_args()
    if DEVICE != "cuda":
        parser.error("it replays graphs, which only a GPU has")
    begin = time.perf_counter()
    engine = Engine(settings(options.model, options.set))
    print(f"loaded in {time.perf_counter() - begin:.1f} s", flush=True)
    for batch in options.batch:
        tune_decode(engine, batch, options.context, options.shared, options.what)
    for tokens in options.prefill:
        tune_prefill(engine, tokens)
    engine.loop.close()
    print(f"took {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
