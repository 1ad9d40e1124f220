//! The schedules of `forward/sm90` that a search may try.

use super::{Sm90Schedule, Sm90Scheduler};
use crate::{Problem, Shape};

impl Sm90Schedule {
    /// The schedules worth trying. Left out is what won nowhere, each class with the same search on 24 sizes of an
    /// H200, windows, programs and head dims 96 and 192 among them (docs/measured/log/2026-11-23-h200-few-rows.md; time
    /// over that of the best without):
    ///
    /// - P through shared memory: 1.007 to 1.12;
    /// - clusters: 1.003 to 1.34;
    /// - tiles by stride: 1.009 to 1.21, 1.000 to 1.005 in six sizes, and 0.996 in one, which is a tie.
    ///
    /// Lazy rescaling is left out until its error has been held against that of the peers: at head dims 192 and 256
    /// it takes 0.98 to 0.99 of the time, elsewhere up to 1.11.
    pub fn space(problem: &Problem) -> Vec<Self> {
        let program = problem.program;
        let masks: &[bool] = if problem.masks() { &[true, false] } else { &[true] };
        // Larger head dims leave the special-function unit idle half of the time and more.
        let all_exp2 = problem.head_dim_qk + problem.head_dim_v > 192 || program.is_some_and(|p| p.score().is_some());
        let eighths: &[u32] = if all_exp2 { &[0] } else { &[0, 1, 2, 3] };
        let sections: &[(u32, bool)] = match problem.mask.right || problem.masks_by_program() {
            true => &[(0, false), (32, false), (Self::WALK_ALL, false), (32, true)],
            false => &[(0, false), (32, false), (Self::WALK_ALL, false)],
        };
        let pipelines = [(true, true), (true, false), (false, true), (false, false)];
        let mut space = Vec::new();
        for (consumers, blocks_per_sm) in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)] {
            for block_kv in (48..=192).step_by(16) {
                for stages in 2..=4 {
                    for (overlap, take_turns) in pipelines.into_iter().filter(|p| consumers > 1 || !p.1) {
                        for &masked_loop in masks {
                            for &(section_mib, ending) in sections {
                                for (pack_group, scheduler, chain, output_apart) in [
                                    (false, Sm90Scheduler::Single, false, false),
                                    (false, Sm90Scheduler::Queue, false, false),
                                    (false, Sm90Scheduler::Queue, false, true),
                                    (false, Sm90Scheduler::Queue, true, false),
                                    (false, Sm90Scheduler::Queue, true, true),
                                    (true, Sm90Scheduler::Single, false, false),
                                    (true, Sm90Scheduler::Queue, true, false),
                                ] {
                                    for &exp2_eighths in if masked_loop { eighths } else { &[0][..] } {
                                        space.push(Self {
                                            consumers,
                                            block_kv,
                                            stages,
                                            overlap,
                                            take_turns,
                                            masked_loop,
                                            pack_group,
                                            scheduler,
                                            chain,
                                            output_apart,
                                            exp2_eighths,
                                            blocks_per_sm,
                                            section_mib,
                                            ending,
                                            ..Self::default()
                                        });
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
        // Where ends follow the diagonal, larger blocks are rarely left out whole, it cost 1 to 2 % where steps of
        // narrow heads overlap, and no tile would chain. Runs in memory end anywhere: there it is a wash
        // (docs/measured).
        let runs = program.is_some_and(|p| p.runs().is_some());
        let gains = |s: &Self| s.block_kv < 128 && (!s.overlap || problem.head_dim_v > 128 && !s.chain);
        let trims = |s: &&Self| s.trims(problem) && (runs || gains(s));
        let trimmed: Vec<Self> = space.iter().filter(trims).map(|s| Self { trim: true, ..*s }).collect();
        space.extend(trimmed);
        if program.is_some_and(|p| !p.biases().is_empty()) {
            let single = |s: &&Self| s.block_kv.is_multiple_of(64) && !s.trim && !s.pack_group;
            let brought =
                space.iter().filter(single).flat_map(|s| [1, 2].map(|bias_stages| Self { bias_stages, ..*s }));
            space.extend(brought.collect::<Vec<_>>());
        }
        if problem.dropout {
            let drawn = space.iter().flat_map(|s| [1, 2].map(|drawers| Self { drawers, ..*s }));
            space.extend(drawn.collect::<Vec<_>>());
        }
        // Another split of the registers, of schedules of the usual kind: more to the producer where its rule may be
        // too tight.
        let usual = |s: &&Self| {
            let alone = s.scheduler == Sm90Scheduler::Queue && s.blocks_per_sm == 1 && s.bias_stages == 0;
            alone && s.overlap && s.masked_loop && s.stages == 2 && s.exp2_eighths == 0 && s.section_mib == 32
        };
        let spared: Vec<Self> = space.iter().filter(usual).map(|s| Self { producer_spare: 16, ..*s }).collect();
        space.extend(spared);
        space
    }

    /// Whether the schedule differs for this shape from a simpler one of the space.
    pub fn is_worth(&self, shape: &Shape) -> bool {
        let packs = shape.group() > 1 && shape.group().is_power_of_two() && shape.group() <= 64;
        let several_heads = shape.batch as u64 * shape.heads as u64 > 1;
        (packs || !self.pack_group) && (several_heads || self.section_mib == 0)
    }
}
