//! `backward/sm90`: dK, dV and dQ by wgmma and TMA, dS written once to scratch memory, the same bytes in every run.

mod resources;
mod waves;

use crate::family::fields::schedule;
use crate::{Error, Problem, Result};

schedule! {
    /// Tiles of the three stages of `backward/sm90`, and the order of the products in `keys`.
    pub struct BackwardSm90Schedule {
        /// Warpgroups of `keys`, each with 64 keys: 2, or 3 with 160 registers a thread.
        pub warpgroups: u32 => code, number_unless(2, "wg");
        /// Queries of a step of `keys`.
        pub block_q: u32 => code, number("q");
        /// Buffers of Q and of dO in `keys`.
        pub stages: u32 => code, number("s");
        /// Buffers of K and V in `keys`: with 2 those of the next key block are loaded ahead, and thread blocks are
        /// persistent.
        pub key_stages: u32 => code, number_unless(1, "ks");
        /// dV is issued before dP is awaited.
        pub early_values: bool => code, flag("early");
        /// S of the next tile is issued behind dK.
        pub scores_ahead: bool => code, flag("ahead");
        /// Tiles of 64 rows of a warpgroup of `queries`.
        pub row_tiles: u32 => code, number("rows");
        /// Buffers of K and dS in `queries`.
        pub row_stages: u32 => code, number("rs");
        /// MiB of Q and dO that are walked together under a causal mask.
        pub section_mib: u32 => launch, number("l2x");
    }
}

impl BackwardSm90Schedule {
    /// By figures of an H200, TFLOP/s of the whole: persistent with K and V ahead 591 at head dim 128 and 4096 queries and
    /// keys, 414 at 512, against 546 and 391 with one buffer; at head dim 64 410 and 326 against 406 and 288. dV early
    /// or scores ahead are 2 to 5 % slower, three warpgroups or steps of 64 queries at head dim 64 12 to 16 %.
    pub fn default_for(problem: &Problem) -> Self {
        let narrow = problem.head_dim_qk.max(problem.head_dim_v) <= 64;
        let block_q = if narrow { 128 } else { 64 };
        Self {
            warpgroups: 2,
            block_q,
            stages: 2,
            key_stages: 2,
            row_tiles: 2,
            row_stages: 2,
            section_mib: 24,
            ..Self::default()
        }
    }

    /// Keys of a key block.
    pub const fn block_kv(&self) -> u32 {
        64 * self.warpgroups
    }

    /// Query rows of a thread block of `queries`.
    pub const fn rows(&self) -> u32 {
        128 * self.row_tiles
    }

    /// Checks the fields against what the template can generate.
    ///
    /// # Errors
    /// The field, its limit, and the remedy.
    pub fn validate(&self, problem: &Problem) -> Result<()> {
        let no =
            |field, value: u32, limit: &str| Err(Error::unsupported(field, value, limit, "use the default schedule"));
        if !(2..=3).contains(&self.warpgroups) {
            return no("warpgroups", self.warpgroups, "two or three");
        }
        if !matches!(self.block_q, 64 | 128) || !self.block_kv().is_multiple_of(self.block_q) {
            return no("block_q", self.block_q, "64, or 128 with two warpgroups");
        }
        if self.stages < 2
            || !(1..=2).contains(&self.key_stages)
            || self.row_stages < 2
            || !(1..=2).contains(&self.row_tiles)
        {
            return no("stages", self.stages, "at least two buffers, one or two of K and V, one or two row tiles");
        }
        let (live, most) = (resources::live_registers(problem, self), resources::most_live_registers(self));
        if live > most {
            return no(
                "block_q",
                self.block_q,
                &format!("{live} accumulators and operands of a thread, at most {most}"),
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, MaskKind};

    pub(super) fn problem(qk: u32, v: u32) -> Problem {
        Problem::forward_qk_v(DType::Bf16, qk, v, MaskKind::CAUSAL).unwrap().backward()
    }

    /// What ptxas keeps in registers, and what it serialises products for.
    #[test]
    fn registers_are_those_that_the_compiler_finds() {
        let narrow = BackwardSm90Schedule {
            block_q: 64,
            stages: 4,
            early_values: true,
            ..BackwardSm90Schedule::default_for(&problem(64, 64))
        };
        let three = BackwardSm90Schedule { warpgroups: 3, early_values: false, row_tiles: 1, ..narrow };
        let wide = BackwardSm90Schedule::default_for(&problem(128, 128));
        for (fits, s, dim) in [
            (true, wide, 128),
            (true, BackwardSm90Schedule { early_values: true, ..wide }, 128),
            (true, narrow, 64),
            (true, BackwardSm90Schedule { scores_ahead: true, ..narrow }, 64),
            (true, three, 64),
            (false, BackwardSm90Schedule { early_values: true, ..three }, 64),
            (false, BackwardSm90Schedule { early_values: true, block_q: 128, ..narrow }, 64),
            (false, BackwardSm90Schedule { block_q: 128, ..wide }, 128),
        ] {
            assert_eq!(s.validate(&problem(dim, dim)).is_ok(), fits, "{s}");
        }
    }

    #[test]
    fn names_say_what_differs_from_most() {
        let s = BackwardSm90Schedule::default_for(&problem(128, 128));
        assert_eq!(s.to_string(), "q64-s2-ks2-rows2-rs2-l2x24");
        let other = BackwardSm90Schedule { warpgroups: 3, key_stages: 1, early_values: true, ..s };
        assert_eq!(other.to_string(), "wg3-q64-s2-early-rows2-rs2-l2x24");
    }
}
