use super::*;
use crate::isa::{set_isa, usable};

/// Function values of a few thousand arguments.
struct Map<'a> {
    function: u8,
    x: &'a [f32],
}

impl Op for Map<'_> {
    type Output = Vec<f32>;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> Vec<f32> {
        let mut out = Vec::new();
        for part in self.x.chunks_exact(LANES) {
            // SAFETY: sixteen floats.
            let x = unsafe { l.load(part.as_ptr()) };
            out.extend(l.to_array(match self.function {
                0 => exp2(l, x),
                1 => exp(l, x),
                2 => tanh(l, x),
                _ => l.round_bf16(x),
            }));
        }
        out
    }
}

/// From `first` in equal steps.
fn line(first: f32, step: f32) -> Vec<f32> {
    (0..4096).map(|i| first + step * i as f32).collect()
}

#[test]
fn functions_are_within_their_bounds_on_every_instruction_set() {
    for isa in usable() {
        set_isa(isa).unwrap();
        let x = line(-125.0, 0.06);
        for (&x, y) in x.iter().zip(dispatch(Map { function: 0, x: &x })) {
            let exact = f64::from(x).exp2();
            assert!((f64::from(y) - exact).abs() <= 2e-7 * exact, "{isa:?} {x} {y} {exact}");
        }
        let x = line(-87.0, 0.042);
        for (&x, y) in x.iter().zip(dispatch(Map { function: 1, x: &x })) {
            let exact = f64::from(x).exp();
            assert!((f64::from(y) - exact).abs() <= 2e-7 * exact, "{isa:?} {x} {y} {exact}");
        }
        let x = line(-100.0, 0.05);
        for (&x, y) in x.iter().zip(dispatch(Map { function: 2, x: &x })) {
            let exact = f64::from(x).tanh();
            assert!((f64::from(y) - exact).abs() <= 3e-7, "{isa:?} {x} {y} {exact}");
        }
    }
}

#[test]
fn the_ends_of_the_exponential_are_exact() {
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    let mut x = [0.0; LANES];
    x[..4].copy_from_slice(&[-infinity, -1e30, nan, -0.0]);
    for isa in usable() {
        set_isa(isa).unwrap();
        for function in 0..2 {
            let y = dispatch(Map { function, x: &x });
            assert_eq!(y[..2], [0.0, 0.0]);
            assert!(y[2].is_nan());
            assert_eq!(y[3..], [1.0; LANES - 3]);
        }
    }
}

#[test]
fn bf16_is_rounded_to_even_on_every_instruction_set() {
    let x: Vec<f32> = (0..65_536u32)
        .map(|i| f32::from_bits(0x3f7f_0000 + i * 3))
        .chain([f32::INFINITY, f32::NAN, -0.0, f32::MAX].repeat(4))
        .collect();
    for isa in usable() {
        set_isa(isa).unwrap();
        for (x, y) in x.iter().zip(dispatch(Map { function: 3, x: &x })) {
            let expected = half::bf16::from_f32(*x).to_f32();
            assert!(
                y.to_bits() == expected.to_bits() || (y.is_nan() && x.is_nan()),
                "{isa:?} {x} {y}"
            );
        }
    }
}
