//! The one parameter of a kernel, by value: what every kernel takes, and behind it what a score program reads.

use flashtune_codegen::abi::{
    AppendArgs, ArgsLayout, BackwardArgs, BackwardMappedArgs, ForwardArgs, GradientArgs, MappedArgs, PadArgs,
    QuantiseArgs, RaggedArgs, RaggedMappedArgs, SideArgs, SideTensorArg,
};
use flashtune_codegen::score::{MAX_INPUTS, Program};
use std::mem::offset_of;
use std::ops::Range;

/// Bytes of the largest parameter. Every device takes 4096.
const LARGEST: usize = LARGEST_ARGS + MAX_INPUTS * (size_of::<SideTensorArg>() + size_of::<u64>());
/// Bytes of the largest struct.
const LARGEST_ARGS: usize = if size_of::<BackwardMappedArgs>() > size_of::<MappedArgs>() {
    size_of::<BackwardMappedArgs>()
} else {
    size_of::<MappedArgs>()
};
const _: () = assert!(
    LARGEST <= 4096
        && size_of::<RaggedArgs>() <= size_of::<MappedArgs>()
        && size_of::<AppendArgs>() <= size_of::<MappedArgs>()
        && size_of::<BackwardArgs>() <= size_of::<MappedArgs>()
        && size_of::<GradientArgs>() <= size_of::<MappedArgs>()
        && size_of::<GradientArgs>().is_multiple_of(8)
        && size_of::<AppendArgs>().is_multiple_of(8)
        && size_of::<PadArgs>() <= size_of::<MappedArgs>()
        && size_of::<PadArgs>().is_multiple_of(8)
        && size_of::<QuantiseArgs>() <= size_of::<MappedArgs>()
        && size_of::<QuantiseArgs>().is_multiple_of(8)
        && size_of::<RaggedMappedArgs>() <= size_of::<MappedArgs>()
        && size_of::<BackwardArgs>().is_multiple_of(8)
        && size_of::<BackwardMappedArgs>().is_multiple_of(8)
        && size_of::<ForwardArgs>().is_multiple_of(8)
        && size_of::<RaggedArgs>().is_multiple_of(8)
        && size_of::<MappedArgs>().is_multiple_of(8)
);

/// The tensors that a launch with a score program is given.
///
/// # Safety
/// `args.side` is the address of a [`SideArgs`] with as many tensors as the program declares, all of which live as long
/// as `args`.
pub(super) unsafe fn tensors<'a>(args: &'a ForwardArgs, program: &Program) -> &'a [SideTensorArg] {
    let count = program.declarations().iter().filter(|d| d.axes.is_some()).count();
    if count == 0 {
        return &[];
    }
    // SAFETY: by this function's contract.
    unsafe {
        let side = &*(args.side as usize as *const SideArgs);
        std::slice::from_raw_parts(side.tensors as usize as *const SideTensorArg, count)
    }
}

/// `WithSide` of `templates/lib/cuda/score/program.cuh`.
#[repr(C, align(64))]
pub(super) struct Parameter([u8; LARGEST]);

impl Parameter {
    /// The arguments, and the tables of a program's tensors and scalars.
    ///
    /// # Safety
    /// `side` holds the host addresses of as many tensors and scalars as the program declares.
    pub(super) unsafe fn new(base: Base<'_>, program: &Program, side: &SideArgs) -> Self {
        let tensors = program.declarations().iter().filter(|d| d.axes.is_some()).count();
        let scalars = program.declarations().len() - tensors;
        let mut parameter = Parameter([0; LARGEST]);
        let mut at = base.len();
        // SAFETY: the tables are readable by the caller's word, and all fits: programs have at most `MAX_INPUTS` of
        // each. Kernels have room for one where a program reads none.
        unsafe {
            let mut append = |from: *const u8, at: usize, bytes: usize| {
                std::ptr::copy_nonoverlapping(from, parameter.0[at..at + bytes].as_mut_ptr(), bytes);
            };
            append(base.address().cast(), 0, at);
            append(side.tensors as usize as *const u8, at, tensors * size_of::<SideTensorArg>());
            at += tensors.max(1) * size_of::<SideTensorArg>();
            append(side.scalars as usize as *const u8, at, scalars * size_of::<u64>());
        }
        parameter
    }
}

