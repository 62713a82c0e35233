//! The product: how it is cut into items for the threads and tiles for the registers.
#![allow(unsafe_code)]
// What is called between a tile and its instructions must vanish: there the vectors live in registers.
#![allow(clippy::inline_always)]
// The intrinsics' names say which they are.
#![allow(clippy::wildcard_imports)]

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

use half::bf16;

use super::{Dtype, Input, Linear, Output, PANEL};
use crate::isa::Isa;
use crate::pool::{num_threads, parallel_for};
use tile::{Shape, Store, Tile};

/// Bytes of a panel's step: 32 columns of a word.
const STEP: usize = PANEL * 4;
/// Steps of k after which a tile's accumulators rest in scratch, so that two panels' share stays in the L2 cache.
const BLOCK_STEPS: usize = 1024;
/// Rows of an item at most: bounds the scratch.
const BLOCK_ROWS: usize = 256;
/// Rows of an item at least, where there are more: below that, fetching the weight costs more than it saves.
const MIN_BLOCK_ROWS: usize = 32;
/// Bytes of rows that may stay in the L2 cache while weights pass by.
const STAY_BYTES: usize = 1 << 19;
/// How far ahead of itself a tile that streams the weight fetches it, in bytes.
const STREAM_AHEAD: usize = 8192;

thread_local! {
    /// Accumulators between blocks of k, kept for the next product.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The tiles of an instruction set for one dtype.
struct Kernels {
    /// 32 columns at once, for few rows.
    skinny: Shape,
    /// Most products a weight that is loaded.
    bulk: Shape,
    /// Rows up to which `skinny` is used.
    skinny_rows: usize,
}

fn kernels(isa: Isa, dtype: Dtype) -> &'static Kernels {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 if dtype == Dtype::Bf16 => &x86::AVX512_BF16,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 => match dtype {
            Dtype::Bf16 => &x86::AVX512_WIDENED,
            Dtype::F32 => &x86::AVX512_F32,
        },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => match dtype {
            Dtype::Bf16 => &x86::AVX2_WIDENED,
            Dtype::F32 => &x86::AVX2_F32,
        },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => match dtype {
            Dtype::Bf16 => &neon::WIDENED,
            Dtype::F32 => &neon::F32,
        },
        _ => match dtype {
            Dtype::Bf16 => &portable::WIDENED,
            Dtype::F32 => &portable::F32,
        },
    }
}

/// Where the result goes.
#[derive(Clone, Copy)]
enum Target {
    F32(*mut f32),
    Bf16(*mut bf16),
}

/// A product whose arguments were checked.
struct Product<'a> {
    linear: &'a Linear,
    kernels: &'static Kernels,
    x: *const u8,
    /// Bytes.
    x_stride: usize,
    target: Target,
    /// Elements.
    target_stride: usize,
    threads: usize,
}

// SAFETY: threads read x and write disjoint columns or rows of the target.
unsafe impl Sync for Product<'_> {}

/// Compute the product. `Linear::forward` has checked that the rows lie within the slices, and padded an odd k.
pub(super) fn run(
    linear: &Linear,
    isa: Isa,
    x: Input<'_>,
    x_stride: usize,
    out: Output<'_>,
    target_stride: usize,
    rows: usize,
) {
    assert!(isa.is_usable(), "kernels of {} on a processor without it", isa.name());
    let x = match x {
        Input::Bf16(x) => x.as_ptr().cast(),
        Input::F32(x) => x.as_ptr().cast(),
    };
    let target = match out {
        Output::Bf16(out) => Target::Bf16(out.as_mut_ptr()),
        Output::F32(out) => Target::F32(out.as_mut_ptr()),
    };
    let kernels = kernels(isa, linear.dtype);
    let x_stride = x_stride * linear.dtype.bytes();
    let threads = num_threads();
    let product = Product { linear, kernels, x, x_stride, target, target_stride, threads };
    if rows <= kernels.skinny_rows {
        product.stream(rows);
    } else {
        product.blocks(rows);
    }
}

