//! The tensor maps of Q, K, V, O and biases: dimensions, strides and boxes, before a driver encodes them for TMA.
//!
//! Boxes are 64 elements wide with the 128-byte swizzle, as `templates/lib/cuda/ptx/tma.cuh` expects.

use crate::abi::{ForwardArgs, SideTensorArg};
use crate::family::forward_sm90_fp8;
use crate::score::{MAX_BIASES, Storage, slot};
use crate::{DType, Kernel, Problem, Schedule, Tiling};

/// A tensor of elements of 16 bits, or of 8, as the copy engine sees it, innermost dimension first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMapSpec {
    /// Element type.
    pub dtype: DType,
    /// Address of the first element; a multiple of 16.
    pub address: u64,
    /// Number of dimensions in use: 4 or 5.
    pub rank: usize,
    /// Sizes; what lies beyond arrives as zeros and is not written.
    pub dims: [u64; 5],
    /// Bytes between neighbours of dimension `i + 1`; multiples of 16 below 2^40.
    pub strides: [u64; 4],
    /// Size of what one copy moves.
    pub tile: [u32; 5],
}

/// Elements of one row of a box: 128 bytes.
const BOX: u32 = 64;
/// Largest stride, exclusive, that the copy engine takes, in bytes.
pub(in crate::family) const STRIDE_LIMIT: u64 = 1 << 40;

/// Why TMA cannot address the tensors of a call, if it cannot: it needs addresses and strides in multiples of
/// 16 bytes, and strides above zero and below 2^40 bytes.
pub fn unaddressable(args: &ForwardArgs) -> Option<String> {
    why_unaddressable(&tensors_of(args))
}

/// The same for tensors of any call.
pub(in crate::family) fn why_unaddressable(tensors: &[Tensor]) -> Option<String> {
    first_unaddressable(tensors).map(|(tensor, what)| match what {
        Unaddressable::Start => format!("{tensor} starts at an address that is no multiple of 16 bytes"),
        Unaddressable::Stride { axis, stride } => {
            format!("the {axis} stride of {tensor} is {stride} elements: TMA takes positive multiples of 8 below 2^39")
        }
    })
}

/// Whether TMA can address the tensors of a call ([`unaddressable`] says why not).
pub fn is_addressable(args: &ForwardArgs) -> bool {
    first_unaddressable(&tensors_of(args)).is_none()
}

