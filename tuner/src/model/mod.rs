//! The analytic model: a rough time of a schedule before it is compiled, good enough to decide what to try first.
//!
//! It counts what the busiest unit of one multiprocessor (or core) has to do, lets the other units overlap with it as
//! far as resident warps allow, and adds what the shape wastes: rows past the end of Q, and processors that idle in the
//! last wave. Costs of one problem and shape compare with each other; across problems they mean nothing.

mod sm90;

use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{
    Arch, CpuIsa, CpuSchedule, DType, Kernel, Schedule, Shape, Sm80Schedule, SmArch, TileOrder, Visits,
};

/// Estimated cost of one launch, in cycles of one unit.
pub(crate) fn cost(kernel: &Kernel, shape: &Shape, device: &DeviceFingerprint) -> f64 {
    match (&kernel.schedule, kernel.arch) {
        (Schedule::Sm80(s), Arch::Sm(sm)) => sm80(kernel, s, sm, shape, device.units),
        (Schedule::Sm90(s), Arch::Sm(_)) => sm90::cost(kernel, s, shape, device.units),
        (Schedule::Cpu(s), Arch::Cpu(_)) => cpu(kernel, s, shape, device),
        // Families that have nothing to choose.
        _ => 1.0,
    }
}

/// What one multiprocessor does per cycle.
struct SmRates {
    /// Floating-point operations of 16-bit mma.sync with fp32 accumulation.
    mma: f64,
    /// Plain fp32 lanes.
    lanes: f64,
    /// Bytes from L2.
    l2: f64,
}

fn rates(sm: SmArch) -> SmRates {
    match sm.number {
        ..=85 => SmRates { mma: 2048.0, lanes: 64.0, l2: 40.0 },
        86..=89 => SmRates { mma: 1024.0, lanes: 128.0, l2: 32.0 },
        // Hopper and Blackwell reach about two thirds of their peak without wgmma.
        90..=119 => SmRates { mma: 2600.0, lanes: 128.0, l2: 36.0 },
        _ => SmRates { mma: 1024.0, lanes: 128.0, l2: 32.0 },
    }
}

/// Bytes of shared memory per cycle and multiprocessor.
const SMEM_BYTES: f64 = 128.0;
/// Exponentials per cycle and multiprocessor.
const EXP2: f64 = 16.0;

fn sm80(kernel: &Kernel, s: &Sm80Schedule, sm: SmArch, shape: &Shape, units: u32) -> f64 {
    let p = &kernel.problem;
    let rate = rates(sm);
    let dims = (p.head_dim_qk + p.head_dim_v) as f64;
    let (block_q, block_kv, warps) = (s.block_q() as f64, s.block_kv as f64, s.warps as f64);

    // One step of the main loop of one block, in cycles of each unit.
    let mma = 2.0 * block_q * block_kv * dims / rate.mma;
    // Every warp reads all fragments of K and V; Q too, unless it stays in registers; cp.async writes K and V.
    let fragments = warps * block_kv * dims * 2.0;
    let q_again = if s.q_in_registers { 0.0 } else { block_q * p.head_dim_qk as f64 * 2.0 };
    let smem = (fragments + q_again + block_kv * dims * 2.0) / SMEM_BYTES;
    let exp = block_q * block_kv / EXP2;
    let scalar = block_q * block_kv * 5.0 / rate.lanes;
    let l2 = block_kv * dims * 2.0 / rate.l2;
    let busiest = mma.max(smem).max(exp).max(l2);
    let rest = mma + smem + exp + scalar + l2 - busiest;

    // Resident warps hide what is not the bottleneck, and the latency of loads and barriers.
    let resident = resident_blocks(kernel, s, sm);
    let active = resident.min(
        (shape.batch as f64 * shape.heads as f64 * Visits::of(shape, s.block_q(), s.block_kv).tiles
            / units.max(1) as f64)
            .ceil()
            .max(1.0),
    );
    let exposed = 0.7 / (1.0 + warps * active / 4.0);
    let latency = if s.stages == 1 { 500.0 } else { 90.0 } / active;
    let spill_risk = registers_short(kernel, s, sm) * 0.02 * busiest;
    let step = busiest + exposed * rest + latency + spill_risk;

    // Q comes in and O goes out once per block.
    let tile = 2.0 * block_q * dims / rate.l2 + 600.0 / active;
    let v = Visits::of(shape, s.block_q(), s.block_kv);
    let heads = shape.batch as f64 * shape.heads as f64;
    let total = heads * (v.total * step + v.tiles * tile);
    let longest = v.longest * step + tile;
    balance(
        total,
        longest,
        heads * v.tiles,
        units as f64,
        s.order == TileOrder::BlockMajor,
        v.longest * v.tiles > v.total,
    )
}

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