/// What every kernel takes, as this build has it.
#[derive(Clone, Copy)]
pub(super) enum Base<'a> {
    Forward(&'a ForwardArgs),
    Mapped(&'a MappedArgs),
    Ragged(&'a RaggedArgs),
    Append(&'a AppendArgs),
    Pad(&'a PadArgs),
    Quantise(&'a QuantiseArgs),
    RaggedMapped(&'a RaggedMappedArgs),
    Backward(&'a BackwardArgs),
    BackwardMapped(&'a BackwardMappedArgs),
    Gradient(&'a GradientArgs),
}

impl Base<'_> {
    /// Where it lies.
    pub(super) fn address(&self) -> *const std::ffi::c_void {
        match self {
            Base::Forward(args) => std::ptr::from_ref(*args).cast(),
            Base::Mapped(args) => std::ptr::from_ref(*args).cast(),
            Base::Ragged(args) => std::ptr::from_ref(*args).cast(),
            Base::Append(args) => std::ptr::from_ref(*args).cast(),
            Base::Pad(args) => std::ptr::from_ref(*args).cast(),
            Base::Quantise(args) => std::ptr::from_ref(*args).cast(),
            Base::RaggedMapped(args) => std::ptr::from_ref(*args).cast(),
            Base::Backward(args) => std::ptr::from_ref(*args).cast(),
            Base::BackwardMapped(args) => std::ptr::from_ref(*args).cast(),
            Base::Gradient(args) => std::ptr::from_ref(*args).cast(),
        }
    }

    /// Its bytes.
    const fn len(&self) -> usize {
        match self {
            Base::Forward(_) => size_of::<ForwardArgs>(),
            Base::Mapped(_) => size_of::<MappedArgs>(),
            Base::Ragged(_) => size_of::<RaggedArgs>(),
            Base::Append(_) => size_of::<AppendArgs>(),
            Base::Pad(_) => size_of::<PadArgs>(),
            Base::Quantise(_) => size_of::<QuantiseArgs>(),
            Base::RaggedMapped(_) => size_of::<RaggedMappedArgs>(),
            Base::Backward(_) => size_of::<BackwardArgs>(),
            Base::BackwardMapped(_) => size_of::<BackwardMappedArgs>(),
            Base::Gradient(_) => size_of::<GradientArgs>(),
        }
    }

    /// The bytes of the segments of [`ArgsLayout`]: head, forward, tail.
    fn segments(&self) -> [&[u8]; 3] {
        match self {
            Base::Forward(args) => [&[], bytemuck::bytes_of(*args), &[]],
            Base::Ragged(args) => [&[], bytemuck::bytes_of(*args), &[]],
            Base::Append(args) => [&[], bytemuck::bytes_of(*args), &[]],
            Base::Pad(args) => [&[], bytemuck::bytes_of(*args), &[]],
            Base::Quantise(args) => [&[], bytemuck::bytes_of(*args), &[]],
            Base::Backward(args) => [&[], bytemuck::bytes_of(*args), &[]],
            Base::Gradient(args) => {
                let (backward, rest) = bytemuck::bytes_of(*args).split_at(size_of::<BackwardArgs>());
                [&[], backward, rest]
            }
            Base::Mapped(args) => {
                let forward = offset_of!(MappedArgs, forward);
                let (tiling, end) = (offset_of!(MappedArgs, tiling), offset_of!(MappedArgs, masks) + size_of::<u64>());
                let bytes = std::ptr::from_ref(*args).cast::<u8>();
                // SAFETY: both ranges are inside of the struct and without padding: it lies behind `masks` alone.
                let of =
                    |range: Range<usize>| unsafe { std::slice::from_raw_parts(bytes.add(range.start), range.len()) };
                [of(0..forward), bytemuck::bytes_of(&args.forward), of(tiling..end)]
            }
            Base::RaggedMapped(args) => {
                let forward = offset_of!(RaggedMappedArgs, forward);
                let tiling = offset_of!(RaggedMappedArgs, tiling);
                let end = offset_of!(RaggedMappedArgs, box_keys) + size_of::<i32>();
                let bytes = std::ptr::from_ref(*args).cast::<u8>();
                // SAFETY: as above; padding lies behind `box_keys` alone.
                let of =
                    |range: Range<usize>| unsafe { std::slice::from_raw_parts(bytes.add(range.start), range.len()) };
                [of(0..forward), bytemuck::bytes_of(&args.forward), of(tiling..end)]
            }
            Base::BackwardMapped(args) => {
                let backward = offset_of!(BackwardMappedArgs, backward);
                let wave = offset_of!(BackwardMappedArgs, first_pair);
                let end = offset_of!(BackwardMappedArgs, walks) + size_of::<i64>();
                let bytes = std::ptr::from_ref(*args).cast::<u8>();
                // SAFETY: as above; padding lies behind `walks` alone.
                let of =
                    |range: Range<usize>| unsafe { std::slice::from_raw_parts(bytes.add(range.start), range.len()) };
                [of(0..backward), bytemuck::bytes_of(&args.backward), of(wave..end)]
            }
        }
    }
}

impl Parameter {
    /// The same for a kernel of an earlier build, whose segments are shorter.
    ///
    /// # Safety
    /// As [`Parameter::new`]; no segment of the layout is longer than this build's ([`ArgsLayout::check`]).
    pub(super) unsafe fn packed(layout: &ArgsLayout, base: Base<'_>, side: Option<(&Program, &SideArgs)>) -> Self {
        let mut parameter = Parameter([0; LARGEST]);
        let mut at = 0;
        for (bytes, length) in base.segments().into_iter().zip([layout.head, layout.forward, layout.tail]) {
            let length = length as usize;
            parameter.0[at..at + length].copy_from_slice(&bytes[..length]);
            at += length;
        }
        let Some((program, side)) = side else { return parameter };
        at = layout.base();
        let count = program.declarations().iter().filter(|d| d.axes.is_some()).count();
        let scalars = program.declarations().len() - count;
        // SAFETY: the tables are readable by the caller's word.
        let (tensors, scalars) = unsafe {
            let table = |from: u64, count: usize| match count {
                0 => &[][..],
                _ => std::slice::from_raw_parts(from as usize as *const u8, count),
            };
            (table(side.tensors, count * size_of::<SideTensorArg>()), table(side.scalars, scalars * size_of::<u64>()))
        };
        let length = layout.side_tensor as usize;
        for (i, tensor) in tensors.chunks_exact(size_of::<SideTensorArg>()).enumerate() {
            parameter.0[at + i * length..][..length].copy_from_slice(&tensor[..length]);
        }
        at += count.max(1) * length;
        parameter.0[at..at + scalars.len()].copy_from_slice(scalars);
        parameter
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;
    use flashtune_codegen::abi::{TensorMap, Tiling};
    use flashtune_codegen::{DType, Family, Kernel, Mask, MaskKind, Problem, Schedule, Shape, ShapeBucket};

    /// An argument as it was before a field was appended to each of its structs.
    #[repr(C, align(64))]
    #[derive(Clone, Copy)]
    struct Earlier {
        maps: [TensorMap; 4],
        forward: [u64; 22],
        tiling: [i32; 6],
        queue: i32,
        biases_mapped: u32,
        found: u64,
        tensors: [[u64; 6]; 2],
        scalar: u64,
    }

    #[test]
    fn a_kernel_of_an_earlier_build_gets_the_fields_that_it_knows() {
        let program =
            Program::parse("a: f32[heads]; c: f32[heads]; n: int; mask = kv < n; score = score + a[h] * c[h];")
                .unwrap();
        let tensor = |data| SideTensorArg { data, stride: [data as i64, 2, 3, 4], length: [8, 7, 6, 5] };
        let (tensors, scalar) = ([tensor(0x1234), tensor(0x5678)], 77u64);
        let side = SideArgs { tensors: tensors.as_ptr() as u64, scalars: (&raw const scalar) as u64 };
        let map = |n: u64| TensorMap(std::array::from_fn(|i| 100 * n + i as u64));
        let mut forward = ForwardArgs { q: 5, scale: 0.5, window_right: 9, side: 13, ..ForwardArgs::zeroed() };
        forward.o_stride = [1, 2, 3];
        let tiling = Tiling { group_shift: 1, unit_heads: 2, blocks: 3, leading: 4, section: 5, tiles: 6 };
        let (maps, biases) = ([0, 1, 2, 3].map(map), [map(8); 2]);
        let now = MappedArgs { maps, biases, forward, tiling, queue: 7, biases_mapped: 8, found: 9, masks: 10 };
        let layout = ArgsLayout { head: 512, forward: 176, tail: 40, side_tensor: 48 };
        let bytes = bytemuck::bytes_of(&forward);
        let words =
            |bytes: &[u8]| bytes.chunks_exact(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap())).collect::<Vec<_>>();
        let table = tensors.map(|t| words(&bytemuck::bytes_of(&t)[..48]).try_into().unwrap());
        let expected = Earlier {
            maps,
            forward: words(&bytes[..176]).try_into().unwrap(),
            tiling: [1, 2, 3, 4, 5, 6],
            queue: 7,
            biases_mapped: 8,
            found: 9,
            tensors: table,
            scalar,
        };
        // What was before ended at `found`, padded to the alignment of its maps.
        assert_eq!((layout.base(), offset_of!(Earlier, found) + 8), (768, 728));
        // SAFETY: two tensors and a scalar, which live on; all segments are shorter than now.
        let Parameter(packed) = unsafe { Parameter::packed(&layout, Base::Mapped(&now), Some((&program, &side))) };
        // SAFETY: it has no padding before its tables.
        let by_hand = unsafe { std::slice::from_raw_parts((&raw const expected).cast::<u8>(), 728) };
        assert_eq!(packed[..728], *by_hand);
        assert_eq!(words(&packed[768..864]), expected.tensors.concat());
        assert_eq!(words(&packed[864..872]), [expected.scalar]);
        assert!(packed[728..768].iter().chain(&packed[872..]).all(|b| *b == 0));
    }

    #[test]
    fn packing_for_the_whole_layout_changes_nothing() {
        let kernel = |family, arch: &str| {
            let arch = arch.parse().unwrap();
            let problem = Problem::forward(DType::F16, 64, MaskKind::FULL).unwrap();
            let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 512, kv_len: 512, mask: Mask::Full };
            let schedule = Schedule::default_for(family, &problem, arch, &ShapeBucket::of(&shape)).unwrap();
            Kernel { problem, schedule, arch }
        };
        let (sm80, sm90) = (kernel(Family::ForwardSm80, "sm_80"), kernel(Family::ForwardSm90, "sm_90a"));
        let program = Program::parse("n: int; mask = kv < n;").unwrap();
        let scalar = 77u64;
        let side = SideArgs { tensors: 0, scalars: (&raw const scalar) as u64 };
        let args = ForwardArgs { q: 5, k: 6, side: 1, ..ForwardArgs::zeroed() };
        // Only a kernel whose O is e4m3 takes all of the arguments.
        let whole = Kernel { problem: sm80.problem.with_output(DType::E4m3), ..sm80 };
        // SAFETY: one scalar, which lives on.
        unsafe {
            let own = Parameter::packed(&ArgsLayout::of(&whole), Base::Forward(&args), Some((&program, &side)));
            assert_eq!(own.0, Parameter::new(Base::Forward(&args), &program, &side).0);
        }
        for (kernel, longer) in [
            (sm80, ArgsLayout { forward: size_of::<ForwardArgs>() as u32 + 8, ..ArgsLayout::of(&sm80) }),
            (sm80, ArgsLayout { tail: 8, ..ArgsLayout::of(&sm80) }),
            (sm90, ArgsLayout { head: 896, ..ArgsLayout::of(&sm90) }),
            (sm90, ArgsLayout { side_tensor: 60, ..ArgsLayout::of(&sm90) }),
        ] {
            assert!(ArgsLayout::of(&kernel).check(&kernel).is_ok());
            let e = longer.check(&kernel).unwrap_err().to_string();
            assert!(e.contains("args.") && e.contains("at most"), "{e}");
        }
    }

    #[test]
    fn tables_follow_the_arguments() {
        let program = Program::parse("a: f32[heads]; n: int; mask = kv < n; score = score + a[h];").unwrap();
        let tensor = SideTensorArg { data: 0x1234, stride: [1, 0, 0, 0], length: [8, 0, 0, 0] };
        let scalar = 77u64;
        let side = SideArgs { tensors: (&raw const tensor) as u64, scalars: (&raw const scalar) as u64 };
        let args = ForwardArgs { q: 5, ..ForwardArgs::zeroed() };
        // SAFETY: one tensor and one scalar, which live on.
        let Parameter(bytes) = unsafe { Parameter::new(Base::Forward(&args), &program, &side) };
        let n = size_of::<ForwardArgs>();
        assert_eq!(bytes[..n], *bytemuck::bytes_of(&args));
        assert_eq!(bytes[n..n + 56], *bytemuck::bytes_of(&tensor));
        assert_eq!(bytes[n + 56..n + 64], 77u64.to_ne_bytes());
        let none = Program::parse("mask = kv < 3;").unwrap();
        let side = SideArgs { tensors: 0, scalars: 0 };
        // SAFETY: no tensor and no scalar.
        let Parameter(bytes) = unsafe { Parameter::new(Base::Forward(&args), &none, &side) };
        assert!(bytes[n..].iter().all(|b| *b == 0));
    }
}
