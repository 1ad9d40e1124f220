//! The one argument struct that every forward kernel takes, on every device.
//!
//! CUDA kernels receive it by value as `const __grid_constant__ ForwardArgs`, CPU kernels by pointer. Its layout is
//! repeated in `templates/lib/cuda/abi.cuh` and `templates/lib/cpu/abi.h`; [`ABI_VERSION`] is part of every key, so a
//! kernel built for another layout is refused, never called.

use crate::omitted::is_default;
use crate::score::MAX_BIASES;
use crate::{Error, Kernel, Result, Schedule};
use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};
use std::mem::offset_of;

/// Version of [`ForwardArgs`] and of the entry points. Any change to either needs a new number, but for fields that are
/// appended to a segment of [`ArgsLayout`]: kernels of before are then given what they were compiled for.
pub const ABI_VERSION: u32 = 6;

/// Arguments of a forward kernel. Pointers are device addresses; strides count elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct ForwardArgs {
    /// Q, `[batch, heads, q_len, head_dim_qk]` by strides.
    pub q: u64,
    /// K, `[batch, kv_heads, kv_len, head_dim_qk]` by strides.
    pub k: u64,
    /// V, `[batch, kv_heads, kv_len, head_dim_v]` by strides.
    pub v: u64,
    /// O, `[batch, heads, q_len, head_dim_v]` by strides.
    pub o: u64,
    /// Log-sum-exp, fp32, contiguous `[batch, heads, q_len]`, or 0.
    pub lse: u64,
    /// Attention weights, fp32, contiguous `[batch, heads, q_len, kv_len]`, or 0. Only `forward/naive` writes them.
    pub weights: u64,
    /// Strides of Q: batch, head, row.
    pub q_stride: [i64; 3],
    /// Strides of K: batch, head, row.
    pub k_stride: [i64; 3],
    /// Strides of V: batch, head, row.
    pub v_stride: [i64; 3],
    /// Strides of O: batch, head, row.
    pub o_stride: [i64; 3],
    /// Number of sequences.
    pub batch: i32,
    /// Number of query heads.
    pub heads: i32,
    /// Number of KV heads.
    pub kv_heads: i32,
    /// Rows of Q.
    pub q_len: i32,
    /// Rows of K and V.
    pub kv_len: i32,
    /// Keys visible before the query's position; read only by kernels whose left side is bounded.
    pub window_left: i32,
    /// Keys visible after the query's position; read only by kernels whose right side is bounded.
    pub window_right: i32,
    /// Softmax scale, applied to the scores.
    pub scale: f32,
    /// Address in host memory, on every device, of the [`SideArgs`] of a kernel with a score program, or 0. Whoever
    /// launches on a GPU copies the tables into the launch; kernels there never see this address.
    pub side: u64,
}

/// What a score program reads besides the scores: host addresses of arrays in the order of the program's declarations.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct SideArgs {
    /// [`SideTensorArg`]s.
    pub tensors: u64,
    /// Scalars of 8 bytes: an int in all of them, a float in the first four.
    pub scalars: u64,
}

/// A side tensor of up to four axes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct SideTensorArg {
    /// Address of the first element.
    pub data: u64,
    /// Elements from one index to the next, 0 along an axis of length 1.
    pub stride: [i64; 4],
    /// Length of each axis; unused ones are 0.
    pub length: [i32; 4],
}

/// A tensor as the copy engine takes it: opaque, encoded by the driver.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TensorMap(pub [u64; 16]);

/// The argument struct of `forward/sm90`, by value: `Sm90Args` in `templates/lib/cuda/walk.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sm90Args {
    /// Q, K, V and O.
    pub maps: [TensorMap; 4],
    /// Biases of a score program, those that `biases_mapped` says.
    pub biases: [TensorMap; MAX_BIASES],
    /// What every kernel takes.
    pub forward: ForwardArgs,
    /// How the launch divides the rows.
    pub tiling: Tiling,
    /// Which of the kernel's counters deals tiles to thread blocks that take them from a queue: one that no other launch
    /// uses at the same time. -1 lets them take tiles by stride.
    pub queue: i32,
    /// One bit for each bias that the copy engine brings; the kernel's threads copy others.
    pub biases_mapped: u32,
    /// Memory for what the kernels before this one find for it ([`crate::Prelude`]), or 0.
    pub found: u64,
    /// Memory for the masks of cut blocks, or 0: the kernel then evaluates them itself.
    pub masks: u64,
}

/// Bytes of each segment of the argument that a kernel was compiled for. A struct grows at its end, so the first bytes of a
/// present one are the whole of an earlier one, and a launch assembles the argument of an old kernel from them. CPU kernels
/// take a pointer: more fields than they know do no harm there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArgsLayout {
    /// Tensor maps, biases' among them, before the rest.
    #[serde(default, skip_serializing_if = "is_default")]
    pub head: u32,
    /// [`ForwardArgs`].
    pub forward: u32,
    /// What follows it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tail: u32,
    /// One [`SideTensorArg`], of which a score program has a table behind all of that.
    pub side_tensor: u32,
}

impl ArgsLayout {
    const FORWARD: Self = Self {
        head: 0,
        forward: size_of::<ForwardArgs>() as u32,
        tail: 0,
        side_tensor: size_of::<SideTensorArg>() as u32,
    };
    const SM90: Self = Self {
        head: offset_of!(Sm90Args, forward) as u32,
        tail: (offset_of!(Sm90Args, masks) + size_of::<u64>() - offset_of!(Sm90Args, tiling)) as u32,
        ..Self::FORWARD
    };

    /// What this build launches a kernel with.
    pub const fn of(kernel: &Kernel) -> Self {
        match kernel.schedule {
            Schedule::Sm90(_) => Self::SM90,
            _ => Self::FORWARD,
        }
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
        let known = Self::of(kernel);
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
    offset_of!(Sm90Args, tiling) == offset_of!(Sm90Args, forward) + size_of::<ForwardArgs>()
        && ArgsLayout::SM90.base() == size_of::<Sm90Args>()
        && ArgsLayout::FORWARD.base() == size_of::<ForwardArgs>()
);

/// Counters that a kernel's module holds for launches whose thread blocks take tiles from a queue.
pub const TILE_QUEUES: usize = 256;

/// How a launch of `forward/sm90` divides the query rows into tiles, computed once by the host.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// log2 of the query heads of a KV head that share a tile; 0 when they do not.
    pub group_shift: i32,
    /// Heads or, sharing tiles, KV heads: units of one batch.
    pub unit_heads: i32,
    /// Tiles of one unit.
    pub blocks: i32,
    /// Units that are walked one KV head after the other, before the sections.
    pub leading: i32,
    /// Units that are walked together.
    pub section: i32,
    /// Tiles of the whole problem.
    pub tiles: i32,
}
