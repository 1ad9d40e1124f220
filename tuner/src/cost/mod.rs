//! The cost model: a rough time of a schedule before it is compiled, good enough to decide what to try first. One file
//! a family.
//!
//! It counts what the busiest unit of one multiprocessor (or core) has to do, lets the other units overlap with it as
//! far as resident warps allow, and adds what the shape wastes: rows past the end of Q, and processors that idle in the
//! last wave. Costs of one problem and shape compare with each other; across problems they mean nothing.

mod backward_cpu;
mod backward_sm80;
mod backward_sm90;
mod forward_cpu;
mod forward_cpu_ragged;
mod forward_sm80;
mod forward_sm80_f32;
mod forward_sm80_ragged;
mod forward_sm89_fp8;
mod forward_sm90;
mod forward_sm90_fp8;

use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{Kernel, Schedule, Shape};

/// Estimated cost of one launch, in cycles of one unit.
pub(crate) fn cost(kernel: &Kernel, shape: &Shape, device: &DeviceFingerprint) -> f64 {
    match &kernel.schedule {
        Schedule::Sm90(s) => forward_sm90::cost(kernel, s, shape, device.units),
        Schedule::Sm90Fp8(s) => forward_sm90_fp8::cost(kernel, s, shape, device.units),
        Schedule::Sm90Fp8Ragged(s) => forward_sm90_fp8::cost(kernel, &s.0, shape, device.units),
        Schedule::Sm90Ragged(s) => forward_sm90::cost(kernel, &s.0, shape, device.units),
        Schedule::Sm80(s) => forward_sm80::cost(kernel, s, shape, device.units),
        Schedule::Sm89Fp8(s) => forward_sm89_fp8::cost(kernel, s, shape, device.units),
        Schedule::Sm80F32(s) => forward_sm80_f32::cost(kernel, s, shape, device.units),
        Schedule::Cpu(s) => forward_cpu::cost(kernel, s, shape, device),
        Schedule::Sm80Ragged(s) => forward_sm80_ragged::cost(kernel, s, shape, device),
        Schedule::CpuRagged(s) => forward_cpu_ragged::cost(kernel, s, shape, device),
        Schedule::BackwardSm90(s) => backward_sm90::cost(kernel, s, shape, device.units),
        Schedule::BackwardSm80(s) => backward_sm80::cost(kernel, s, shape, device.units),
        Schedule::BackwardCpu(s) => backward_cpu::cost(kernel, s, shape, device),
        // They have one schedule: nothing to choose.
        Schedule::Naive(_)
        | Schedule::CpuE4m3(_)
        | Schedule::NaiveRagged(_)
        | Schedule::AppendCuda(_)
        | Schedule::AppendCpu(_)
        | Schedule::PadCuda(_)
        | Schedule::QuantiseCuda(_)
        | Schedule::QuantiseCpu(_)
        | Schedule::BackwardNaive(_)
        | Schedule::GradientCpu(_)
        | Schedule::GradientNaive(_) => 1.0,
    }
}

/// Bytes of shared memory per cycle and multiprocessor.
const SMEM_BYTES: f64 = 128.0;
/// Exponentials per cycle and multiprocessor.
const EXP2: f64 = 16.0;

