//! How products of f32 are computed where tensor cores multiply.

use crate::{Arch, DType, Error, Family, Op, Problem, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How products of f32 operands are computed. Sums, softmax and everything else are fp32 in all of them; other dtypes
/// have `Exact` alone, since tensor cores take their elements as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Precision {
    /// fp32 products, without tensor cores.
    #[default]
    Exact,
    /// Three TF32 products to one, which keep 22 bits of the mantissa's 24: within the bound that `Exact` is held to.
    Tf32x3,
    /// One TF32 product, which keeps 11 bits: an error about that of f16.
    Tf32,
}

impl Precision {
    /// Every precision, the finest first.
    pub const ALL: [Precision; 3] = [Precision::Exact, Precision::Tf32x3, Precision::Tf32];

    /// The name in problems and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Precision::Exact => "exact",
            Precision::Tf32x3 => "tf32x3",
            Precision::Tf32 => "tf32",
        }
    }

    /// TF32 products to one.
    pub(crate) const fn products(self) -> u32 {
        match self {
            Precision::Exact => 0,
            Precision::Tf32x3 => 3,
            Precision::Tf32 => 1,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Precision {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|p| p.name() == s.to_ascii_lowercase());
        found.ok_or_else(|| Error::parse("precision", s, "exact, tf32x3 or tf32"))
    }
}

/// Whether the arch has TF32 products.
fn has_tf32(arch: Arch) -> bool {
    matches!(arch, Arch::Sm(sm) if sm.number >= 80)
}

impl Problem {
    /// The same problem in a precision.
    pub fn in_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// [`Problem::validate`], and that the arch has the products of the problem's precision. Nothing computes in
    /// another precision than the one that was named.
    ///
    /// # Errors
    /// [`Error::Unsupported`] of `precision`.
    pub fn validate_on(&self, arch: Arch) -> Result<()> {
        self.validate()?;
        if self.precision != Precision::Exact && !has_tf32(arch) {
            let limit = format!("{arch} has no TF32 products; GPUs from sm_80 on do");
            return Err(Error::unsupported("precision", self.precision, limit, "leave the precision at `exact`"));
        }
        Ok(())
    }

    /// The same problem as it is computed on the arch by a call that names no precision: dense forward passes of f32 by
    /// three TF32 products wherever `forward/sm80_f32` takes them, which on an H200 is 2.4 to 3.6 times as fast as
    /// `forward/naive` and nearer to fp64 (docs/measured/log/2026-11-24-h200-f32.md); everything else exactly.
    pub fn in_default_precision(self, arch: Arch) -> Self {
        // Without an error's text, which takes memory: this is on the way of every call.
        if !self.admits(Precision::Tf32x3) || !has_tf32(arch) {
            return self.in_precision(Precision::Exact);
        }
        let fast = self.in_precision(Precision::Tf32x3);
        let computed = if fast.pads(arch) { fast.padded() } else { fast };
        let has = fast.validate_on(arch).is_ok() && Family::ForwardSm80F32.supports(&computed, arch).is_ok();
        if has { fast } else { self.in_precision(Precision::Exact) }
    }

    /// Whether such a problem may have the precision.
    pub(crate) fn admits(&self, precision: Precision) -> bool {
        let forward = self.op == Op::Forward && self.kv.is_dense();
        precision == Precision::Exact || self.dtype == DType::F32 && forward
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvKind, MaskKind};

    #[test]
    fn precision_is_refused_where_nothing_computes_it() {
        let of = |dtype| Problem::forward(dtype, 64, MaskKind::CAUSAL).unwrap();
        let arch = |name: &str| name.parse::<Arch>().unwrap();
        let f32 = of(DType::F32);
        assert_eq!(f32.precision, Precision::Exact);
        for precision in [Precision::Tf32x3, Precision::Tf32] {
            let f32 = f32.in_precision(precision);
            for name in ["sm_80", "sm_89", "sm_90a", "sm_120a"] {
                f32.validate_on(arch(name)).unwrap();
            }
            let odd = Problem { head_dim_qk: 59, ..f32 };
            assert!(odd.pads(arch("sm_90a")) && !odd.in_precision(Precision::Exact).pads(arch("sm_90a")));
            for (problem, name, limit) in [
                (f32, "sm_75", "sm_75 has no TF32 products"),
                (f32, "cpu-avx2", "cpu-avx2 has no TF32 products"),
                (of(DType::Bf16).in_precision(precision), "sm_90a", "f32 over dense tensors"),
                (f32.backward().in_precision(precision), "sm_90a", "f32 over dense tensors"),
                (f32.with_kv(KvKind::RAGGED), "sm_90a", "f32 over dense tensors"),
            ] {
                let e = problem.validate_on(arch(name)).unwrap_err().to_string();
                assert!(e.contains("precision") && e.contains(limit) && e.contains("`exact`"), "{e}");
                problem.in_precision(Precision::Exact).validate_on(arch(name)).unwrap();
            }
        }
    }

    #[test]
    fn who_names_none_has_tensor_cores_where_they_keep_f32s_error() {
        let arch = |name: &str| name.parse::<Arch>().unwrap();
        let f32 = Problem::forward(DType::F32, 64, MaskKind::CAUSAL).unwrap();
        for name in ["sm_80", "sm_89", "sm_90a", "sm_120a"] {
            assert_eq!(f32.in_default_precision(arch(name)).precision, Precision::Tf32x3, "{name}");
            let odd = Problem { head_dim_qk: 59, ..f32 };
            assert_eq!(odd.in_default_precision(arch(name)).precision, Precision::Tf32x3, "{name}");
        }
        for name in ["sm_75", "cpu-avx2"] {
            assert_eq!(f32.in_default_precision(arch(name)), f32, "{name}");
        }
        let bf16 = Problem::forward(DType::Bf16, 64, MaskKind::CAUSAL).unwrap();
        for other in [bf16, f32.backward(), f32.with_kv(KvKind::RAGGED)] {
            assert_eq!(other.in_default_precision(arch("sm_90a")), other);
        }
    }

    #[test]
    fn exact_is_left_out_of_what_is_stored() {
        let exact = Problem::forward(DType::F32, 64, MaskKind::CAUSAL).unwrap();
        let text = |p: Problem| serde_json::to_string(&p).unwrap();
        assert!(!text(exact).contains("precision") && exact.to_string() == "forward-f32-d64-causal");
        for precision in Precision::ALL {
            let problem = Problem { precision, ..exact };
            assert_eq!(serde_json::from_str::<Problem>(&text(problem)).unwrap(), problem);
            assert_eq!(precision.name().parse::<Precision>().unwrap(), precision);
        }
        assert_eq!(Problem { precision: Precision::Tf32x3, ..exact }.to_string(), "forward-f32-tf32x3-d64-causal");
    }
}