/// Blocks that fit one multiprocessor by shared memory, threads and registers.
fn resident_blocks(kernel: &Kernel, s: &Sm80Schedule, sm: SmArch) -> f64 {
    let (r, limits) = (kernel.resources(), sm.limits());
    let by_smem = limits.smem_per_sm / (r.smem_bytes + 1024);
    let by_threads = limits.threads_per_sm / r.threads.max(1);
    // The compiler needs more than the lower bound, up to the cap that the launch bounds set.
    let cap = limits.registers_per_thread.min(limits.registers_per_sm / (r.threads * s.blocks_per_sm).max(1));
    let registers = (r.registers + 40).min(cap).max(32);
    let by_registers = limits.registers_per_sm / (registers * r.threads).max(1);
    by_smem.min(by_threads).min(by_registers).max(1) as f64
}

/// Registers of a thread that the compiler will probably miss.
fn registers_short(kernel: &Kernel, s: &Sm80Schedule, sm: SmArch) -> f64 {
    let (r, limits) = (kernel.resources(), sm.limits());
    let cap = limits.registers_per_thread.min(limits.registers_per_sm / (r.threads * s.blocks_per_sm).max(1));
    (r.registers as f64 + 30.0 - cap as f64).max(0.0)
}

fn cpu(kernel: &Kernel, s: &CpuSchedule, shape: &Shape, device: &DeviceFingerprint) -> f64 {
    let p = &kernel.problem;
    let (dqk, dv) = (p.head_dim_qk as f64, p.head_dim_v as f64);
    let (block_q, block_kv) = (s.block_q as f64, s.block_kv as f64);
    let lanes = s.isa.lanes() as f64;
    let units = if s.threads == 0 { device.units } else { s.threads.min(device.units) } as f64;
    let pairs = p.dtype == DType::Bf16 && s.isa == CpuIsa::Avx512Bf16;

    // Vectors of rows that a tile has, in whole panels and alone: what has no row of Q is left out.
    let panel = s.unroll_q * s.isa.lanes();
    let tiles = shape.q_len.div_ceil(s.block_q).max(1) as f64;
    let rest = shape.q_len % s.block_q;
    let in_panels = |rows: u32| ((rows + s.isa.lanes() - 1) / panel * s.unroll_q) as f64;
    let alone =
        |rows: u32| rows.div_ceil(s.isa.lanes()) as f64 - in_panels(rows).min(rows.div_ceil(s.isa.lanes()) as f64);
    let whole = (shape.q_len / s.block_q) as f64;
    let average = |f: &dyn Fn(u32) -> f64| (whole * f(s.block_q) + f(rest)) / tiles;
    let (in_panels, alone) = (average(&in_panels), average(&alone));
    let vectors = in_panels + alone;

    // Register tile: `r x c` multiplications against `r + c` loads per step, two of each per cycle; accumulators that
    // do not fit the register file spill.
    let registers = if s.isa >= CpuIsa::Avx512 { 32.0 } else { 16.0 };
    let per_product = |r: f64, c: f64| {
        let spilled = (r * c + r.min(c) + 1.0 - registers).max(0.0);
        0.5f64.max(0.5 * (r + c) / (r * c)) + spilled / (r * c)
    };
    let (r, c) = (s.unroll_q as f64, s.unroll_kv as f64);
    // Products relative to fp32 multiply-adds: with AMX's loads and stores counted in, as measured on Sapphire Rapids; two
    // products of bf16 to an instruction on the processors that have them and no AMX (Zen 4 and newer).
    let products = match s.isa {
        CpuIsa::Amx => vectors * 0.15,
        _ => (in_panels * per_product(r, c) + alone * per_product(1.0, c)) * if pairs { 0.5 } else { 1.0 },
    };
    // Per step the softmax goes over the scores, and O through the registers to be rescaled and added to.
    let step = block_kv * ((dqk + dv) * products + 12.0 * vectors) + 3.0 * dv * vectors;
    // What of K and V is converted and packed, once per step, whatever the number of rows.
    let packed = match p.dtype {
        DType::F32 => 0.0,
        _ if pairs => dv,
        _ => dqk + dv,
    };
    let packing = block_kv * packed / lanes * 3.0;
    // What a core works on together should stay in its own cache; 1 MiB is a common size of it.
    let footprint = 4.0 * (block_kv * (dqk + dv) + block_q * (block_kv + dqk + dv));
    let spill = 1.0 + 0.3 * (footprint / (1 << 20) as f64 - 1.0).clamp(0.0, 4.0);

    let v = Visits::of(shape, s.block_q, s.block_kv);
    let heads = shape.batch as f64 * shape.heads as f64;
    let tile = vectors * (dqk + dv) * 4.0 + 2000.0;
    let work = (step * spill + packing).max(1.0);
    let total = heads * (v.total * work + v.tiles * tile);
    let longest = v.longest * work + tile;
    balance(total, longest, heads * v.tiles, units, false, v.longest * v.tiles > v.total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{Family, Mask, MaskKind, Problem, ShapeBucket};

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
                let problem = Problem::forward_qk_v(DType::Bf16, 192, 128, mask.kind()).unwrap();
                for family in Family::ALL.into_iter().filter(|f| f.supports(&problem, arch).is_ok()) {
                    for schedule in Schedule::space(family, &problem, arch).into_iter().step_by(7) {
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
