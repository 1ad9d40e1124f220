//! Waves of packed sequences, whose sizes only the device knows ([`crate::Waves::packed`]): how many there can be, and
//! what lies in front of the memory that the parts of a wave share. All of it follows from bounds and the limit.

use crate::Waves;

/// Bytes of a sequence in the table that the first stage leaves, as `SequenceRecord` of the template.
pub(crate) const SEQUENCE_BYTES: u32 = 64;

/// What bounds packed sequences. A part is a pair of a sequence and a KV head; its bytes are those of dS, in slots of
/// so many queries by so many keys. Parts are laid out one after the other, each in the wave of the one before where
/// there is room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedWaves {
    /// Sequences.
    pub batch: u32,
    /// Query heads and KV heads.
    pub heads: [u32; 2],
    /// Rows of K that a sequence has at most.
    pub longest_keys: u32,
    /// Rows of Q and of K in the pack, those of no sequence included.
    pub rows: [u64; 2],
    /// Queries and keys of a slot.
    pub slot: [u32; 2],
    /// Bytes of a slot, of all heads of a group.
    pub slot_bytes: u64,
    /// Queries of a block whose owner is in the table.
    pub row_block: u32,
}

impl PackedWaves {
    /// The same with packs of so many rows.
    pub(crate) fn of_rows(self, rows: [u64; 2]) -> Self {
        Self { rows, ..self }
    }

    /// Blocks of so many rows that sequences have at most, each of which may end in one that is not full.
    fn blocks(&self, side: usize, block: u32) -> u64 {
        self.rows[side] / u64::from(block) + u64::from(self.batch)
    }

    /// Bytes in front of what parts share, as `Table` of the template: where waves begin, the sequences, owners of
    /// blocks of keys and of queries, and two numbers for each query.
    pub fn front_bytes(&self) -> u64 {
        let pairs = u64::from(self.batch) * u64::from(self.heads[1]);
        let [starts, sequences] = [(pairs + 1) * 8, u64::from(self.batch) * u64::from(SEQUENCE_BYTES)];
        let owners = [self.blocks(1, self.slot[1]) * 4, self.blocks(0, self.row_block) * 4];
        let statistics = self.blocks(0, self.slot[0]) * u64::from(self.slot[0]) * 8 * u64::from(self.heads[0]);
        let table: u64 = [starts, sequences].into_iter().chain(owners).map(|n| n.next_multiple_of(128)).sum();
        table + statistics
    }

    /// Bytes of all parts at most: of sequences as long as they may be where there are rows for them. Of a part's slots
    /// there are the fewer for each of its keys the fewer keys it has, under every mask.
    fn all_bytes(&self, part_bytes: u64) -> u64 {
        let blocks = u64::from(self.longest_keys.div_ceil(self.slot[1]));
        let [all_tiles, all_blocks] = [0, 1].map(|side| self.blocks(side, self.slot[side]));
        let of_batch = part_bytes.saturating_mul(self.batch.into());
        let of_keys = u128::from(part_bytes) * u128::from(all_blocks) / u128::from(blocks.max(1)) + 1;
        let of_queries = u128::from(self.slot_bytes) * u128::from(all_tiles) * u128::from(blocks);
        let least = u128::from(of_batch).min(of_keys).min(of_queries);
        let slots = least.div_ceil(u128::from(self.slot_bytes.max(1))) * u128::from(self.heads[1]);
        u64::try_from(slots).unwrap_or(u64::MAX).saturating_mul(self.slot_bytes)
    }

    /// What a wave has room for, in whole slots: within the limit, and at least a part.
    fn room(&self, waves: &Waves) -> u64 {
        let slots = waves.limit.saturating_sub(self.front_bytes()) / self.slot_bytes.max(1);
        (slots * self.slot_bytes).max(waves.part_bytes)
    }

    /// Bytes that the parts of a wave share.
    pub(crate) fn shared_bytes(&self, waves: &Waves) -> u64 {
        self.room(waves).min(self.all_bytes(waves.part_bytes))
    }

    /// Waves that the longest sequences need: a part is not begun in a wave that has no room for all of it, and two
    /// waves one after the other have more than fits one.
    pub(crate) fn count(&self, waves: &Waves) -> u32 {
        let (all, room) = (self.all_bytes(waves.part_bytes), self.room(waves));
        if all <= room {
            return waves.parts.min(1);
        }
        let least = (room - waves.part_bytes).max(room / 2).max(1);
        u32::try_from(all / least + 1).unwrap_or(u32::MAX).min(waves.parts)
    }
}
