//! The argument structs of kernels, on every device.
//!
//! CUDA kernels receive theirs by value as `const __grid_constant__`, CPU kernels by pointer. Templates paste the
//! declarations that [`declaration`] writes from the structs here; [`ABI_VERSION`] is part of every key, so a kernel
//! built for another layout is refused, never called.

mod declare;
mod layout;

pub use declare::{Declared, Field, Spelt, declaration};
pub use layout::ArgsLayout;

use crate::Language;
use crate::score::MAX_BIASES;
use bytemuck::{Pod, Zeroable};
use declare::arguments;

/// Version of [`ForwardArgs`] and of the entry points. Any change to either needs a new number, but for fields that are
/// appended to a segment of [`ArgsLayout`]: kernels of before are then given what they were compiled for.
///
/// The same holds for what else host and kernel agree in by numbers that are rendered, and that no template's hash
/// shows: [`TILE_QUEUES`], and how block lists and key ranges lie in memory.
pub const ABI_VERSION: u32 = 6;

arguments! {
    /// Arguments of a forward kernel. Pointers are device addresses; strides count elements.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct ForwardArgs as "ForwardArgs" {
        /// Q, `[batch, heads, q_len, head_dim_qk]` by strides.
        pub q: u64 as "const void*",
        /// K, `[batch, kv_heads, kv_len, head_dim_qk]` by strides.
        pub k: u64 as "const void*",
        /// V, `[batch, kv_heads, kv_len, head_dim_v]` by strides.
        pub v: u64 as "const void*",
        /// O, `[batch, heads, q_len, head_dim_v]` by strides.
        pub o: u64 as "void*",
        /// Log-sum-exp, fp32, contiguous `[batch, heads, q_len]`, or 0.
        pub lse: u64 as "float*",
        /// Attention weights, fp32, contiguous `[batch, heads, q_len, kv_len]`, or 0. Only `forward/naive` writes them.
        pub weights: u64 as "float*",
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
        pub side: u64 as "const void*",
    }
}

arguments! {
    /// What a score program reads besides the scores: host addresses of arrays in the order of the program's
    /// declarations.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct SideArgs as "Side" {
        /// [`SideTensorArg`]s.
        pub tensors: u64 as "const SideTensor*",
        /// Scalars of 8 bytes: an int in all of them, a float in the first four.
        pub scalars: u64 as "const SideScalar*",
    }
}

arguments! {
    /// A side tensor of up to four axes.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct SideTensorArg as "SideTensor" {
        /// Address of the first element.
        pub data: u64 as "const void*",
        /// Elements from one index to the next, 0 along an axis of length 1.
        pub stride: [i64; 4],
        /// Length of each axis; unused ones are 0.
        pub length: [i32; 4],
    }
}

/// A tensor as the copy engine takes it: opaque, encoded by the driver.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TensorMap(pub [u64; 16]);

impl Spelt for TensorMap {
    const C: &'static str = "TensorMap";
    const CUDA: &'static str = "TensorMap";
}

arguments! {
    /// The argument of kernels that take tensor maps beside [`ForwardArgs`], by value.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct MappedArgs as "Sm90Args" {
        /// Q, K, V and O.
        pub maps: [TensorMap; 4] { q, k, v, o },
        /// Biases of a score program, those that `biases_mapped` says.
        pub biases: [TensorMap; MAX_BIASES],
        /// What every kernel takes.
        pub forward: ForwardArgs,
        /// How the launch divides the rows. Members of this struct in the kernel: beside a struct in between, NVRTC
        /// orders the instructions of some kernels otherwise.
        pub tiling: Tiling { group_shift, unit_heads, blocks, leading, section, tiles },
        /// Which of the kernel's counters deals tiles to thread blocks that take them from a queue: one that no other
        /// launch uses at the same time. -1 lets them take tiles by stride.
        pub queue: i32,
        /// One bit for each bias that the copy engine brings; the kernel's threads copy others.
        pub biases_mapped: u32,
        /// Memory for the mask metadata ([`crate::Holds::MaskMetadata`]), or 0.
        pub found: u64 as "void*",
        /// Memory for the masks of cut blocks, or 0: the kernel then evaluates them itself.
        pub masks: u64 as "u32*",
    }
}