impl Product<'_> {
    fn panels(&self) -> usize {
        self.linear.n.div_ceil(PANEL)
    }

    /// Few rows: the weight streams by once, a range of panels an item.
    fn stream(&self, rows: usize) {
        let (panels, shape) = (self.panels(), &self.kernels.skinny);
        // As many ranges for each thread: of three panels or more, for the stream's start costs.
        let ranges = self.threads * (panels / self.threads / 3).clamp(1, 8);
        let ranges = ranges.min(panels);
        let first = |range: usize| panels * range / ranges;
        parallel_for(ranges, &|range| {
            for panel in first(range)..first(range + 1) {
                let next = match panel + 1 {
                    next if next == first(range + 1) => first(range + self.threads),
                    next => next,
                };
                let next = (rows > shape.tiles.len() && next < panels).then(|| next..next + 1);
                self.unit(panel..panel + 1, shape, 0..rows, next);
            }
        });
    }

    /// Many rows: an item is as many columns as a bulk tile has, times a block of rows.
    fn blocks(&self, rows: usize) {
        let (panels, bulk) = (self.panels(), &self.kernels.bulk);
        let width = bulk.columns.div_ceil(PANEL);
        let units = panels.div_ceil(width);
        let even = (16 * self.threads).div_ceil(units).min(rows.div_ceil(MIN_BLOCK_ROWS));
        let busy = self.threads.div_ceil(units).min(rows.div_ceil(bulk.tiles.len()));
        let blocks = even.max(busy).max(rows.div_ceil(BLOCK_ROWS));
        let unit = |index: usize| index * width..panels.min((index + 1) * width);
        // What is larger, a block's rows or a unit's weights, stays in the cache from one item to the next.
        let rows_stay = rows.div_ceil(blocks) * self.x_stride;
        let rows_stay = (width * self.linear.steps() * STEP..=STAY_BYTES).contains(&rows_stay);
        let place = |item: usize| {
            if rows_stay { (item / units, item % units) } else { (item % blocks, item / blocks) }
        };
        parallel_for(units * blocks, &|item| {
            let (block, this) = place(item);
            let range = rows * block / blocks..rows * (block + 1) / blocks;
            let panels = unit(this);
            let narrow = bulk.columns > panels.len() * PANEL;
            let shape = if narrow { &self.kernels.skinny } else { bulk };
            // Very likely what this thread claims next.
            let next = item + self.threads;
            let next = (next < units * blocks).then(|| place(next).1);
            let next = next.filter(|&next| next != this).map(unit);
            self.unit(panels, shape, range, next);
        });
    }

    /// The result's `rows` in the columns of some panels; `next` are the panels wanted afterwards.
    fn unit(
        &self,
        panels: Range<usize>,
        shape: &Shape,
        rows: Range<usize>,
        next: Option<Range<usize>>,
    ) {
        let steps = self.linear.steps();
        let mut block =
            Block { panels, shape, rows, steps: 0..steps, carry: ptr::null_mut(), next };
        if steps <= BLOCK_STEPS || block.rows.len() <= shape.tiles.len() {
            return self.block(&block);
        }
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.resize(block.rows.len() * block.width(), 0.0);
            block.carry = scratch.as_mut_ptr();
            for begin in (0..steps).step_by(BLOCK_STEPS) {
                block.steps = begin..steps.min(begin + BLOCK_STEPS);
                self.block(&block);
            }
        });
    }

    fn block(&self, block: &Block<'_>) {
        let Block { panels, shape, rows, steps, .. } = block;
        // A slice that the last panel pads does not exist.
        let columns = block.width().min(self.linear.n - panels.start * PANEL);
        let slices = columns.div_ceil(shape.columns);
        let tiles = rows.len().div_ceil(shape.tiles.len());
        let mut ahead = Ahead::new(self, block, slices * tiles);
        for slice in 0..slices {
            for index in 0..tiles {
                let begin = rows.start + rows.len() * index / tiles;
                let end = rows.start + rows.len() * (index + 1) / tiles;
                let column = panels.start * PANEL + slice * shape.columns;
                self.tile(block, begin..end, column, ahead.take(steps.len()));
            }
        }
    }

    fn tile(
        &self,
        block: &Block<'_>,
        rows: Range<usize>,
        column: usize,
        ahead: (*const u8, usize),
    ) {
        let linear = self.linear;
        let columns = block.shape.columns;
        let panel_bytes = linear.steps() * STEP;
        let last = block.steps.end == linear.steps();
        // A panel at the weight's edge has columns that the target lacks.
        let valid = columns.min(linear.n - column);
        let mut edge = MaybeUninit::<[f32; MAX_TILE]>::uninit();
        let (store, store_stride) = match self.target {
            _ if !last => (Store::Carry, 0),
            Target::F32(_) if valid < columns => (Store::F32(edge.as_mut_ptr().cast()), columns),
            Target::Bf16(_) if valid < columns => (Store::Bf16(edge.as_mut_ptr().cast()), columns),
            // SAFETY: within the target, which was checked to hold these rows and columns.
            Target::F32(target) => unsafe {
                (
                    Store::F32(target.add(rows.start * self.target_stride + column)),
                    self.target_stride,
                )
            },
            // SAFETY: as above.
            Target::Bf16(target) => unsafe {
                (
                    Store::Bf16(target.add(rows.start * self.target_stride + column)),
                    self.target_stride,
                )
            },
        };
        // SAFETY: offsets of rows, steps and columns within x, the packed weight, the bias and the scratch; the
        // function is compiled for an instruction set that `run` has found usable, and as many rows as there are.
        unsafe {
            let carry = if block.carry.is_null() {
                ptr::null_mut()
            } else {
                let offset = (rows.start - block.rows.start) * block.width();
                block.carry.add(offset + column - block.panels.start * PANEL)
            };
            let weight = linear.words.as_ptr().cast::<u8>();
            let tile = Tile {
                x: self.x.add(rows.start * self.x_stride + block.steps.start * 4),
                x_stride: self.x_stride,
                weight: weight.add(
                    column / PANEL * panel_bytes + column % PANEL * 4 + block.steps.start * STEP,
                ),
                panel_bytes,
                steps: block.steps.len(),
                prefetch: ahead.0,
                prefetch_step: ahead.1,
                carried: if block.steps.start == 0 { ptr::null() } else { carry },
                carry,
                carry_stride: block.width(),
                store,
                store_stride,
                bias: match linear.bias.get(column..) {
                    Some(bias) if last && !bias.is_empty() => bias.as_ptr(),
                    _ => ptr::null(),
                },
            };
            block.shape.tiles[rows.len() - 1](&tile);
        }
        if last && valid < columns {
            self.copy_edge(edge.as_ptr().cast(), columns, valid, rows, column);
        }
    }

    /// The valid columns of a tile that was computed aside.
    fn copy_edge(
        &self,
        edge: *const f32,
        columns: usize,
        valid: usize,
        rows: Range<usize>,
        column: usize,
    ) {
        for (index, row) in rows.enumerate() {
            let (from, to) = (index * columns, row * self.target_stride + column);
            // SAFETY: the target was checked to hold `valid` columns from here; the tile has written all of `edge`
            // that is its own, in the target's dtype.
            unsafe {
                match self.target {
                    Target::F32(target) => {
                        target.add(to).copy_from_nonoverlapping(edge.add(from), valid);
                    }
                    Target::Bf16(target) => {
                        let edge = edge.cast::<bf16>();
                        target.add(to).copy_from_nonoverlapping(edge.add(from), valid);
                    }
                }
            }
        }
    }
}

