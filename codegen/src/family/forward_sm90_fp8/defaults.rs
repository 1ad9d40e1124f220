//! The schedules of `forward/sm90_fp8`: the one that serves while nothing is tuned, and those that a search may try.

use super::Sm90Fp8Schedule;
use crate::family::Sm90Schedule;
use crate::{Problem, ScaleUnit, ShapeBucket};

impl Sm90Fp8Schedule {
    /// The schedule that serves while nothing is tuned.
    pub fn default_for(problem: &Problem, bucket: &ShapeBucket) -> Self {
        let columns = problem.head_dim_v.next_multiple_of(16);
        let d = problem.head_dim_qk.max(columns);
        let part = |most| part_up_to(columns, most);
        let base = Self {
            consumers: 2,
            block_kv: 128,
            stages: 2,
            raw_stages: 1,
            part: part(64),
            overlap: false,
            take_turns: false,
            blocks_per_sm: 1,
            section_mib: 32,
        };
        // By the times of docs/measured/log/2026-11-24-h200-fp8.md: three consumers where their registers suffice, and
        // where a mask does not leave some of them little to do.
        let cut_short = problem.mask.right && bucket.q_len < 8192;
        // Beside a program the softmax is longer than the products, and what overlaps waits for registers: 155 and 151
        // us with a cap at 4096, 131 and 125 with slopes (H200, 16/4 heads of 128, causal); a mask of documents spills
        // 480 bytes. So it is with scales of keys, of which a product of each score is made: 123 and 115 us.
        let beside = problem.program.is_some_and(|p| p.score().is_some() || p.mask().is_some());
        let plain = match d {
            0..=64 => Self { consumers: 3, ..base },
            // One part: 997 and 1027 us with parts of 32, 88 and 97 with an overlap (H100, causal, 16k and 4k).
            65..=80 if !beside => Self { consumers: 3, part: part(80), ..base },
            65..=128 if beside => base,
            65..=128 if cut_short => Self { overlap: problem.scales.k != ScaleUnit::Rows, ..base },
            65..=128 => Self { consumers: 3, part: part(32), ..base },
            // Two parts of 80: 1477 and 1550 us with parts of 32 (H100, causal, 16k).
            160 => Self { part: part(80), ..base },
            _ => base,
        };
        // Score programs take registers, so that fewer consumers have them, or smaller blocks of keys leave them.
        let small = [128, 96, 64, 32].map(|block_kv| Self { block_kv, part: part(32), ..base });
        let alone = [64, 32].map(|block_kv| Self { consumers: 1, block_kv, part: part(32), ..base });
        let fits = |s: &Self| s.validate(problem).is_ok();
        [plain, base].into_iter().chain(small).chain(alone).find(fits).unwrap_or(plain)
    }

    /// The schedules worth trying.
    pub fn space(problem: &Problem) -> Vec<Self> {
        let columns = problem.head_dim_v.next_multiple_of(16);
        let mut parts = [32, 64, 128].map(|most| part_up_to(columns, most)).to_vec();
        parts.dedup();
        let sections: &[u32] = if problem.mask.right { &[0, 32, Sm90Schedule::WALK_ALL] } else { &[0, 32] };
        let mut space = Vec::new();
        for (consumers, blocks_per_sm) in [(1, 1), (1, 2), (2, 1), (3, 1)] {
            for block_kv in (64..=224).step_by(32) {
                for stages in 2..=3 {
                    for raw_stages in 1..=2 {
                        for &part in &parts {
                            for (overlap, take_turns) in [(true, false), (true, true), (false, false), (false, true)] {
                                if take_turns && consumers == 1 {
                                    continue;
                                }
                                space.extend(sections.iter().map(|&section_mib| Self {
                                    consumers,
                                    block_kv,
                                    stages,
                                    raw_stages,
                                    part,
                                    overlap,
                                    take_turns,
                                    blocks_per_sm,
                                    section_mib,
                                }));
                            }
                        }
                    }
                }
            }
        }
        space
    }
}

/// Columns of a part: the most that divide the columns, up to `most`; and where these are 16 alone, as of 80, 112, 176
/// and 208, parts of nearly equal widths whose last one may be narrower: they take 6 to 15 % less than parts of 16
/// (`docs/measured/2026-11-28-h200-fp8-output.md` and the page before it).
fn part_up_to(columns: u32, most: u32) -> u32 {
    let even = (32..=most).rev().find(|part| part.is_multiple_of(16) && columns.is_multiple_of(*part));
    even.unwrap_or_else(|| columns.div_ceil(columns.div_ceil(most)).next_multiple_of(16))
}
