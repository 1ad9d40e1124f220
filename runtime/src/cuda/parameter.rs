//! The one parameter of a kernel, by value: what every kernel takes, and behind it what a score program reads.

use flashtune_codegen::abi::{ForwardArgs, SideArgs, SideTensorArg, Sm90Args};
use flashtune_codegen::score::{MAX_INPUTS, Program};

/// Bytes of the largest parameter. Every device takes 4096.
const LARGEST: usize = size_of::<Sm90Args>() + MAX_INPUTS * (size_of::<SideTensorArg>() + size_of::<u64>());
const _: () =
    assert!(LARGEST <= 4096 && size_of::<ForwardArgs>().is_multiple_of(8) && size_of::<Sm90Args>().is_multiple_of(8));

/// The tensors that a launch with a score program is given.
///
/// # Safety
/// `args.side` is the address of a [`SideArgs`] with as many tensors as the program declares, all of which live as long as `args`.
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
    pub(super) unsafe fn new<Base: Copy>(base: &Base, program: &Program, side: &SideArgs) -> Self {
        let tensors = program.declarations().iter().filter(|d| d.axes.is_some()).count();
        let scalars = program.declarations().len() - tensors;
        let mut parameter = Parameter([0; LARGEST]);
        let mut at = size_of::<Base>();
        // SAFETY: the tables are readable by the caller's word, and all fits: programs have at most `MAX_INPUTS` of each.
        // Kernels have room for one where a program reads none.
        unsafe {
            let mut append = |from: *const u8, at: usize, bytes: usize| {
                std::ptr::copy_nonoverlapping(from, parameter.0[at..at + bytes].as_mut_ptr(), bytes);
            };
            append(std::ptr::from_ref(base).cast(), 0, at);
            append(side.tensors as usize as *const u8, at, tensors * size_of::<SideTensorArg>());
            at += tensors.max(1) * size_of::<SideTensorArg>();
            append(side.scalars as usize as *const u8, at, scalars * size_of::<u64>());
        }
        parameter
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    #[test]
    fn tables_follow_the_arguments() {
        let program = Program::parse("a: f32[heads]; n: int; mask = kv < n; score = score + a[h];").unwrap();
        let tensor = SideTensorArg { data: 0x1234, stride: [1, 0, 0, 0], length: [8, 0, 0, 0] };
        let scalar = 77u64;
        let side = SideArgs { tensors: (&raw const tensor) as u64, scalars: (&raw const scalar) as u64 };
        let args = ForwardArgs { q: 5, ..ForwardArgs::zeroed() };
        // SAFETY: one tensor and one scalar, which live on.
        let Parameter(bytes) = unsafe { Parameter::new(&args, &program, &side) };
        let n = size_of::<ForwardArgs>();
        assert_eq!(bytes[..n], *bytemuck::bytes_of(&args));
        assert_eq!(bytes[n..n + 56], *bytemuck::bytes_of(&tensor));
        assert_eq!(bytes[n + 56..n + 64], 77u64.to_ne_bytes());
        let none = Program::parse("mask = kv < 3;").unwrap();
        let side = SideArgs { tensors: 0, scalars: 0 };
        // SAFETY: no tensor and no scalar.
        let Parameter(bytes) = unsafe { Parameter::new(&args, &none, &side) };
        assert!(bytes[n..].iter().all(|b| *b == 0));
    }
}
