//! How a launch divides the query rows into tiles, and in which order they are taken.

use super::Sm90Fp8Schedule;
use crate::family::Sm90Schedule;
use crate::launch::tiles;
use crate::{Problem, Result, Shape, Tiling};

impl Sm90Fp8Schedule {
    /// How a launch divides the query rows of a shape into tiles.
    pub(super) fn tiling(&self, problem: &Problem, shape: &Shape) -> Result<Tiling> {
        let blocks = shape.q_len.div_ceil(self.block_q());
        let tiles = tiles(shape.q_len, self.block_q(), shape.heads, shape.batch)?;
        let (batch_heads, group) = (shape.batch as u64 * shape.heads as u64, shape.group() as u64);
        let kv_head_bytes = shape.kv_len as u64 * (problem.head_dim_qk + problem.head_dim_v) as u64;
        let section = match self.section_mib {
            Sm90Schedule::WALK_ALL => batch_heads,
            mib => (((mib as u64) << 20) / kv_head_bytes.max(1)).max(1) * group,
        };
        let section = section.clamp(1, batch_heads.max(1));
        // Sections of the same size: a small one at the end would leave multiprocessors without work.
        let section =
            batch_heads.div_ceil(batch_heads.div_ceil(section).max(1)).next_multiple_of(group.max(1)).min(batch_heads);
        Ok(Tiling {
            group_shift: 0,
            unit_heads: shape.heads as i32,
            blocks: blocks as i32,
            leading: 0,
            section: section as i32,
            tiles: tiles as i32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Mask, MaskKind};

    #[test]
    fn a_section_holds_whole_groups_and_never_more_than_there_are() {
        let problem = Problem::forward(DType::E4m3, 128, MaskKind::FULL).unwrap();
        let shape = Shape { batch: 3, heads: 32, kv_heads: 8, q_len: 4096, kv_len: 4096, mask: Mask::Full };
        let of = |section_mib| {
            let schedule = Sm90Fp8Schedule { consumers: 2, block_kv: 128, section_mib, ..Default::default() };
            schedule.tiling(&problem, &shape).unwrap()
        };
        // K and V of one KV head: 4096 rows of 256 bytes, 1 MiB.
        assert_eq!([0, 1, 2, 11].map(|mib| of(mib).section), [4, 4, 8, 32]);
        assert_eq!([1 << 20, Sm90Schedule::WALK_ALL].map(|mib| of(mib).section), [96, 96]);
        assert_eq!((of(0).blocks, of(0).tiles), (32, 32 * 96));
    }
}
