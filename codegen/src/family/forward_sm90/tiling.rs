//! How a launch divides the query rows into tiles, and in which order they are taken.

use super::Sm90Schedule;
use crate::launch::tiles;
use crate::{Problem, Result, Shape, Tiling};

impl Sm90Schedule {
    /// How a launch divides the query rows of a shape into tiles.
    pub(super) fn tiling(&self, problem: &Problem, shape: &Shape) -> Result<Tiling> {
        let s = self;
        let group = shape.group();
        // The heads of a group can share a tile of 64 rows when they divide it, and as long as rows can be counted.
        let packed =
            s.pack_group && group.is_power_of_two() && group <= 64 && (shape.q_len as u64) * (group as u64) < 1 << 30;
        let (group_shift, unit_heads) = if packed { (group.ilog2(), shape.kv_heads) } else { (0, shape.heads) };
        let rows = shape.q_len << group_shift;
        let blocks = rows.div_ceil(s.block_q());
        let tiles = tiles(blocks * s.block_q(), s.block_q(), unit_heads, shape.batch)?;
        let batch_heads = shape.batch as u64 * unit_heads as u64;
        let kv_head_bytes = shape.kv_len as u64 * (problem.head_dim_qk + problem.head_dim_v) as u64 * 2;
        let section = match s.section_mib {
            Sm90Schedule::WALK_ALL => batch_heads,
            mib => (((mib as u64) << 20) / kv_head_bytes.max(1)).max(1) * if packed { 1 } else { group as u64 },
        };
        let section = section.min(batch_heads);
        // Sections of the same size: a small one at the end would leave multiprocessors without work.
        let share = if packed { 1 } else { group as u64 };
        let section = if s.ending {
            section
        } else {
            batch_heads.div_ceil(batch_heads.div_ceil(section)).next_multiple_of(share).min(batch_heads)
        };
        Ok(Tiling {
            group_shift: group_shift as i32,
            unit_heads: unit_heads as i32,
            blocks: blocks as i32,
            leading: if s.ending { (batch_heads - section) as i32 } else { 0 },
            section: section as i32,
            tiles: tiles as i32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::Stage;
    use crate::{DType, Kernel, Mask, MaskKind, Schedule, ShapeBucket, Sm90Scheduler};

    fn kernel(change: impl Fn(&mut Sm90Schedule)) -> Kernel {
        let arch: crate::Arch = "sm_90a".parse().unwrap();
        let crate::Arch::Sm(sm) = arch else { unreachable!() };
        let problem = Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap();
        let bucket = ShapeBucket { parallel: 32, group: 4, q_len: 4096, kv_len: 4096, ..Default::default() };
        let mut s = Sm90Schedule::default_for(&problem, sm, &bucket);
        (s.consumers, s.block_kv, s.pack_group, s.ending) = (2, 128, false, false);
        change(&mut s);
        Kernel { problem, schedule: Schedule::Sm90(s), arch }
    }

    fn main(kernel: Kernel) -> Stage {
        let plan = kernel.plan(&shape(32, 8, 4096)).unwrap();
        assert_eq!(plan.stages().count(), 1);
        *plan.main().unwrap()
    }

    fn shape(heads: u32, kv_heads: u32, q_len: u32) -> Shape {
        Shape { batch: 3, heads, kv_heads, q_len, kv_len: 4096, mask: Mask::Causal }
    }

    #[test]
    fn groups_share_a_tile_where_they_divide_it() {
        let packed = kernel(|s| s.pack_group = true);
        let t = packed.plan(&shape(32, 8, 33)).unwrap().tiling.unwrap();
        assert_eq!((t.group_shift, t.unit_heads, t.blocks, t.tiles), (2, 8, 2, 2 * 8 * 3));
        // Three heads of a group do not divide 64 rows: every head has its own tiles then.
        let t = packed.plan(&shape(24, 8, 33)).unwrap().tiling.unwrap();
        assert_eq!((t.group_shift, t.unit_heads, t.blocks, t.tiles), (0, 24, 1, 24 * 3));
        let t = packed.plan(&shape(32, 8, 1 << 29)).unwrap().tiling.unwrap();
        assert_eq!(t.group_shift, 0);
    }

    #[test]
    fn a_section_holds_whole_groups_and_never_more_than_there_are() {
        let section = |mib| kernel(|s| s.section_mib = mib).plan(&shape(32, 8, 4096)).unwrap().tiling.unwrap().section;
        // K and V of one KV head: 4096 rows of 256 elements of 2 bytes, 2 MiB.
        assert_eq!([section(0), section(2), section(5), section(8)], [4, 4, 8, 16]);
        assert_eq!(section(Sm90Schedule::WALK_ALL), 96);
        assert_eq!(section(1 << 20), 96);
        // Three of 32 heads, not two of 44 and one of 8.
        assert_eq!([section(22), section(40)], [32, 48]);
    }

    #[test]
    fn single_heads_come_before_a_section_at_the_end() {
        let parts = |mib| {
            let kernel = kernel(|s| (s.section_mib, s.ending) = (mib, true));
            let t = kernel.plan(&shape(32, 8, 4096)).unwrap().tiling.unwrap();
            (t.leading, t.section)
        };
        assert_eq!([parts(0), parts(22), parts(1 << 20)], [(92, 4), (52, 44), (0, 96)]);
    }

    #[test]
    fn blocks_that_stay_are_as_many_as_fit() {
        let stay = main(kernel(|s| s.scheduler = Sm90Scheduler::Queue));
        assert_eq!((stay.blocks(132), stay.blocks(100_000)), (132, stay.grid));
        let launch = main(kernel(|s| s.scheduler = Sm90Scheduler::Single));
        assert_eq!(launch.blocks(132), launch.grid);
    }
}
