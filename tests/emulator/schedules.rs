//! Kernels at random, of legal schedules.

use crate::DTYPES;
use flashtune::{DType, Program};
use flashtune_codegen::{
    Kernel, MaskKind, Precision, Problem, ScaleUnits, Schedule, Sm80F32Schedule, Sm80Instructions, Sm80Schedule,
    Sm89Fp8Schedule, Sm90Fp8Schedule, Sm90LookAhead, Sm90Rescale, Sm90RowOrder, Sm90Schedule, Sm90Scheduler, Swizzle,
    TileOrder,
};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// A problem of these families, with a score program if one is given.
fn random_problem(rng: &mut StdRng, program: Option<&str>) -> Problem {
    const DIMS: [u32; 9] = [16, 40, 64, 72, 96, 128, 136, 192, 256];
    let dim_qk = *DIMS.choose(rng).expect("not empty");
    let dim_v = if rng.random_bool(0.7) { dim_qk } else { *DIMS.choose(rng).expect("not empty") };
    let mask = *MaskKind::ALL.choose(rng).expect("not empty");
    let dtype = *DTYPES.choose(rng).expect("not empty");
    let mut problem = Problem::forward_qk_v(dtype, dim_qk, dim_v, mask).expect("a legal problem");
    if let Some(text) = program {
        problem = problem.with_program(Program::parse(text).expect("a program"));
    }
    problem
}

/// A kernel of `forward/sm90`.
pub fn random_sm90(rng: &mut StdRng, program: Option<&str>) -> Kernel {
    loop {
        let problem = random_problem(rng, program);
        let consumers = rng.random_range(1..=3);
        let masked_loop = rng.random();
        let scheduler =
            *[Sm90Scheduler::Single, Sm90Scheduler::Stride, Sm90Scheduler::Queue].choose(rng).expect("some");
        let schedule = Schedule::Sm90(Sm90Schedule {
            consumers,
            block_kv: rng.random_range(1..=12) * 16,
            stages: rng.random_range(1..=4),
            overlap: rng.random(),
            take_turns: consumers > 1 && rng.random(),
            masked_loop,
            lazy_rescale: rng.random_bool(0.2),
            pack_group: rng.random(),
            scheduler,
            chain: rng.random(),
            exp2_eighths: if masked_loop && rng.random_bool(0.3) { rng.random_range(1..=4) } else { 0 },
            blocks_per_sm: rng.random_range(1..=2),
            section_mib: *[0, 1, Sm90Schedule::WALK_ALL].choose(rng).expect("not empty"),
            quick: rng.random_bool(0.2),
            rescale: *[Sm90Rescale::ByHeadDim, Sm90Rescale::Among, Sm90Rescale::Beside].choose(rng).expect("not empty"),
            row_order: row_order(rng),
            masked_row_order: row_order(rng),
            look_ahead: *[Sm90LookAhead::ByHeadDim, Sm90LookAhead::Never, Sm90LookAhead::Always]
                .choose(rng)
                .expect("not empty"),
            scan_together: *[0, 1, 4].choose(rng).expect("not empty"),
            ..Sm90Schedule::default()
        });
        let kernel = Kernel { problem, schedule, arch: "sm_90a".parse().expect("an arch") };
        if kernel.check().is_ok() {
            return with_later_fields(kernel, &mut rng.clone());
        }
    }
}

/// What schedules were given later, where they can have it: from a stream of its own, so that numbers go on to name the
/// kernels that they named.
fn with_later_fields(kernel: Kernel, rng: &mut StdRng) -> Kernel {
    let Schedule::Sm90(schedule) = kernel.schedule else { unreachable!("of forward/sm90") };
    let (trim, output_apart) = (rng.random(), rng.random());
    let schedule = Sm90Schedule { ending: schedule.section_mib != Sm90Schedule::WALK_ALL && rng.random(), ..schedule };
    let changed = [
        Sm90Schedule { trim, output_apart, ..schedule },
        Sm90Schedule { trim, ..schedule },
        Sm90Schedule { output_apart, ..schedule },
    ];
    let mut legal = changed.into_iter().map(|s| Kernel { schedule: Schedule::Sm90(s), ..kernel });
    let kernel = legal.find(|k| k.check().is_ok()).unwrap_or(kernel);
    let Schedule::Sm90(schedule) = kernel.schedule else { unreachable!("of forward/sm90") };
    // Blocks of whole 64 keys, and what fits beside the biases.
    let (bias_stages, block_kv) = (rng.random_range(0..=2), schedule.block_kv.next_multiple_of(64));
    let brought = Sm90Schedule { bias_stages, ..schedule };
    let changed = [
        brought,
        Sm90Schedule { block_kv, trim: false, ..brought },
        Sm90Schedule { block_kv: 64, stages: 1, trim: false, blocks_per_sm: 1, ..brought },
    ];
    let mut legal = changed.into_iter().map(|s| Kernel { schedule: Schedule::Sm90(s), ..kernel });
    let kernel = legal.find(|k| k.check().is_ok()).unwrap_or(kernel);
    let Schedule::Sm90(schedule) = kernel.schedule else { unreachable!("of forward/sm90") };
    let spared = Sm90Schedule { producer_spare: 8 * rng.random_range(0..=3), ..schedule };
    Some(Kernel { schedule: Schedule::Sm90(spared), ..kernel }).filter(|k| k.check().is_ok()).unwrap_or(kernel)
}

