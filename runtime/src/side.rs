//! The scalars and tensors of a score program: as a host hands them over, and as a kernel reads them.

use crate::{Buffer, Device, Result};
use bytemuck::{Zeroable, cast_slice};
use flashtune_codegen::Shape;
use flashtune_codegen::abi::{SideArgs, SideTensorArg};
use flashtune_codegen::score::{
    Axis, Declaration, Elements, MAX_INPUTS, MAX_RANK, Program, ProgramError, Scalar, SideData, Storage, Type,
    check_float, check_shape,
};
use half::{bf16, f16};

/// A side tensor on a device: where it is and how it is laid out. Owns nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SideView {
    /// Device address of the first element.
    pub address: u64,
    /// How the elements lie in memory.
    pub storage: Storage,
    /// Number of axes, at most [`MAX_RANK`].
    pub rank: usize,
    /// Length of each axis.
    pub shape: [u64; MAX_RANK],
    /// Distance in elements between neighbours along each axis.
    pub strides: [i64; MAX_RANK],
}

impl SideView {
    /// A contiguous tensor; of axes beyond [`MAX_RANK`] only the number is kept, which no program declares.
    pub fn contiguous(address: u64, storage: Storage, shape: &[u64]) -> Self {
        let mut view = Self { address, storage, rank: shape.len(), shape: [1; MAX_RANK], strides: [0; MAX_RANK] };
        let mut stride = 1i64;
        for (i, &n) in shape.iter().enumerate().take(MAX_RANK).rev() {
            (view.shape[i], view.strides[i]) = (n, stride);
            stride = stride.saturating_mul(i64::try_from(n).unwrap_or(i64::MAX));
        }
        view
    }

    /// What this says of a tensor of a name in a program: its storage and number of axes, of any length.
    pub fn declaration(&self, name: &str) -> Declaration {
        Declaration::tensor(name, self.storage, &vec![Axis::Any; self.rank])
    }
}

/// What one call brings for its score program, by name. What the program does not read is left alone.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SideInputs<'a> {
    /// Scalars.
    pub scalars: &'a [(&'a str, Scalar)],
    /// Tensors, in memory of the device.
    pub tensors: &'a [(&'a str, SideView)],
}

impl SideInputs<'_> {
    /// The scalar of a name.
    pub fn scalar(&self, name: &str) -> Option<Scalar> {
        find(&[*self], |i| i.scalars, name)
    }
}

/// The tables of one launch: the program's tensors and scalars in the order of its declarations. They are copied into
/// the launch, so the table need not outlive it; the tensors must.
#[derive(Debug, Clone)]
pub struct SideTable {
    tensors: [SideTensorArg; MAX_INPUTS],
    scalars: [u64; MAX_INPUTS],
}

impl SideTable {
    /// Checks what a call brings against what the program declares. Elements on a device are not looked at: that they
    /// keep the declared promises (`in`, `nondecreasing`) is the caller's word. Allocates nothing.
    ///
    /// # Errors
    /// The first scalar or tensor that is missing or does not fit, by name.
    pub fn new(program: &Program, sizes: &Shape, inputs: &SideInputs<'_>) -> Result<Self, ProgramError> {
        Self::of_all(program, sizes, &[*inputs])
    }

