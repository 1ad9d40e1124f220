//! The cost model of `forward/cpu`: products of register tiles, packing, and what stays in a core's cache.

use super::balance;
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{CpuIsa, CpuSchedule, DType, Kernel, Shape, Visits};

/// Estimated cycles of one launch.
pub(super) fn cost(kernel: &Kernel, s: &CpuSchedule, shape: &Shape, device: &DeviceFingerprint) -> f64 {
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
    // Products relative to fp32 multiply-adds: with AMX's loads and stores counted in, as measured on Sapphire Rapids;
    // two products of bf16 to an instruction on the processors that have them and no AMX (Zen 4 and newer).
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