/// Time until the last of `units` is done.
fn balance(total: f64, longest: f64, tiles: f64, units: f64, longest_first: bool, uneven: bool) -> f64 {
    let units = units.max(1.0);
    if uneven {
        // With the longest first the end is even; otherwise a long one may start last.
        let tail = if longest_first { 0.15 } else { 0.5 };
        return (total / units + tail * longest).max(longest);
    }
    (tiles / units).ceil() * total / tiles.max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{
        Arch, CpuIsa, CpuSchedule, DType, Family, Mask, MaskKind, Problem, ShapeBucket, Sm80Schedule, SmArch, TileOrder,
    };

    fn device(arch: Arch, units: u32) -> DeviceFingerprint {
        DeviceFingerprint {
            arch,
            name: "paper".into(),
            units,
            memory_bytes: 1 << 36,
            cache_bytes: 50 << 20,
            driver: "1".into(),
        }
    }

    fn sm(number: u16) -> Arch {
        Arch::Sm(SmArch { number, specific: number >= 90 })
    }

    #[test]
    fn on_hopper_wide_tiles_win_at_length_and_packed_ones_for_a_few_queries() {
        use flashtune_codegen::Sm90Schedule;
        let (problem, arch) = (Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap(), sm(90));
        let best = |shape: &Shape| {
            let all = Sm90Schedule::space(&problem).into_iter().filter(|s| s.is_worth(shape));
            let costs = all.filter_map(|s| {
                let kernel = Kernel { problem, schedule: Schedule::Sm90(s), arch };
                kernel.check().ok().map(|()| (cost(&kernel, shape, &device(arch, 132)), s))
            });
            costs.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1
        };
        let long = best(&Shape { heads: 32, kv_heads: 8, ..shape(8192, 8192, Mask::Causal) });
        assert!(long.block_q() >= 128 && long.block_kv >= 64 && long.overlap, "{long}");
        let short = best(&Shape { batch: 64, heads: 32, kv_heads: 8, ..shape(8, 8192, Mask::Causal) });
        assert!(short.pack_group && short.block_q() == 64, "{short}");
    }

    /// Heads that share a tile share its keys: they do not do away with any.
    #[test]
    fn packed_heads_visit_as_many_blocks_as_others() {
        use flashtune_codegen::Sm90Schedule;
        for mask in [Mask::Full, Mask::Causal, Mask::Window { left: Some(1023), right: Some(0) }] {
            let problem = Problem::forward(DType::Bf16, 128, mask.kind()).unwrap();
            let shape = Shape { heads: 32, kv_heads: 8, ..shape(8192, 8192, mask) };
            let cost =
                |s| cost(&Kernel { problem, schedule: Schedule::Sm90(s), arch: sm(90) }, &shape, &device(sm(90), 132));
            let hopper = SmArch { number: 90, specific: true };
            let plain = Sm90Schedule::default_for(&problem, hopper, &ShapeBucket::of(&shape));
            let ratio =
                cost(Sm90Schedule { pack_group: true, ..plain }) / cost(Sm90Schedule { pack_group: false, ..plain });
            assert!((0.8..1.2).contains(&ratio), "{mask}: {ratio}");
        }
    }

    #[test]
    fn scales_of_keys_cost_a_little_and_others_nothing() {
        use flashtune_codegen::{ScaleUnit, ScaleUnits};
        let plain = Problem::forward(DType::E4m3, 128, MaskKind::FULL).unwrap();
        for (family, arch) in [(Family::ForwardSm90Fp8, "sm_90a"), (Family::ForwardSm89Fp8, "sm_89")] {
            let arch: Arch = arch.parse().unwrap();
            let shape = shape(4096, 4096, Mask::Full);
            let cost = |scales| {
                let problem = plain.with_scales(scales);
                let schedule = Schedule::default_for(family, &problem, arch, &ShapeBucket::of(&shape)).unwrap();
                cost(&Kernel { problem, schedule, arch }, &shape, &device(arch, 132))
            };
            let none = ScaleUnits::default();
            let ratio = cost(ScaleUnits { k: ScaleUnit::Rows, ..none }) / cost(none);
            assert!((1.0..1.25).contains(&ratio) && ratio > 1.0, "{family}: {ratio}");
            assert_eq!(cost(ScaleUnits { q: ScaleUnit::Rows, v: ScaleUnit::Channel, ..none }), cost(none));
        }
    }

    #[test]
    fn rows_that_a_cpu_tile_has_not_cost_nothing() {
        let problem = Problem::forward(DType::Bf16, 128, MaskKind::FULL).unwrap();
        let cost = |isa, block_q, q_len| {
            let schedule = CpuSchedule { isa, block_q, block_kv: 128, unroll_q: 2, unroll_kv: 8, threads: 0 };
            let arch = Arch::Cpu(CpuIsa::Avx512Bf16);
            let kernel = Kernel { problem, schedule: Schedule::Cpu(schedule), arch };
            cost(&kernel, &shape(q_len, 2048, Mask::Full), &device(arch, 2))
        };
        use CpuIsa::{Avx512, Avx512Bf16};
        let ratio = cost(Avx512, 256, 1) / cost(Avx512, 32, 1);
        assert!((1.0..1.3).contains(&ratio), "{ratio}");
        // Two products to an instruction.
        assert!(cost(Avx512Bf16, 128, 1024) < 0.7 * cost(Avx512, 128, 1024));
    }

    fn shape(q_len: u32, kv_len: u32, mask: Mask) -> Shape {
        Shape { batch: 2, heads: 16, kv_heads: 16, q_len, kv_len, mask }
    }

    fn schedule(warps: u32, rows_per_warp: u32, block_kv: u32, order: TileOrder) -> Schedule {
        let problem = Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap();
        let bucket = ShapeBucket::of(&shape(4096, 4096, Mask::Full));
        let default = Sm80Schedule::default_for(&problem, SmArch { number: 90, specific: true }, &bucket);
        Schedule::Sm80(Sm80Schedule { warps, rows_per_warp, block_kv, stages: 2, blocks_per_sm: 1, order, ..default })
    }

    fn cost_of(schedule: Schedule, mask: Mask, q_len: u32, kv_len: u32) -> f64 {
        let problem = Problem::forward(DType::Bf16, 64, mask.kind()).unwrap();
        let kernel = Kernel { problem, schedule, arch: sm(90) };
        cost(&kernel, &shape(q_len, kv_len, mask), &device(sm(90), 132))
    }

    #[test]
    fn costs_are_finite_and_positive_over_every_space() {
        let odd = [(1, 1), (1, 8192), (7, 3), (4096, 4096), (100_000, 100)];
        for arch in [sm(80), sm(86), sm(90), sm(120), Arch::Cpu(CpuIsa::Avx2), Arch::Cpu(CpuIsa::Amx)] {
            for mask in [Mask::Full, Mask::Causal, Mask::Window { left: Some(100), right: Some(0) }] {
                let forward = Problem::forward_qk_v(DType::Bf16, 192, 128, mask.kind()).unwrap();
                let narrow = Problem::forward(DType::Bf16, 64, mask.kind()).unwrap().backward();
                let of = |p: Problem| {
                    Family::ALL.into_iter().filter(move |f| f.supports(&p, arch).is_ok()).map(move |f| (p, f))
                };
                for (problem, family) in [forward, forward.backward(), narrow].into_iter().flat_map(of) {
                    let step = if problem.op == forward.op { 7 } else { 1 };
                    for schedule in Schedule::space(family, &problem, arch).into_iter().step_by(step) {
                        let kernel = Kernel { problem, schedule, arch };
                        for (q, kv) in odd {
                            let c = cost(&kernel, &shape(q, kv, mask), &device(arch, 3));
                            assert!(c.is_finite() && c > 0.0, "{schedule} {q}x{kv} {mask}: {c}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_past_the_end_of_q_cost() {
        let (small, large) = (schedule(4, 16, 64, TileOrder::HeadMajor), schedule(8, 32, 64, TileOrder::HeadMajor));
        assert!(cost_of(small, Mask::Full, 1, 8192) < cost_of(large, Mask::Full, 1, 8192));
        // With rows enough, larger blocks read K and V less often.
        let tiny = schedule(2, 16, 64, TileOrder::HeadMajor);
        assert!(cost_of(large, Mask::Full, 8192, 8192) < cost_of(tiny, Mask::Full, 8192, 8192));
    }

    #[test]
    fn a_causal_grid_is_better_off_with_its_longest_rows_first() {
        let cost = |order| cost_of(schedule(4, 32, 64, order), Mask::Causal, 4096, 4096);
        assert!(cost(TileOrder::BlockMajor) < cost(TileOrder::HeadMajor));
        let full = |order| cost_of(schedule(4, 32, 64, order), Mask::Full, 4096, 4096);
        assert_eq!(full(TileOrder::BlockMajor), full(TileOrder::HeadMajor));
    }

    #[test]
    fn a_causal_mask_halves_the_work_and_a_window_bounds_it() {
        let s = schedule(4, 32, 64, TileOrder::BlockMajor);
        let ratio = cost_of(s, Mask::Causal, 8192, 8192) / cost_of(s, Mask::Full, 8192, 8192);
        assert!((0.4..0.65).contains(&ratio), "{ratio}");
        let window = Mask::Window { left: Some(255), right: Some(0) };
        assert!(cost_of(s, window, 8192, 8192) < 0.15 * cost_of(s, Mask::Full, 8192, 8192));
    }

    #[test]
    fn idle_processors_in_the_last_wave_cost() {
        let arch = Arch::Cpu(CpuIsa::Avx2);
        let problem = Problem::forward(DType::F32, 64, MaskKind::FULL).unwrap();
        let kernel = |block_q| Kernel {
            problem,
            schedule: Schedule::Cpu(CpuSchedule {
                isa: CpuIsa::Avx2,
                block_q,
                block_kv: 128,
                unroll_q: 3,
                unroll_kv: 4,
                threads: 0,
            }),
            arch,
        };
        // One head of 192 rows on four cores: one block of 192 rows keeps three of them idle.
        let one_head = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 192, kv_len: 4096, mask: Mask::Full };
        let d = device(arch, 4);
        assert!(cost(&kernel(48), &one_head, &d) < 0.5 * cost(&kernel(192), &one_head, &d));
    }
}