    /// The same of several sources, the first that has a name being the one that counts.
    ///
    /// # Errors
    /// As [`SideTable::new`].
    pub fn of_all(program: &Program, sizes: &Shape, inputs: &[SideInputs<'_>]) -> Result<Self, ProgramError> {
        let mut table = Self { tensors: [SideTensorArg::zeroed(); MAX_INPUTS], scalars: [0; MAX_INPUTS] };
        let (mut tensors, mut scalars) = (0, 0);
        for d in program.declarations() {
            match &d.axes {
                None => {
                    table.scalars[scalars] =
                        scalar(d, find(inputs, |i| i.scalars, &d.name).ok_or_else(|| missing(d))?)?;
                    scalars += 1;
                }
                Some(axes) => {
                    let view = find(inputs, |i| i.tensors, &d.name).ok_or_else(|| missing(d))?;
                    table.tensors[tensors] = tensor(d, axes, &view, sizes)?;
                    tensors += 1;
                }
            }
        }
        Ok(table)
    }

    /// The tensors, in the order of the program's declarations; what follows them means nothing.
    pub fn tensors(&self) -> &[SideTensorArg] {
        &self.tensors
    }

    /// Where a launch finds the tables; good for as long as this lives and does not move.
    pub fn args(&self) -> SideArgs {
        SideArgs { tensors: self.tensors.as_ptr() as u64, scalars: self.scalars.as_ptr() as u64 }
    }
}

fn find<'a, T: Copy + 'a>(
    sources: &[SideInputs<'a>],
    of: impl Fn(&SideInputs<'a>) -> &'a [(&'a str, T)],
    name: &str,
) -> Option<T> {
    sources.iter().flat_map(of).find(|(n, _)| *n == name).map(|(_, x)| *x)
}

fn missing(d: &Declaration) -> ProgramError {
    let what = if d.axes.is_some() { "tensor" } else { "scalar" };
    ProgramError::new(
        format!("the {what} `{}` is missing", d.name),
        format!("the program declares `{d}`; give it a value"),
    )
}

/// The eight bytes of a scalar. A whole number serves where a float is declared.
fn scalar(d: &Declaration, value: Scalar) -> Result<u64, ProgramError> {
    match (value, d.storage.ty()) {
        (Scalar::Int(x), Type::Int) => {
            let range = d.int_range();
            if (range.lo..=range.hi).contains(&x) {
                return Ok(x as u64);
            }
            let expected = format!("the program relies on values from {} to {} (`{d}`)", range.lo, range.hi);
            Err(ProgramError::new(format!("the scalar `{}` is {x}", d.name), expected))
        }
        (Scalar::Float(x), Type::Float) => check_float(d, x).map(|()| x.to_bits().into()),
        (Scalar::Int(x), Type::Float) => check_float(d, x as f32).map(|()| (x as f32).to_bits().into()),
        (found, wanted) => Err(ProgramError::new(
            format!("the scalar `{}` is {found:?}", d.name),
            format!("the program declares it as {wanted}"),
        )),
    }
}

fn tensor(d: &Declaration, axes: &[Axis], view: &SideView, sizes: &Shape) -> Result<SideTensorArg, ProgramError> {
    let refuse = |message: String, expected: &str| Err(ProgramError::new(message, expected));
    let name = &d.name;
    if view.storage != d.storage {
        let message = format!("the tensor `{name}` is of {}", view.storage.name());
        return refuse(message, &format!("the program declares `{d}`; convert it, or declare it so"));
    }
    if view.rank != axes.len() || view.rank > MAX_RANK {
        let message = format!("the tensor `{name}` has {} axes", view.rank);
        return refuse(message, &format!("the program declares {} (`{d}`)", axes.len()));
    }
    let mut arg = SideTensorArg { data: view.address, stride: [0; 4], length: [0; 4] };
    let mut shape = [0; MAX_RANK];
    for (i, kept) in shape.iter_mut().enumerate().take(view.rank) {
        let Ok(length) = i32::try_from(view.shape[i]) else {
            return refuse(format!("axis {i} of the tensor `{name}` has length {}", view.shape[i]), "it is below 2^31");
        };
        (arg.length[i], *kept) = (length, length as usize);
        if length > 1 {
            arg.stride[i] = view.strides[i];
            if view.strides[i] < 0 {
                let message = format!("the stride of axis {i} of the tensor `{name}` is {}", view.strides[i]);
                return refuse(message, "strides are not negative; make it contiguous");
            }
        }
    }
    check_shape(d, axes, &shape[..view.rank], sizes)?;
    let size = d.storage.bytes() as u64;
    let empty = shape[..view.rank].contains(&0);
    if !empty && (view.address == 0 || !view.address.is_multiple_of(size)) {
        let expected = format!("it is the device address of its first element, a multiple of {size}");
        return refuse(format!("the address of the tensor `{name}` is {:#x}", view.address), &expected);
    }
    let axes = arg.length.iter().zip(&arg.stride).take(view.rank);
    let last = axes.map(|(&n, &stride)| i128::from(n - 1) * i128::from(stride)).sum::<i128>();
    // Kernels compute addresses in 64 bits.
    if !empty && (last + 1) * i128::from(size) > i128::from(u64::MAX - view.address).min(i64::MAX.into()) {
        let layout = format!("{:?} by {:?}", &view.shape[..view.rank], &view.strides[..view.rank]);
        let expected = "it ends within 64-bit addresses; check shape and strides";
        return refuse(format!("the extent of the tensor `{name}` is {layout}"), expected);
    }
    Ok(arg)
}

/// Side data of the host in device memory.
pub struct SideBuffers {
    views: Vec<(String, SideView)>,
    scalars: Vec<(String, Scalar)>,
    _buffers: Vec<Box<dyn Buffer>>,
    /// The tables and where they are: neither moves.
    table: Box<(SideTable, SideArgs)>,
}

impl SideBuffers {
    /// Checks the data against what the program declares, values included, and uploads it.
    ///
    /// # Errors
    /// Data that does not fit, by name, or a device without room.
    pub fn new(device: &dyn Device, program: &Program, sizes: &Shape, data: &SideData) -> Result<Self> {
        data.check(program, sizes).map_err(flashtune_codegen::Error::from)?;
        let (mut views, mut scalars, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
        for d in program.declarations() {
            if let Some(scalar) = data.scalars.get(&d.name) {
                scalars.push((d.name.clone(), *scalar));
            }
            let Some(tensor) = data.tensors.get(&d.name).filter(|_| d.axes.is_some()) else { continue };
            let bytes = encode(&tensor.elements, d.storage);
            let buffer = device.alloc(bytes.len().max(8))?;
            device.upload(&*buffer, &bytes)?;
            let shape: Vec<u64> = tensor.shape.iter().map(|n| *n as u64).collect();
            views.push((d.name.clone(), SideView::contiguous(buffer.address(), d.storage, &shape)));
            buffers.push(buffer);
        }
        let table = with(&views, &scalars, |inputs| SideTable::new(program, sizes, inputs));
        let mut table = Box::new((table.map_err(flashtune_codegen::Error::from)?, SideArgs::zeroed()));
        table.1 = table.0.args();
        Ok(Self { views, scalars, _buffers: buffers, table })
    }

    /// What [`flashtune_codegen::abi::ForwardArgs::side`] is for the program and sizes that this was made for; good for
    /// as long as this lives.
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(&self.table.1) as u64
    }

    /// Calls with what a launch takes.
    pub fn with<T>(&self, f: impl FnOnce(&SideInputs<'_>) -> T) -> T {
        with(&self.views, &self.scalars, f)
    }
}

fn with<T>(views: &[(String, SideView)], scalars: &[(String, Scalar)], f: impl FnOnce(&SideInputs<'_>) -> T) -> T {
    let scalars: Vec<(&str, Scalar)> = scalars.iter().map(|(n, x)| (n.as_str(), *x)).collect();
    let tensors: Vec<(&str, SideView)> = views.iter().map(|(n, x)| (n.as_str(), *x)).collect();
    f(&SideInputs { scalars: &scalars, tensors: &tensors })
}

/// Elements as they lie in memory.
fn encode(elements: &Elements, storage: Storage) -> Vec<u8> {
    match (elements, storage) {
        (Elements::Bool(x), _) => x.iter().map(|x| u8::from(*x)).collect(),
        (Elements::Int(x), Storage::I64) => cast_slice(x).to_vec(),
        (Elements::Int(x), _) => x.iter().flat_map(|x| (*x as i32).to_ne_bytes()).collect(),
        (Elements::Float(x), Storage::F16) => x.iter().flat_map(|x| f16::from_f32(*x).to_ne_bytes()).collect(),
        (Elements::Float(x), Storage::Bf16) => x.iter().flat_map(|x| bf16::from_f32(*x).to_ne_bytes()).collect(),
        (Elements::Float(x), _) => cast_slice(x).to_vec(),
    }
}