/// A kernel of `forward/sm80_f32`.
pub fn random_sm80_f32(rng: &mut StdRng, program: Option<&str>) -> Kernel {
    loop {
        let mut problem = random_problem(rng, program);
        (problem.dtype, problem.precision) = (DType::F32, Precision::Tf32x3);
        if rng.random_bool(0.25) {
            problem.precision = Precision::Tf32;
        }
        let schedule = Schedule::Sm80F32(Sm80F32Schedule {
            warps: 1 << rng.random_range(0..=3),
            rows_per_warp: *[16, 32].choose(rng).expect("not empty"),
            block_kv: rng.random_range(1..=8) * 16,
            stages: rng.random_range(1..=4),
            blocks_per_sm: rng.random_range(1..=2),
            masked_loop: rng.random(),
            order: *[TileOrder::HeadMajor, TileOrder::BlockMajor].choose(rng).expect("not empty"),
        });
        let kernel = Kernel { problem, schedule, arch: "sm_80".parse().expect("an arch") };
        if kernel.check().is_ok() {
            return kernel;
        }
    }
}

/// A kernel of `forward/sm90_fp8`.
pub fn random_sm90_fp8(rng: &mut StdRng, program: Option<&str>) -> Kernel {
    loop {
        let mut problem = random_e4m3_problem(rng);
        if let Some(program) = program {
            problem = problem.with_program(Program::parse(program).expect("a program"));
        }
        let consumers = rng.random_range(1..=3);
        let schedule = Schedule::Sm90Fp8(Sm90Fp8Schedule {
            consumers,
            block_kv: rng.random_range(1..=8) * 32,
            stages: rng.random_range(1..=4),
            raw_stages: rng.random_range(1..=2),
            part: rng.random_range(1..=16) * 16,
            overlap: rng.random(),
            take_turns: consumers > 1 && rng.random(),
            blocks_per_sm: rng.random_range(1..=2),
            section_mib: *[0, 1, Sm90Schedule::WALK_ALL].choose(rng).expect("not empty"),
        });
        let kernel = Kernel { problem, schedule, arch: "sm_90a".parse().expect("an arch") };
        if kernel.check().is_ok() {
            return kernel;
        }
    }
}

/// A kernel of `forward/sm80`.
pub fn random_sm80(rng: &mut StdRng, program: Option<&str>) -> Kernel {
    random_sm80_for(rng, program, false)
}

/// The same for sm_75.
pub fn random_sm75(rng: &mut StdRng, program: Option<&str>) -> Kernel {
    random_sm80_for(rng, program, true)
}

fn random_sm80_for(rng: &mut StdRng, program: Option<&str>, turing: bool) -> Kernel {
    loop {
        let mut problem = random_problem(rng, program);
        if turing {
            problem.dtype = DType::F16;
        }
        let schedule = Schedule::Sm80(Sm80Schedule {
            warps: 1 << rng.random_range(0..=3),
            rows_per_warp: *[16, 32].choose(rng).expect("not empty"),
            block_kv: rng.random_range(1..=8) * 16,
            stages: rng.random_range(1..=4),
            q_in_registers: rng.random(),
            swizzle: *[Swizzle::Xor, Swizzle::Pad].choose(rng).expect("not empty"),
            blocks_per_sm: rng.random_range(1..=2),
            lazy_rescale: rng.random(),
            masked_loop: rng.random(),
            order: *[TileOrder::HeadMajor, TileOrder::BlockMajor].choose(rng).expect("not empty"),
            instructions: if turing { Sm80Instructions::Turing } else { Sm80Instructions::Ampere },
        });
        let arch = if turing { "sm_75" } else { "sm_80" };
        let kernel = Kernel { problem, schedule, arch: arch.parse().expect("an arch") };
        if kernel.check().is_ok() {
            return kernel;
        }
    }
}

/// A kernel of `forward/sm89_fp8`.
pub fn random_sm89_fp8(rng: &mut StdRng) -> Kernel {
    loop {
        let problem = random_e4m3_problem(rng);
        let schedule = Schedule::Sm89Fp8(Sm89Fp8Schedule {
            warps: 1 << rng.random_range(0..=3),
            rows_per_warp: *[16, 32].choose(rng).expect("not empty"),
            block_kv: rng.random_range(1..=8) * 32,
            stages: rng.random_range(1..=4),
            q_in_registers: rng.random(),
            swizzle: *[Swizzle::Xor, Swizzle::Pad].choose(rng).expect("not empty"),
            blocks_per_sm: rng.random_range(1..=2),
            in_order: rng.random(),
            order: *[TileOrder::HeadMajor, TileOrder::BlockMajor].choose(rng).expect("not empty"),
        });
        let kernel = Kernel { problem, schedule, arch: "sm_89".parse().expect("an arch") };
        if kernel.check().is_ok() {
            return kernel;
        }
    }
}

/// A problem of e4m3, of head dims that are whole matrix steps and such that are padded to them, with scales of heads
/// and of every finer unit.
fn random_e4m3_problem(rng: &mut StdRng) -> Problem {
    const DIMS: [u32; 9] = [16, 32, 48, 64, 80, 128, 144, 192, 256];
    let dim_qk = *DIMS.choose(rng).expect("not empty");
    let dim_v = if rng.random_bool(0.7) { dim_qk } else { *DIMS.choose(rng).expect("not empty") };
    let mask = *MaskKind::ALL.choose(rng).expect("not empty");
    let problem = Problem::forward_qk_v(DType::E4m3, dim_qk, dim_v, mask).expect("a legal problem");
    let scales = if rng.random() { ScaleUnits::default() } else { *ScaleUnits::ALL.choose(rng).expect("not empty") };
    problem.with_output(*DType::OUTPUTS_OF_E4M3.choose(rng).expect("not empty")).with_scales(scales)
}

fn row_order(rng: &mut StdRng) -> Sm90RowOrder {
    use Sm90RowOrder::*;
    *[ByHeadDim, Together, AfterMaximum, AfterProbability].choose(rng).expect("not empty")
}