/// Elements of the largest tile.
const MAX_TILE: usize = 8 * 64;

/// Some columns times some rows times some steps of k.
struct Block<'a> {
    panels: Range<usize>,
    shape: &'a Shape,
    rows: Range<usize>,
    steps: Range<usize>,
    /// Scratch of `rows` times `width`; null where all of k is one block.
    carry: *mut f32,
    next: Option<Range<usize>>,
}

impl Block<'_> {
    fn width(&self) -> usize {
        self.panels.len() * PANEL
    }
}

/// What the tiles of a block fetch meanwhile: the weights of the block to come, a share each.
struct Ahead {
    first: *const u8,
    /// Bytes of one panel's share of the block to come.
    range: usize,
    panel_bytes: usize,
    ranges: usize,
    tiles: usize,
    taken: usize,
}

impl Ahead {
    fn new(product: &Product<'_>, block: &Block<'_>, tiles: usize) -> Self {
        let steps = product.linear.steps();
        let panel_bytes = steps * STEP;
        let weight = product.linear.words.as_ptr().cast::<u8>();
        let (panels, range) = if block.steps.end < steps {
            let length = (steps - block.steps.end).min(BLOCK_STEPS);
            (block.panels.clone(), block.steps.end..block.steps.end + length)
        } else if let Some(next) = &block.next {
            (next.clone(), 0..steps.min(BLOCK_STEPS))
        } else {
            // The tile streams the weight: a little ahead of itself, into what comes next in memory.
            let first = weight.wrapping_add(block.panels.start * panel_bytes + STREAM_AHEAD);
            return Self { first, range: panel_bytes, panel_bytes, ranges: 1, tiles: 1, taken: 0 };
        };
        Self {
            first: weight.wrapping_add(panels.start * panel_bytes + range.start * STEP),
            range: range.len() * STEP,
            panel_bytes,
            ranges: panels.len(),
            tiles,
            taken: 0,
        }
    }

    /// The next tile's share: where it begins, and bytes a step.
    fn take(&mut self, steps: usize) -> (*const u8, usize) {
        let bytes = self.range * self.ranges;
        let begin = bytes * self.taken / self.tiles / 64 * 64;
        self.taken += 1;
        let offset = begin / self.range * self.panel_bytes + begin % self.range;
        let step = (bytes / self.tiles).div_ceil(steps).next_multiple_of(64).min(STEP);
        (self.first.wrapping_add(offset), step)
    }
}
