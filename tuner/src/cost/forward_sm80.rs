//! The cost model of `forward/sm80`: mma.sync, shared memory, exponentials and L2, and what resident warps hide of
//! them.

use super::{EXP2, SMEM_BYTES, balance};
use flashtune_codegen::{Arch, Kernel, Shape, Sm80Schedule, SmArch, TileOrder, Visits};

/// What one multiprocessor does per cycle.
pub(super) struct SmRates {
    /// Floating-point operations of 16-bit mma.sync with fp32 accumulation.
    pub(super) mma: f64,
    /// Plain fp32 lanes.
    pub(super) lanes: f64,
    /// Bytes from L2.
    pub(super) l2: f64,
}

pub(super) fn rates(sm: SmArch) -> SmRates {
    match sm.number {
        // No card of these has been timed.
        ..=79 => SmRates { mma: 1024.0, lanes: 64.0, l2: 32.0 },
        80..=85 => SmRates { mma: 2048.0, lanes: 64.0, l2: 40.0 },
        86..=89 => SmRates { mma: 1024.0, lanes: 128.0, l2: 32.0 },
        // Hopper and Blackwell reach about two thirds of their peak without wgmma.
        90..=119 => SmRates { mma: 2600.0, lanes: 128.0, l2: 36.0 },
        _ => SmRates { mma: 1024.0, lanes: 128.0, l2: 32.0 },
    }
}

/// Estimated cycles of one launch.
pub(super) fn cost(kernel: &Kernel, s: &Sm80Schedule, shape: &Shape, units: u32) -> f64 {
    let Arch::Sm(sm) = kernel.arch else { return f64::INFINITY };
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
    let resident = resident_blocks(kernel, s.blocks_per_sm, sm);
    let active = resident.min(
        (shape.batch as f64 * shape.heads as f64 * Visits::of(shape, s.block_q(), s.block_kv).tiles
            / units.max(1) as f64)
            .ceil()
            .max(1.0),
    );
    let exposed = 0.7 / (1.0 + warps * active / 4.0);
    let latency = if s.stages == 1 { 500.0 } else { 90.0 } / active;
    let spill_risk = registers_short(kernel, s.blocks_per_sm, sm) * 0.02 * busiest;
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

/// Blocks that fit one multiprocessor by shared memory, threads and registers.
pub(super) fn resident_blocks(kernel: &Kernel, blocks_per_sm: u32, sm: SmArch) -> f64 {
    let (r, limits) = (kernel.resources(), sm.limits());
    let by_smem = limits.smem_per_sm / (r.smem_bytes + 1024);
    let by_threads = limits.threads_per_sm / r.threads.max(1);
    // The compiler needs more than the lower bound, up to the cap that the launch bounds set.
    let cap = limits.registers_per_thread.min(limits.registers_per_sm / (r.threads * blocks_per_sm).max(1));
    let registers = (r.registers + 40).min(cap).max(32);
    let by_registers = limits.registers_per_sm / (registers * r.threads).max(1);
    by_smem.min(by_threads).min(by_registers).max(1) as f64
}

/// Registers of a thread that the compiler will probably miss.
pub(super) fn registers_short(kernel: &Kernel, blocks_per_sm: u32, sm: SmArch) -> f64 {
    let (r, limits) = (kernel.resources(), sm.limits());
    let cap = limits.registers_per_thread.min(limits.registers_per_sm / (r.threads * blocks_per_sm).max(1));
    (r.registers as f64 + 30.0 - cap as f64).max(0.0)
}
