//! Gated activations.
#![allow(unsafe_code, reason = "its arguments are raw pointers into tensors")]
#![allow(clippy::inline_always, reason = "generic code must inline into its target_feature caller")]

use std::marker::PhantomData;

use crate::math::{
    Bf16, Dtype, Element, F32, LANES, Lanes, Op, dispatch, erf, exp, load_part, store_part,
};
use crate::pool::parallel_for;
use crate::shared::Shared;

/// Elements of the output that one thread takes at a time.
const ITEM_ELEMENTS: usize = 8192;

/// The function of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x).
    Silu,
    /// x * Phi(x), through erf.
    Gelu,
    /// GELU's tanh form.
    GeluTanh,
}

/// What one call of [`act_and_mul`] works on.
#[derive(Clone, Copy, Debug)]
pub struct ActAndMul {
    /// Element type.
    pub dtype: Dtype,
    /// The function of the gate.
    pub activation: Activation,
    /// [rows, 2 * n]: gates, then factors.
    pub gate_up: *const u8,
    /// [rows, n].
    pub out: *mut u8,
    /// Rows.
    pub rows: usize,
    /// Elements of an output row.
    pub n: usize,
}

/// out = activation(gate) * up, float32 inside; the activation is rounded before the product.
///
/// # Safety
/// The pointers are valid for what the fields say.
pub unsafe fn act_and_mul(call: &ActAndMul) {
    let shared = Shared::new(*call);
    let item_rows = (ITEM_ELEMENTS / call.n.max(1)).max(1);
    parallel_for(call.rows.div_ceil(item_rows), &|item| {
        let call = shared.get();
        let first = item * item_rows;
        let end = call.rows.min(first + item_rows);
        match call.dtype {
            Dtype::Bf16 => dispatch(Rows::<Bf16> { call, first, end, element: PhantomData }),
            Dtype::F32 => dispatch(Rows::<F32> { call, first, end, element: PhantomData }),
        }
    });
}

/// A range of rows.
struct Rows<'a, E> {
    call: &'a ActAndMul,
    first: usize,
    end: usize,
    element: PhantomData<E>,
}

impl<E: Element> Op for Rows<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        match self.call.activation {
            Activation::Silu => self.rows::<L, 0>(l),
            Activation::Gelu => self.rows::<L, 1>(l),
            Activation::GeluTanh => self.rows::<L, 2>(l),
        }
    }
}

impl<E: Element> Rows<'_, E> {
    #[inline(always)]
    fn rows<L: Lanes, const ACTIVATION: u8>(&self, l: L) {
        let n = self.call.n;
        for row in self.first..self.end {
            // SAFETY: rows of 2 n and of n elements, by the caller's promise.
            unsafe {
                let gate = self.call.gate_up.cast::<E::Raw>().add(row * 2 * n);
                let out = self.call.out.cast::<E::Raw>().add(row * n);
                for i in (0..n).step_by(LANES) {
                    let count = LANES.min(n - i);
                    let up = load_part::<L, E>(l, gate.add(n + i), count);
                    let gate = load_part::<L, E>(l, gate.add(i), count);
                    // By a constant: a function passed as a value would not inline into vector code.
                    let active = match ACTIVATION {
                        0 => silu(l, gate),
                        1 => gelu(l, gate),
                        _ => gelu_tanh(l, gate),
                    };
                    store_part::<L, E>(l, out.add(i), l.mul(E::round(l, active), up), count);
                }
            }
        }
    }
}

#[inline(always)]
fn silu<L: Lanes>(l: L, x: L::F) -> L::F {
    l.div(x, l.add(l.splat(1.0), exp(l, l.sub(l.splat(0.0), x))))
}

#[inline(always)]
fn gelu<L: Lanes>(l: L, x: L::F) -> L::F {
    let phi = erf(l, l.mul(x, l.splat(std::f32::consts::FRAC_1_SQRT_2)));
    l.mul(l.mul(x, l.splat(0.5)), l.add(l.splat(1.0), phi))
}

#[inline(always)]
fn gelu_tanh<L: Lanes>(l: L, x: L::F) -> L::F {
    let cube = l.mul(l.mul(x, x), x);
    // 0.5 (1 + tanh(t)) is sigmoid(2 t), which loses nothing where tanh is near -1; 2 sqrt(2 / pi).
    let twice = l.mul(l.splat(1.595_769_2), l.fma(cube, l.splat(0.044_715), x));
    l.div(x, l.add(l.splat(1.0), exp(l, l.sub(l.splat(0.0), twice))))
}