/// What TMA cannot address of a tensor.
enum Unaddressable {
    Start,
    Stride { axis: &'static str, stride: i64 },
}

/// Name, address, strides and sizes of a tensor: batch, head, row.
pub(in crate::family) type Tensor = (&'static str, u64, [i64; 3], [u64; 3]);

fn tensors_of(args: &ForwardArgs) -> [Tensor; 4] {
    let (batch, q_len, kv_len) = (args.batch as u64, args.q_len as u64, args.kv_len as u64);
    let (heads, kv_heads) = (args.heads as u64, args.kv_heads as u64);
    [
        ("Q", args.q, args.q_stride, [batch, heads, q_len]),
        ("K", args.k, args.k_stride, [batch, kv_heads, kv_len]),
        ("V", args.v, args.v_stride, [batch, kv_heads, kv_len]),
        ("O", args.o, args.o_stride, [batch, heads, q_len]),
    ]
}

fn first_unaddressable(tensors: &[Tensor]) -> Option<(&'static str, Unaddressable)> {
    for &(name, address, strides, dims) in tensors {
        if dims.contains(&0) {
            continue;
        }
        if !address.is_multiple_of(16) {
            return Some((name, Unaddressable::Start));
        }
        for ((stride, dim), axis) in strides.into_iter().zip(dims).zip(["batch", "head", "row"]) {
            if dim > 1 && (stride <= 0 || stride % 8 != 0 || stride as u64 * 2 >= STRIDE_LIMIT) {
                return Some((name, Unaddressable::Stride { axis, stride }));
            }
        }
    }
    None
}

impl Kernel {
    /// The maps of Q, K, V and O for one launch of `forward/sm90` or `forward/sm90_fp8`; none for other families.
    pub fn tensor_maps(&self, tiling: &Tiling, args: &ForwardArgs) -> Option<[TensorMapSpec; 4]> {
        let s = match &self.schedule {
            Schedule::Sm90(s) => s,
            Schedule::Sm90Fp8(s) => return Some(forward_sm90_fp8::maps(&self.problem, s, tiling, args)),
            _ => return None,
        };
        let p = &self.problem;
        let group = 1u64 << tiling.group_shift;
        // Rows of a tile count the heads of a group first, then the query positions.
        let rows = |address: u64, head_dim: u32, [batch, head, row]: [i64; 3]| {
            let dims = [head_dim as u64, group, args.q_len as u64, tiling.unit_heads as u64, args.batch as u64];
            let strides = [head, row, head * group as i64, batch];
            let tile = [BOX, group as u32, 64 / group as u32, 1, 1];
            spec(p.dtype, address, 5, dims, strides, tile)
        };
        let keys = |address: u64, head_dim: u32, [batch, head, row]: [i64; 3]| {
            let dims = [head_dim as u64, args.kv_len as u64, args.kv_heads as u64, args.batch as u64, 1];
            // With no keys nothing is ever loaded; something that exists keeps the encoder content.
            let (address, dims) = match args.kv_len {
                0 => (args.q, [head_dim as u64, 1, 1, 1, 1]),
                _ => (address, dims),
            };
            spec(p.dtype, address, 4, dims, [row, head, batch, 0], [BOX, s.block_kv, 1, 1, 1])
        };
        Some([
            rows(args.q, p.head_dim_qk, args.q_stride),
            keys(args.k, p.head_dim_qk, args.k_stride),
            keys(args.v, p.head_dim_v, args.v_stride),
            rows(args.o, p.head_dim_v, args.o_stride),
        ])
    }

    /// The maps of the biases that a kernel of `forward/sm90` has brought, `tensors` being those of its program; none
    /// for those that the copy engine cannot address, or that have one row for all queries or one column for all keys.
    pub fn bias_maps(&self, args: &ForwardArgs, tensors: &[SideTensorArg]) -> [Option<TensorMapSpec>; MAX_BIASES] {
        match self.schedule.biases(&self.problem) {
            [] => [None; MAX_BIASES],
            _ => bias_maps(&self.problem, args, tensors),
        }
    }
}

/// Whether a score program has biases that the copy engine cannot bring, `tensors` being those of a call.
pub fn has_loose_biases(problem: &Problem, args: &ForwardArgs, tensors: &[SideTensorArg]) -> bool {
    let biases = problem.program.map_or(0, |p| p.biases().len());
    biases > 0 && bias_maps(problem, args, tensors)[..biases].contains(&None)
}

fn bias_maps(problem: &Problem, args: &ForwardArgs, tensors: &[SideTensorArg]) -> [Option<TensorMapSpec>; MAX_BIASES] {
    let mut maps = [None; MAX_BIASES];
    let Some(program) = problem.program else { return maps };
    for (map, bias) in maps.iter_mut().zip(program.biases()) {
        let dtype = match program.declarations()[bias.tensor].storage {
            Storage::F16 => DType::F16,
            _ => DType::Bf16,
        };
        let tensor = tensors.get(slot(program.graph(), bias.tensor));
        *map = tensor.and_then(|t| bias_map(dtype, args, t, bias.leading.len()));
    }
    maps
}

/// Keys, queries, and up to two more axes, the last one first.
fn bias_map(dtype: DType, args: &ForwardArgs, t: &SideTensorArg, leading: usize) -> Option<TensorMapSpec> {
    let (mut dims, mut strides) = ([1; 5], [0; 4]);
    for (d, axis) in (0..leading + 2).rev().enumerate() {
        dims[d] = u64::try_from(t.length[axis]).ok()?;
        if d > 0 {
            strides[d - 1] = t.stride[axis];
        }
    }
    let whole = dims[0] == args.kv_len as u64 && dims[1] == args.q_len as u64 && !dims.contains(&0);
    let dense = dims[0] == 1 || t.stride[leading + 1] == 1;
    let legal = |(dim, stride): (&u64, &i64)| {
        *dim == 1 || (*stride > 0 && stride % 8 == 0 && (*stride as u64) < STRIDE_LIMIT / 2)
    };
    let addressable = t.data.is_multiple_of(16) && dims[1..].iter().zip(&strides).all(legal);
    (whole && dense && addressable).then(|| spec(dtype, t.data, 4, dims, strides, [BOX, 64, 1, 1, 1]))
}

/// Strides in elements to strides in bytes; those of dimensions with a single element mean nothing and become legal.
pub(in crate::family) fn spec(
    dtype: DType,
    address: u64,
    rank: usize,
    dims: [u64; 5],
    strides: [i64; 4],
    tile: [u32; 5],
) -> TensorMapSpec {
    let mut bytes = [0; 4];
    for (i, stride) in strides.into_iter().enumerate() {
        let stride = if dims[i + 1] > 1 { stride as u64 } else { dims[0].next_multiple_of(16) };
        bytes[i] = stride * dtype.bytes() as u64;
    }
    TensorMapSpec { dtype, address, rank, dims, strides: bytes, tile }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arch, Mask, MaskKind, Shape, Sm90Schedule};
    use bytemuck::Zeroable;

    fn args() -> ForwardArgs {
        // [batch 2, rows 100, heads 8, 96] and two KV heads of 300 rows.
        let strides = |heads: i64, rows: i64| [rows * heads * 96, 96, heads * 96];
        ForwardArgs {
            q: 0x1000,
            k: 0x2000,
            v: 0x3000,
            o: 0x4000,
            q_stride: strides(8, 100),
            k_stride: strides(2, 300),
            v_stride: strides(2, 300),
            o_stride: strides(8, 100),
            batch: 2,
            heads: 8,
            kv_heads: 2,
            q_len: 100,
            kv_len: 300,
            ..ForwardArgs::zeroed()
        }
    }

    fn maps(pack_group: bool, args: &ForwardArgs) -> [TensorMapSpec; 4] {
        let problem = Problem::forward(DType::Bf16, 96, MaskKind::CAUSAL).unwrap();
        let arch: Arch = "sm_90a".parse().unwrap();
        let shape = Shape { batch: 2, heads: 8, kv_heads: 2, q_len: 100, kv_len: 300, mask: Mask::Causal };
        let bucket = crate::ShapeBucket::of(&shape);
        let Arch::Sm(sm) = arch else { unreachable!() };
        let schedule = Sm90Schedule { pack_group, block_kv: 112, ..Sm90Schedule::default_for(&problem, sm, &bucket) };
        let kernel = Kernel { problem, schedule: Schedule::Sm90(schedule), arch };
        let tiling = kernel.plan(&shape).unwrap().tiling.unwrap();
        kernel.tensor_maps(&tiling, args).unwrap()
    }

    #[test]
    fn rows_of_a_packed_group_lie_beside_each_other() {
        let [q, k, _, o] = maps(true, &args());
        assert_eq!(q.dims, [96, 4, 100, 2, 2]);
        assert_eq!(q.strides, [192, 8 * 192, 4 * 192, 100 * 8 * 192]);
        assert_eq!(q.tile, [64, 4, 16, 1, 1]);
        assert_eq!((o.address, o.dims, o.strides), (0x4000, q.dims, q.strides));
        assert_eq!((k.rank, k.dims, k.tile), (4, [96, 300, 2, 2, 1], [64, 112, 1, 1, 1]));
        assert_eq!(k.strides[..3], [2 * 192, 192, 300 * 2 * 192]);
        let [q, ..] = maps(false, &args());
        assert_eq!((q.dims, q.tile), ([96, 1, 100, 8, 2], [64, 1, 64, 1, 1]));
    }

    #[test]
    fn biases_are_mapped_where_rows_are_whole_and_aligned() {
        let text =
            "t: f16[*, heads, q_len, kv_len]; u: bf16[q_len, kv_len]; score = score + t[b, h, q, kv] * u[q, kv];";
        let problem = Problem::forward(DType::Bf16, 96, MaskKind::FULL).unwrap();
        let problem = problem.with_program(crate::score::Program::parse(text).unwrap());
        let arch: Arch = "sm_90a".parse().unwrap();
        let Arch::Sm(sm) = arch else { unreachable!() };
        let bucket = crate::ShapeBucket { parallel: 16, group: 1, q_len: 4096, kv_len: 4096, ..Default::default() };
        let default = Sm90Schedule::default_for(&problem, sm, &bucket);
        assert!(default.bias_stages > 0, "{default}");
        let kernel = |s| Kernel { problem, schedule: Schedule::Sm90(s), arch };
        let args = ForwardArgs { kv_len: 304, ..args() };
        let t = SideTensorArg { data: 0x100, stride: [8 * 30400, 30400, 304, 1], length: [3, 8, 100, 304] };
        let u = SideTensorArg { data: 0x200, stride: [304, 1, 0, 0], length: [100, 304, 0, 0] };
        let maps = |tensors: [SideTensorArg; 2]| kernel(default).bias_maps(&args, &tensors);
        let [Some(of_t), Some(of_u)] = maps([t, u]) else { panic!() };
        assert_eq!((of_t.dtype, of_t.address, of_t.dims, of_t.rank), (DType::F16, 0x100, [304, 100, 8, 3, 1], 4));
        assert_eq!((of_t.strides[..3].to_vec(), of_t.tile), (vec![608, 60800, 8 * 60800], [64, 64, 1, 1, 1]));
        assert_eq!((of_u.dtype, of_u.dims), (DType::Bf16, [304, 100, 1, 1, 1]));
        // The same for all heads: an axis of length 1, whose stride means nothing.
        let shared = SideTensorArg { stride: [30400, 0, 304, 1], length: [3, 1, 100, 304], ..t };
        assert_eq!(maps([shared, u])[0].unwrap().dims, [304, 100, 1, 3, 1]);
        for odd in [
            SideTensorArg { data: 0x108, ..t },
            SideTensorArg { stride: [8 * 30400, 30400, 300, 1], ..t },
            SideTensorArg { stride: [8 * 30400, 30402, 304, 1], ..t },
            SideTensorArg { stride: [8 * 30400, 30400, 304, 2], ..t },
            SideTensorArg { stride: [304, 304, 0, 1], length: [3, 8, 1, 304], ..t },
            SideTensorArg { stride: [8, 1, 8, 0], length: [3, 8, 100, 1], ..t },
        ] {
            let [None, Some(_)] = maps([odd, u]) else { panic!("{odd:?}") };
            assert!(has_loose_biases(&problem, &args, &[odd, u]) && !has_loose_biases(&problem, &args, &[t, u]));
        }
        let none = kernel(Sm90Schedule { bias_stages: 0, ..default });
        assert_eq!(none.bias_maps(&args, &[t, u]), [None; 2]);
    }

    #[test]
    fn strides_of_single_elements_are_replaced_and_others_must_fit_the_engine() {
        let one = ForwardArgs { batch: 1, kv_len: 0, k: 1, k_stride: [0, 3, 5], ..args() };
        assert_eq!(unaddressable(&one), None);
        let [_, k, _, _] = maps(false, &one);
        assert_eq!((k.address, k.dims[1]), (one.q, 1));
        assert!(k.strides.iter().all(|s| s % 16 == 0));
        let says = |a: ForwardArgs| unaddressable(&a).unwrap();
        assert!(says(ForwardArgs { v: 8, ..args() }).contains('V'));
        assert!(says(ForwardArgs { k_stride: [0, 96, 192], ..args() }).contains("batch stride of K"));
        assert!(says(ForwardArgs { o_stride: [1 << 39, 96, 192], ..args() }).contains("2^39"));
        assert!(says(ForwardArgs { q_stride: [1 << 20, 96, 100], ..args() }).contains("row stride of Q"));
    }
}
