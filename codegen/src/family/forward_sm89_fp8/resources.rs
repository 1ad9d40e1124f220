//! What a kernel of `forward/sm89_fp8` needs: shared memory exactly, registers from below.

use super::Sm89Fp8Schedule;
use crate::family::Swizzle;
use crate::{Problem, Resources, ScaleUnit};

pub(super) fn of(s: &Sm89Fp8Schedule, problem: &Problem) -> Resources {
    Resources { threads: s.threads(), smem_bytes: smem_bytes(s, problem), registers: registers(s, problem) }
}

/// Bytes of one row in shared memory: whole matrix steps, and an odd number of 16-byte chunks where rows are padded.
fn row_bytes(head_dim: u32, swizzle: Swizzle) -> u32 {
    let whole = head_dim.next_multiple_of(32);
    match swizzle {
        Swizzle::Xor => whole,
        Swizzle::Pad => whole + 16,
    }
}

fn smem_bytes(s: &Sm89Fp8Schedule, problem: &Problem) -> u32 {
    let (row_qk, row_v) = (row_bytes(problem.head_dim_qk, s.swizzle), row_bytes(problem.head_dim_v, s.swizzle));
    let q = s.block_q() * row_qk;
    let kv = s.stages * s.block_kv * (row_qk + row_v);
    // Q shares the space of K and V when it moves on to registers; O leaves from registers.
    let plain = if s.q_in_registers { q.max(kv) } else { q + kv };
    plain + if problem.scales.k == ScaleUnit::Rows { s.stages * s.block_kv * 4 } else { 0 }
}

fn registers(s: &Sm89Fp8Schedule, problem: &Problem) -> u32 {
    let m_tiles = s.rows_per_warp / 16;
    let o = m_tiles * problem.head_dim_v / 2;
    let (scores, p) = (m_tiles * s.block_kv / 2, m_tiles * s.block_kv / 8);
    // Scores are there while P is made of them, sums of the first level while P is multiplied.
    let working = scores.max(p + m_tiles * 8);
    let q = if s.q_in_registers { m_tiles * problem.head_dim_qk.next_multiple_of(32) / 8 } else { m_tiles * 4 };
    // Row maxima, sums and factors, addresses and loop state; and what rows of Q are multiplied by.
    let by_row = if problem.scales.q == ScaleUnit::Rows { 2 * m_tiles } else { 0 };
    o + working + q + 6 * m_tiles + by_row + 14
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Arch, DType, Family, InstructionPath, Kernel, Level, MaskKind, Paths, ScaleUnits, Schedule, ShapeBucket,
    };

    fn arch(name: &str) -> Arch {
        name.parse().unwrap()
    }

    #[test]
    fn every_default_is_legal_and_the_space_has_legal_schedules() {
        for name in ["sm_89", "sm_120a"] {
            for d in (16..=256).step_by(16) {
                for v in [d, 64, 256] {
                    for mask in MaskKind::ALL {
                        let finest = ScaleUnits { q: ScaleUnit::Rows, k: ScaleUnit::Rows, v: ScaleUnit::Channel };
                        let scales = if mask.left { finest } else { ScaleUnits::default() };
                        let problem = Problem::forward_qk_v(DType::E4m3, d, v, mask).unwrap().with_scales(scales);
                        let kernel = |schedule| Kernel { problem, schedule, arch: arch(name) };
                        for n in [1, 100, 4096] {
                            let bucket =
                                ShapeBucket { parallel: 32, group: 1, q_len: n, kv_len: n, ..Default::default() };
                            let default = Schedule::default_for(Family::ForwardSm89Fp8, &problem, arch(name), &bucket);
                            kernel(default.unwrap()).check().unwrap();
                        }
                        let space = Schedule::space(Family::ForwardSm89Fp8, &problem, arch(name)).into_iter();
                        assert!(space.filter(|s| kernel(*s).check().is_ok()).count() > 3, "{problem}");
                    }
                }
            }
        }
    }

    #[test]
    fn it_needs_no_name_and_stands_behind_wgmma_on_hopper() {
        let problem = Problem::forward(DType::E4m3, 128, MaskKind::FULL).unwrap();
        let path: InstructionPath = "forward/sm89_fp8:e4m3".parse().unwrap();
        for name in ["sm_89", "sm_90a", "sm_120a"] {
            assert_eq!(InstructionPath::of(Family::ForwardSm89Fp8, &problem, arch(name)), path);
            let none = Paths::default();
            none.admit(Family::ForwardSm89Fp8, &problem, arch(name)).unwrap();
            assert_eq!(none.level(Family::ForwardSm89Fp8, &problem, arch(name)), Level::Ran);
        }
        let candidates = |name| Family::candidates(&problem, arch(name));
        assert_eq!(candidates("sm_89"), [Family::ForwardSm89Fp8]);
        assert_eq!(candidates("sm_90a"), [Family::ForwardSm90Fp8, Family::ForwardSm89Fp8]);
        assert!(candidates("sm_86").is_empty());
    }

    #[test]
    fn illegal_schedules_and_head_dims_name_the_field() {
        let problem = Problem::forward(DType::E4m3, 128, MaskKind::FULL).unwrap();
        let legal = Sm89Fp8Schedule::default_for(&problem, &ShapeBucket::default());
        for (bad, field) in [
            (Sm89Fp8Schedule { warps: 0, ..legal }, "warps"),
            (Sm89Fp8Schedule { rows_per_warp: 48, ..legal }, "rows_per_warp"),
            (Sm89Fp8Schedule { block_kv: 48, ..legal }, "block_kv"),
            (Sm89Fp8Schedule { stages: 9, ..legal }, "stages"),
            (Sm89Fp8Schedule { blocks_per_sm: 0, ..legal }, "blocks_per_sm"),
        ] {
            let e = bad.check().unwrap_err().to_string();
            assert!(e.starts_with(field), "{e}");
        }
        let odd = Problem::forward(DType::E4m3, 72, MaskKind::FULL).unwrap();
        let e = Family::ForwardSm89Fp8.supports(&odd, arch("sm_89")).unwrap_err().to_string();
        assert!(e.contains("head_dim_qk") && e.contains("multiples of 16"), "{e}");
    }
}
