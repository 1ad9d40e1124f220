//! The block masks that hosts hold handles of.

use crate::handles::Table;
use engine::BlockMask;

/// A block mask behind a handle.
pub(crate) struct Prepared {
    pub block_mask: BlockMask,
    /// The mask as it was given.
    pub text: String,
}

/// The block masks of this process.
pub(crate) static BLOCK_MASKS: Table<Prepared> = Table::new("block mask", "flashtune_block_mask_create");
