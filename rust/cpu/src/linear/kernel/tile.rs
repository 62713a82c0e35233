//! One tile of the result: some rows times some columns, all of a range of k, in registers.

use half::bf16;

use super::{PANEL, STEP};

/// Vectors of 32-bit lanes, each lane a column.
///
/// # Safety
/// The methods need the processor to have the instruction set, and pointers that their names say enough about.
pub(super) trait Simd {
    /// Lanes of a vector.
    const LANES: usize;
    /// Products a word holds that are added one after another: 2 where bf16 pairs are widened.
    const HALVES: usize;
    /// f32 lanes.
    type Float: Copy;
    /// Words of the weight, or of x in every lane, as `multiply_add` takes them.
    type Words: Copy;

    unsafe fn zero() -> Self::Float;
    unsafe fn words(source: *const u32, half: usize) -> Self::Words;
    unsafe fn broadcast(source: *const u32, half: usize) -> Self::Words;
    unsafe fn multiply_add(sum: Self::Float, x: Self::Words, weight: Self::Words) -> Self::Float;
    unsafe fn load(source: *const f32) -> Self::Float;
    unsafe fn add(left: Self::Float, right: Self::Float) -> Self::Float;
    unsafe fn store(target: *mut f32, values: Self::Float);
    unsafe fn store_bf16(target: *mut bf16, values: Self::Float);
    unsafe fn prefetch(address: *const u8);
}

/// What a tile does with its sums.
#[derive(Clone, Copy)]
pub(super) enum Store {
    /// Back to the scratch, until the next block of k.
    Carry,
    /// Add the bias and write.
    F32(*mut f32),
    /// Add the bias, round and write.
    Bf16(*mut bf16),
}

/// A tile's operands.
pub(super) struct Tile {
    /// First row, first step.
    pub(super) x: *const u8,
    /// Bytes from row to row.
    pub(super) x_stride: usize,
    /// First column, first step.
    pub(super) weight: *const u8,
    /// Bytes from panel to panel.
    pub(super) panel_bytes: usize,
    /// Words of k.
    pub(super) steps: usize,
    /// Fetched meanwhile: two cache lines a step from here on.
    pub(super) prefetch: *const u8,
    /// Bytes from step to step.
    pub(super) prefetch_step: usize,
    /// Sums of the blocks of k before; null to begin with zeros.
    pub(super) carried: *const f32,
    /// Where `Store::Carry` puts them.
    pub(super) carry: *mut f32,
    /// Elements from row to row.
    pub(super) carry_stride: usize,
    pub(super) store: Store,
    /// Elements from row to row.
    pub(super) store_stride: usize,
    /// Of the first column; null for none.
    pub(super) bias: *const f32,
}

/// Computes a tile of a fixed number of rows and columns.
pub(super) type TileFn = unsafe fn(&Tile);

/// Tiles of one width.
pub(super) struct Shape {
    /// Columns: 16, 32 or 64.
    pub(super) columns: usize,
    /// By the number of rows, from 1 up.
    pub(super) tiles: &'static [TileFn],
}

/// Repeats the block for every index below a constant of at most 8. Sums stay in registers only if every index is a
/// constant, and the compiler's own unrolling is not certain.
macro_rules! unroll {
    ($index:ident < $end:ident, $body:block) => {
        unroll!($index < $end, $body, 0, 1, 2, 3, 4, 5, 6, 7)
    };
    ($index:ident < $end:ident, $body:block, $($value:literal),+) => {
        $(if $value < $end {
            let $index = $value;
            $body
        })+
    };
}

/// The tile of `ROWS` rows and `VECTORS` vectors of columns.
///
/// # Safety
/// The processor has the instruction set; the operands lie within memory that may be read and written.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const ROWS: usize, const VECTORS: usize>(tile: &Tile) {
    // SAFETY: the caller's promise; offsets stay within the operands.
    unsafe {
        let mut sums = [[S::zero(); VECTORS]; ROWS];
        if !tile.carried.is_null() {
            unroll!(row < ROWS, {
                unroll!(vector < VECTORS, {
                    let offset = row * tile.carry_stride + vector * S::LANES;
                    sums[row][vector] = S::load(tile.carried.add(offset));
                });
            });
        }
        let mut x = [tile.x; ROWS];
        unroll!(row < ROWS, { x[row] = tile.x.add(row * tile.x_stride) });
        let mut weight = tile.weight;
        let mut ahead = tile.prefetch;
        for step in 0..tile.steps {
            for half in 0..S::HALVES {
                let mut words = [S::words(weight.cast(), half); VECTORS];
                unroll!(vector < VECTORS, {
                    let column = vector * S::LANES;
                    let offset = column / PANEL * tile.panel_bytes + column % PANEL * 4;
                    words[vector] = S::words(weight.add(offset).cast(), half);
                });
                unroll!(row < ROWS, {
                    let x = S::broadcast(x[row].add(step * 4).cast(), half);
                    unroll!(vector < VECTORS, {
                        sums[row][vector] = S::multiply_add(sums[row][vector], x, words[vector]);
                    });
                });
            }
            S::prefetch(ahead);
            S::prefetch(ahead.wrapping_add(64));
            ahead = ahead.wrapping_add(tile.prefetch_step);
            weight = weight.add(STEP);
        }
        if !tile.bias.is_null() {
            unroll!(vector < VECTORS, {
                let bias = S::load(tile.bias.add(vector * S::LANES));
                unroll!(row < ROWS, { sums[row][vector] = S::add(sums[row][vector], bias) });
            });
        }
        unroll!(row < ROWS, {
            unroll!(vector < VECTORS, {
                let (sum, column) = (sums[row][vector], vector * S::LANES);
                let stored = row * tile.store_stride + column;
                match tile.store {
                    Store::Carry => S::store(tile.carry.add(row * tile.carry_stride + column), sum),
                    Store::F32(target) => S::store(target.add(stored), sum),
                    Store::Bf16(target) => S::store_bf16(target.add(stored), sum),
                }
            });
        });
    }
}

/// The tiles of a vector type, as `TileFn`s compiled for a set of target features.
macro_rules! tiles {
    ($(#[$attribute:meta])* $simd:ty, $vectors:literal, [$($rows:literal),+]) => {{
        $(#[$attribute])*
        unsafe fn of<const ROWS: usize>(operands: &$crate::linear::kernel::tile::Tile) {
            // SAFETY: the caller's promise.
            unsafe { $crate::linear::kernel::tile::tile::<$simd, ROWS, $vectors>(operands) }
        }
        $crate::linear::kernel::tile::Shape {
            columns: $vectors * <$simd as $crate::linear::kernel::tile::Simd>::LANES,
            tiles: &[$(of::<$rows>),+],
        }
    }};
}
pub(super) use tiles;