/// Counters, of 4 bytes each, that a kernel's module holds for launches whose persistent thread blocks take tiles from
/// one: more than ten thousand captured launches of one kernel may live at once.
///
/// A compiled kernel has as many, and the host gives it indexes below this: another number needs a new [`ABI_VERSION`].
pub const TILE_QUEUES: usize = 1 << 14;

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

/// Of each of the members that it becomes.
impl Spelt for Tiling {
    const C: &'static str = "int32_t";
    const CUDA: &'static str = "int";
}

/// The declarations that a template pastes, by the names that it has for them.
pub(crate) fn fields(language: Language) -> Vec<(&'static str, String)> {
    let common = [
        ("forward_args", declaration::<ForwardArgs>(language)),
        ("side_tensor", declaration::<SideTensorArg>(language)),
    ];
    let own = match language {
        Language::C => vec![("side_args", declaration::<SideArgs>(language))],
        Language::Cuda => vec![("sm90_args", declaration::<MappedArgs>(language))],
    };
    common.into_iter().chain(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    arguments! {
        /// Of [`Tiling`].
        #[repr(C)]
        #[derive(Debug)]
        pub struct Small as "Little" {
            /// Where it lies.
            pub at: u64 as "const float*",
            /// Two numbers, ...
            /// or none.
            pub numbers: [i32; 2],
            /// A pair.
            pub pair: [u64; 2] { first, second },
        }
    }

    #[test]
    fn a_declaration_has_every_member_where_rust_has_it() {
        let c = declaration::<Small>(Language::C);
        let body = "/* Of Tiling. */\ntypedef struct {\n    /* Where it lies. */\n    const float* at;\n    /* Two numbers, ... or none. */\n    \
                    int32_t numbers[2];\n    /* A pair. */\n    uint64_t first, second;\n} Little;\n";
        assert!(c.starts_with(body), "{c}");
        let cuda = declaration::<Small>(Language::Cuda);
        for line in ["// Of Tiling.\nstruct Little {\n", "    int numbers[2];\n", "    u64 first, second;\n};\n"] {
            assert!(cuda.contains(line), "{line}\n{cuda}");
        }
        let size = "ssert(sizeof(Little) == 32, ";
        assert!(c.contains(size) && cuda.contains(size), "{c}\n{cuda}");
        for (member, offset) in [("at", 0), ("numbers", 8), ("first", 16), ("second", 24)] {
            let line = format!("_Static_assert(__builtin_offsetof(Little, {member}) == {offset}, ");
            assert!(c.contains(&line), "{line}\n{c}");
        }
        // NVRTC 13.0 has neither.
        assert!(!cuda.contains("offsetof"), "{cuda}");
    }

    #[test]
    fn no_byte_of_an_argument_struct_is_without_a_member() {
        fn gaps<T: Declared>() -> usize {
            let fields: usize = T::FIELDS.iter().map(|f| f.size).sum();
            T::SIZE - fields
        }
        // The last struct is padded to the alignment of its tensor maps.
        let gaps = [gaps::<ForwardArgs>(), gaps::<SideArgs>(), gaps::<SideTensorArg>(), gaps::<MappedArgs>()];
        assert_eq!(gaps[..3], [0; 3]);
        assert!(gaps[3] < 64, "{gaps:?}");
    }

    #[test]
    fn the_members_that_a_tiling_becomes_are_its_fields() {
        let tiling = MappedArgs::FIELDS.iter().find(|f| f.members.contains(&"tiles")).expect("a field");
        let tiling: Vec<(&str, usize)> =
            tiling.members.iter().enumerate().map(|(i, &member)| (member, 4 * i)).collect();
        macro_rules! offsets {
            ($($field:ident),*) => { [$((stringify!($field), std::mem::offset_of!(Tiling, $field))),*] };
        }
        assert_eq!(tiling, offsets!(group_shift, unit_heads, blocks, leading, section, tiles));
        assert_eq!(size_of::<Tiling>(), 4 * tiling.len());
    }
}
