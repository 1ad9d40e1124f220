//! What `Schedule::quick` promises: the bits of the schedule that it stands in for.

use crate::cases::Case;
use crate::machine::Emulated;
use crate::{PROGRAMS, templates, try_recorded};
use flashtune::{DType, Distribution, Mask, Program};
use flashtune_codegen::{Family, Kernel, MaskKind, Problem, Schedule, ShapeBucket};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::time::Duration;

/// The schedule that answers while another is being compiled must not be told from it.
#[test]
fn quick_schedules_give_the_same_bits() {
    let templates = templates();
    let causal = |d| Problem::forward(DType::Bf16, d, MaskKind::CAUSAL).expect("legal");
    let window = MaskKind { left: true, right: true };
    let program = |text| Program::parse(text).expect("a program");
    let problems = [
        causal(128),
        Problem::forward_qk_v(DType::F16, 192, 128, window).expect("legal"),
        Problem::forward(DType::F16, 256, MaskKind::FULL).expect("legal"),
        causal(128).with_program(program(PROGRAMS[5])),
        // Blocks cut on the left, in rows that see no whole one.
        Problem::forward(DType::Bf16, 64, window).expect("legal"),
        causal(64).with_program(program(PROGRAMS[21])),
    ];
    try_recorded(0..problems.len() as u64, Duration::MAX, |number| {
        let (seed, problem) = (number + 1, problems[number as usize]);
        let bucket = ShapeBucket { parallel: 16, group: 4, q_len: 300, kv_len: 4096, ..Default::default() };
        let arch = "sm_90a".parse().expect("an arch");
        let schedule = Schedule::default_for(Family::ForwardSm90, &problem, arch, &bucket).expect("supported");
        let kernels = [schedule, schedule.quick().expect("one")].map(|schedule| Kernel { problem, schedule, arch });
        let mut machines = kernels.map(|kernel| Emulated::build(&kernel, &templates).expect("it compiles"));
        let mut rng = StdRng::seed_from_u64(seed);
        let mut compared = 0;
        // Rows that see no whole block, and no score above zero but none far below it: references from zero would show.
        let window = |reach| Mask::Window { left: Some(reach), right: Some(0) };
        let low = |reach, case| Case {
            sizes: [1, 2, 2, 200, 200],
            mask: if problem.mask.left { window(reach) } else { Mask::Full },
            values: Distribution::Normal,
            scale: None,
            bad: [0; 3],
            below: (4.5 * (problem.head_dim_qk as f32).sqrt()).sqrt(),
            ..case
        };
        // Ten cases, and as many more as it takes to have four without infinities and NaN.
        for n in 0..40 {
            if n >= 10 && compared >= 4 {
                break;
            }
            let case = Case::random(&kernels[0], &mut rng);
            let case = if n < 4 && (problem.mask.left || !problem.mask.right) { low(30 + 20 * n, case) } else { case };
            let expected = case.expected(&kernels[0]);
            let mut run = |i: usize| {
                let run = expected.run(&kernels[i], &mut machines[i], seed, 3);
                run.map_err(|e| format!("{} {case:?}: {e}", kernels[i].name()))
            };
            let (a, b) = (run(0)?, run(1)?);
            if expected.is_finite() {
                if a != b {
                    return Err(format!("{} {case:?}: other bits", kernels[1].name()));
                }
                compared += 1;
            }
        }
        if compared >= 4 { Ok(()) } else { Err(format!("{}: {compared} compared", kernels[0].name())) }
    });
}
