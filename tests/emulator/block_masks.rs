//! What `MetadataLayout` promises: what one kernel has found of a mask serves every other one of the same layout.

use crate::cases::Case;
use crate::faults::replaced;
use crate::machine::Emulated;
use crate::schedules::random_sm90;
use crate::{PROGRAMS, templates, try_recorded};
use flashtune::{Mask, Shape};
use flashtune_codegen::{Kernel, MetadataLayout};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::time::Duration;

/// A mask by runs, and one by lists and bits.
const MASKS: [&str; 2] = [PROGRAMS[2], PROGRAMS[29]];

/// The layouts of what is found for some sizes.
fn layouts(kernel: &Kernel) -> Vec<Option<MetadataLayout>> {
    let shape = |q_len| Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len: 300, mask: Mask::Full };
    [1, 65, 129, 193, 300]
        .map(|n| kernel.plan(&shape(n)).expect("it fits").mask_metadata().map(|(_, layout, _)| layout))
        .to_vec()
}

#[test]
fn what_one_kernel_finds_serves_others() {
    let templates = templates();
    try_recorded(0..MASKS.len() as u64, Duration::MAX, |number| {
        let mask = MASKS[number as usize];
        let finder = random_sm90(&mut StdRng::seed_from_u64(70 + number), Some(mask));
        let with_score = format!("{mask} score = score * 0.5 + 0.125 * kv;");
        let serves = |other: &Kernel| {
            other.problem.mask == finder.problem.mask
                && other.schedule != finder.schedule
                && layouts(other) == layouts(&finder)
        };
        let others = (0..).map(|seed| random_sm90(&mut StdRng::seed_from_u64(seed), Some(&with_score)));
        let other = others.into_iter().find(serves).expect("one of many");
        println!("{} for {}", finder.name(), other.name());
        let [mut first, mut second] = [&finder, &other].map(|k| Emulated::build(k, &templates).expect("it compiles"));
        let mut rng = StdRng::seed_from_u64(number);
        for _ in 0..3 {
            let case = Case::random(&finder, &mut rng);
            // Those of multiples of four have no memory for bits.
            let seeds: [u64; 2] = rng.random::<[u64; 2]>().map(|seed| seed | 1);
            let mut found = None;
            let run = |kernel: &Kernel, on: &mut Emulated, seed, found: &mut Option<Vec<u8>>| {
                let run = case.expected(kernel).run_by(kernel, on, seed, 3, found);
                run.map_err(|e| format!("{} {case:?}: {e}", kernel.name()))
            };
            run(&finder, &mut first, seeds[0], &mut found)?;
            let before = found.clone().expect("it is left there");
            run(&other, &mut second, seeds[1], &mut found)?;
            if found.as_ref() != Some(&before) {
                return Err(format!("{}: what was found is read, not written", other.name()));
            }
        }
        Ok(())
    });
}

/// Of a tensor of bools, read sixteen at a time, and of the same by the code for any mask.
#[test]
fn bools_read_together_give_the_lists_of_single_ones() {
    let templates = templates();
    let single =
        replaced(&templates, "forward/sm90.cu", "#define FT_DENSE @{ program_dense }@", "#define FT_DENSE 0 //");
    try_recorded(0..3, Duration::MAX, |number| {
        let mask = PROGRAMS[37 + number as usize];
        let kernel = random_sm90(&mut StdRng::seed_from_u64(500 + number), Some(mask));
        let mut on = [&templates, &single].map(|set| Emulated::build(&kernel, set).expect("it compiles"));
        let mut rng = StdRng::seed_from_u64(number);
        for _ in 0..2 {
            let case = Case::random(&kernel, &mut rng);
            let plan = kernel.plan(&case.shape()).expect("it fits");
            let Some((bytes, _, masks)) = plan.mask_metadata() else { panic!("{mask} has lists") };
            let found = on.each_mut().map(|on| {
                let mut found = None;
                let o = case.expected(&kernel).run_by(&kernel, on, rng.random(), 3, &mut found);
                o.unwrap_or_else(|e| panic!("{} {case:?}: {e}", kernel.name()));
                found.expect("it is left there")
            });
            // Lists and kinds; of the bits behind them those of keys that are not there may be any.
            let lists = masks.unwrap_or(bytes) as usize;
            if found[0][..lists] != found[1][..lists] {
                return Err(format!("{} {case:?}: other lists", kernel.name()));
            }
        }
        Ok(())
    });
}
