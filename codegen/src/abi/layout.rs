//! How long the segments of the argument are that a kernel was compiled for.

use super::{
    AppendArgs, BackwardArgs, BackwardMappedArgs, Cut, ForwardArgs, GradientArgs, MappedArgs, PadArgs, QuantiseArgs,
    RaggedArgs, RaggedMappedArgs, SideTensorArg, TensorMap,
};
use crate::omitted::is_default;
use crate::{Error, Kernel, Op, Result};
use serde::{Deserialize, Serialize};
use std::mem::offset_of;

/// Bytes of each segment of the argument that a kernel was compiled for. A struct grows at its end, so the first bytes
/// of a present one are the whole of an earlier one, and a launch assembles the argument of an old kernel from them.
/// CPU kernels take a pointer: more fields than they know do no harm there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArgsLayout {
    /// Tensor maps, biases' among them, before the rest.
    #[serde(default, skip_serializing_if = "is_default")]
    pub head: u32,
    /// [`ForwardArgs`], [`RaggedArgs`], [`AppendArgs`], [`BackwardArgs`], [`PadArgs`] or [`QuantiseArgs`].
    pub forward: u32,
    /// What follows it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tail: u32,
    /// One [`SideTensorArg`], of which a score program has a table behind all of that.
    pub side_tensor: u32,
}

impl ArgsLayout {
    /// Of kernels that take [`ForwardArgs`] alone.
    pub(crate) const FORWARD: Self = Self {
        head: 0,
        forward: size_of::<ForwardArgs>() as u32,
        tail: 0,
        side_tensor: size_of::<SideTensorArg>() as u32,
    };
    /// Of those that take [`RaggedArgs`].
    pub(crate) const RAGGED: Self = Self { forward: size_of::<RaggedArgs>() as u32, ..Self::FORWARD };
    /// Of those that take [`AppendArgs`].
    pub(crate) const APPEND: Self = Self { forward: size_of::<AppendArgs>() as u32, ..Self::FORWARD };
    /// Of those that take [`PadArgs`].
    pub(crate) const PAD: Self = Self { forward: size_of::<PadArgs>() as u32, ..Self::FORWARD };
    /// Of those that take [`QuantiseArgs`].
    pub(crate) const QUANTISE: Self = Self { forward: size_of::<QuantiseArgs>() as u32, ..Self::FORWARD };
    /// Of those that take [`BackwardArgs`].
    pub(crate) const BACKWARD: Self = Self { forward: size_of::<BackwardArgs>() as u32, ..Self::FORWARD };
    /// Of those that take [`GradientArgs`].
    pub(crate) const GRADIENT: Self =
        Self { tail: (size_of::<GradientArgs>() - size_of::<BackwardArgs>()) as u32, ..Self::BACKWARD };
    /// Of those that take [`MappedArgs`].
    pub(crate) const MAPPED: Self = Self {
        head: offset_of!(MappedArgs, forward) as u32,
        tail: (offset_of!(MappedArgs, masks) + size_of::<u64>() - offset_of!(MappedArgs, tiling)) as u32,
        ..Self::FORWARD
    };

    /// Of those that take [`RaggedMappedArgs`].
    pub(crate) const RAGGED_MAPPED: Self = Self {
        head: offset_of!(RaggedMappedArgs, forward) as u32,
        tail: (offset_of!(RaggedMappedArgs, box_keys) + size_of::<i32>() - offset_of!(RaggedMappedArgs, tiling)) as u32,
        ..Self::RAGGED
    };

    /// Of those that take [`BackwardMappedArgs`].
    pub(crate) const BACKWARD_MAPPED: Self = Self {
        head: offset_of!(BackwardMappedArgs, backward) as u32,
        tail: (offset_of!(BackwardMappedArgs, walks) + size_of::<i64>() - offset_of!(BackwardMappedArgs, first_pair))
            as u32,
        ..Self::BACKWARD
    };

    /// What a kernel takes that this build compiles, which ends before the fields of what its problem has not.
    pub fn of(kernel: &Kernel) -> Self {
        let full = kernel.schedule.family().args();
        let cut = match kernel.problem.op {
            Op::Forward if kernel.problem.kv.is_dense() => Cut::of_forward(&kernel.problem),
            Op::Forward => Cut::of_ragged(&kernel.problem),
            Op::Backward | Op::Gradient => Cut::of_backward(&kernel.problem),
            _ => Cut::NONE,
        };
        Self { forward: full.forward - cut.bytes as u32, ..full }
    }

    /// Whether it is the first bytes of one struct: no segment lies before or behind the one that grows.
    pub const fn is_one_struct(&self) -> bool {
        self.head == 0 && self.tail == 0
    }

    /// Bytes of all segments with the padding behind them: where a program's tables begin.
    pub const fn base(&self) -> usize {
        let align = if self.head > 0 { align_of::<TensorMap>() } else { align_of::<ForwardArgs>() };
        (self.head as usize + self.forward as usize + self.tail as usize).next_multiple_of(align)
    }

    /// Whether this build can launch a kernel that was compiled for it.
    ///
    /// # Errors
    /// The segment that is longer than this build's or none at all.
    pub fn check(&self, kernel: &Kernel) -> Result<()> {
        let known = kernel.schedule.family().args();
        for (field, found, known) in [
            ("args.head", self.head, known.head),
            ("args.forward", self.forward, known.forward),
            ("args.tail", self.tail, known.tail),
            ("args.side_tensor", self.side_tensor, known.side_tensor),
        ] {
            if found > known || found % 8 != 0 {
                let limit = format!("this build fills at most {known} bytes of it, in eights");
                let remedy = "use the build that compiled the kernel, or compile it again with this one";
                return Err(Error::unsupported(field, format!("{found} bytes"), limit, remedy));
            }
        }
        Ok(())
    }
}

// Segments follow each other without padding.
const _: () = assert!(
    offset_of!(MappedArgs, tiling) == offset_of!(MappedArgs, forward) + size_of::<ForwardArgs>()
        && offset_of!(RaggedMappedArgs, tiling) == offset_of!(RaggedMappedArgs, forward) + size_of::<RaggedArgs>()
        && offset_of!(BackwardMappedArgs, first_pair)
            == offset_of!(BackwardMappedArgs, backward) + size_of::<BackwardArgs>()
        && ArgsLayout::BACKWARD_MAPPED.base() == size_of::<BackwardMappedArgs>()
        && offset_of!(GradientArgs, out) == size_of::<BackwardArgs>()
        && ArgsLayout::GRADIENT.base() == size_of::<GradientArgs>()
        && ArgsLayout::RAGGED_MAPPED.base() == size_of::<RaggedMappedArgs>()
        && ArgsLayout::MAPPED.base() == size_of::<MappedArgs>()
        && ArgsLayout::FORWARD.base() == size_of::<ForwardArgs>()
);
