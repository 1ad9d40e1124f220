//! The gradient of what a score program reads, and its way into kernel arguments.

use crate::{BackwardCall, Result, SideView};
use flashtune_codegen::abi::GradientArgs;
use flashtune_codegen::score::{MAX_RANK, ProgramRef, Storage, Type};
use flashtune_codegen::{CallSizes, Error, Kernel, LaunchPlan, Problem, Shape, Summation};

/// What one gradient comes down to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradientCall {
    /// What the kernel must be specialised to.
    pub problem: Problem,
    /// The sizes.
    pub shape: Shape,
    /// The kernel's arguments.
    pub args: GradientArgs,
    /// How it is summed.
    pub summation: Summation,
}

impl GradientCall {
    /// The stages of a launch of a kernel for this, with memory for its partial sums: 4 bytes for each element, or up
    /// to 64 MiB where few groups of places are split.
    ///
    /// # Errors
    /// Sizes that exceed what one launch can hold.
    pub fn plan(&self, kernel: &Kernel) -> Result<LaunchPlan> {
        Ok(kernel.plan(&self.shape)?.with_partial_sums(self.summation.scratch_bytes()))
    }

    /// The sizes that a kernel is chosen by.
    pub fn sizes(&self) -> CallSizes {
        CallSizes::from(&self.shape)
    }
}

/// Finds what a gradient is by, checks its memory, and builds the arguments. `call` is the backward pass without the
/// program; `read` is the tensor as the program reads it, `None` for a scalar. What a program reads is named by
/// `args.backward.side`, which is for who launches to set.
///
/// # Errors
/// [`crate::Error::Codegen`] for a name that the program does not read or whose elements are no floats, a gradient of
/// another shape than the tensor's, or one whose elements overlap.
pub fn gradient_call(
    call: &BackwardCall,
    program: ProgramRef,
    name: &str,
    read: Option<&SideView>,
    out: &SideView,
) -> Result<GradientCall> {
    // A mask that is a window is no part of the program any more, and what it alone reads is not either.
    let windowed = call.with_program(program);
    let whole = || Problem { program: Some(program), ..call.problem }.gradient_by(name).map(|p| (p, *call));
    match windowed.problem.gradient_by(name).map(|p| (p, windowed)).or_else(whole) {
        Some((problem, call)) => gradient_of(&call, problem, read, out),
        None => Err(Error::unsupported(
            "gradient",
            format!("`{name}`"),
            "of tensors and scalars that the score program reads",
            "name one of these, or leave it out: the gradient of what is not read is zero",
        )
        .into()),
    }
}

/// [`gradient_call`] for a problem of a gradient.
///
/// # Errors
/// As [`gradient_call`], and a problem of another operation.
pub fn gradient_of(
    call: &BackwardCall,
    problem: Problem,
    read: Option<&SideView>,
    out: &SideView,
) -> Result<GradientCall> {
    let refuse = |value: String, limit: &str, remedy: &str| Err(Error::unsupported("gradient", value, limit, remedy));
    let Some(declaration) = problem.derives_by() else {
        return Ok(refuse(problem.to_string(), "a problem of a gradient", "use `Problem::gradient_by`")?);
    };
    let name = &declaration.name;
    if declaration.storage.ty() != Type::Float {
        let value = format!("`{name}`, of {}", declaration.storage.name());
        return Ok(refuse(value, "of float tensors and float scalars", "leave ints and bools out")?);
    }
    let Some(out_type) = [Storage::F32, Storage::F16, Storage::Bf16].iter().position(|s| *s == out.storage) else {
        let value = format!("`{name}`, to be written as {}", out.storage.name());
        return Ok(refuse(value, "written as f32, f16 or bf16", "give it memory of one of these")?);
    };
    let scalar = SideView::contiguous(0, Storage::F32, &[]);
    let read = read.unwrap_or(&scalar);
    let axes = |of: &SideView| of.shape[..of.rank.min(MAX_RANK)].to_vec();
    if read.rank != out.rank || axes(read) != axes(out) || out.rank > MAX_RANK {
        let limit = format!("of the tensor's own shape, {:?}", axes(read));
        return Ok(refuse(format!("`{name}` of shape {:?}", axes(out)), &limit, "give it memory of that shape")?);
    }
    check_memory(name, out)?;
    let lengths: Vec<u32> = out.shape[..out.rank].iter().map(|n| u32::try_from(*n).unwrap_or(u32::MAX)).collect();
    let summation = Summation::of(&problem, &call.shape, &lengths)?;
    let (mut length, mut out_stride, mut contiguous) = ([1; 4], [0; 4], [0; 4]);
    let mut stride = 1i64;
    for axis in (0..lengths.len()).rev() {
        (length[axis], out_stride[axis], contiguous[axis]) = (lengths[axis] as i32, out.strides[axis], stride);
        stride *= i64::from(lengths[axis]);
    }
    let args = GradientArgs {
        backward: flashtune_codegen::abi::BackwardArgs { dq: 0, dk: 0, dv: 0, ..call.args },
        out: out.address,
        out_stride,
        place_stride: if summation.direct { out_stride } else { contiguous },
        elements: summation.elements as i64,
        splits: summation.splits.into(),
        length,
        out_type: out_type as i32,
        keeps: summation.keeps,
        direct: summation.direct.into(),
        step: 0,
    };
    Ok(GradientCall { problem, shape: call.shape, args, summation })
}

/// Refuses memory that does not hold every element apart.
fn check_memory(name: &str, out: &SideView) -> Result<()> {
    let axes = || out.shape[..out.rank].iter().zip(&out.strides);
    let size = out.storage.bytes() as u64;
    if axes().any(|(n, _)| *n == 0) {
        return Ok(());
    }
    // In the order of their strides, each axis steps over all of those before it.
    let mut sorted: Vec<(i64, u64)> = axes().filter(|(n, _)| **n > 1).map(|(n, stride)| (*stride, *n)).collect();
    sorted.sort_unstable();
    let mut extent = 1i128;
    for (stride, n) in sorted {
        if i128::from(stride) < extent {
            let value = format!("`{name}` of shape {:?} by {:?}", &out.shape[..out.rank], &out.strides[..out.rank]);
            let remedy = "make it contiguous";
            return Err(Error::unsupported("gradient", value, "memory in which no elements overlap", remedy).into());
        }
        extent += i128::from(stride) * i128::from(n - 1);
    }
    if out.address == 0 || !out.address.is_multiple_of(size) || extent * i128::from(size) > i64::MAX.into() {
        let limit = format!("at the address of its first element, a multiple of {size}, within 64-bit addresses");
        let value = format!("`{name}` at {:#x}", out.address);
        return Err(Error::unsupported("gradient", value, limit, "check address, shape and strides").into());
    }
    Ok(())
}
