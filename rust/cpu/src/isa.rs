//! Which instruction set the kernels use: the best one the processor has, unless a test forces a slower one.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

/// An instruction set that kernels are written for, slowest first.
///
/// AMX is left out: its intrinsics are not stable in Rust.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Isa {
    /// Plain Rust.
    Portable = 1,
    /// 64-bit Arm's 128-bit vectors.
    Neon = 2,
    /// AVX2 with FMA.
    Avx2 = 3,
    /// AVX-512 F, BW, DQ and VL.
    Avx512 = 4,
    /// AVX-512 with dot products of bf16 pairs.
    Avx512Bf16 = 5,
}

/// The processor lacks the instruction set that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnsupportedIsa(
    /// What was asked for.
    pub Isa,
);

impl fmt::Display for UnsupportedIsa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let usable: Vec<_> = usable().into_iter().map(Isa::name).collect();
        write!(formatter, "this processor has no {}; it has {}", self.0.name(), usable.join(", "))
    }
}

impl std::error::Error for UnsupportedIsa {}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Self; 5] =
        [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

    /// The name used in settings and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
        }
    }

    /// The instruction set of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name)
    }

    /// Whether this processor has it.
    #[must_use]
    pub fn is_usable(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_usable()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Self::Avx512.is_usable() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Bf16 => false,
        }
    }
}

/// The one in use; 0 until it is first asked for.
static CURRENT: AtomicU8 = AtomicU8::new(0);

/// The instruction set in use.
#[must_use]
pub fn isa() -> Isa {
    let current = CURRENT.load(Ordering::Relaxed);
    if let Some(isa) = Isa::ALL.into_iter().find(|&isa| isa as u8 == current) {
        return isa;
    }
    let best = usable().pop().unwrap_or(Isa::Portable);
    CURRENT.store(best as u8, Ordering::Relaxed);
    best
}

/// Use another instruction set from now on.
///
/// # Errors
/// The processor lacks it.
pub fn set_isa(isa: Isa) -> Result<(), UnsupportedIsa> {
    if !isa.is_usable() {
        return Err(UnsupportedIsa(isa));
    }
    CURRENT.store(isa as u8, Ordering::Relaxed);
    Ok(())
}

/// Every instruction set this processor has, slowest first.
#[must_use]
pub fn usable() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_usable()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        for isa in Isa::ALL {
            assert_eq!(Isa::from_name(isa.name()), Some(isa));
        }
        assert_eq!(Isa::from_name("mmx"), None);
    }

    #[test]
    fn a_missing_instruction_set_is_refused() {
        assert!(usable().contains(&isa()));
        let missing = Isa::ALL.into_iter().find(|isa| !isa.is_usable());
        let missing = missing.expect("no processor has both NEON and AVX");
        assert_eq!(set_isa(missing), Err(UnsupportedIsa(missing)));
        assert!(UnsupportedIsa(missing).to_string().contains("portable"));
    }
}
