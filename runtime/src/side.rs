//! The scalars and tensors of a score program on a device.

use crate::{Buffer, Device, Result};
use bytemuck::{bytes_of, cast_slice};
use flashtune_codegen::Shape;
use flashtune_codegen::abi::{SideArgs, SideTensorArg};
use flashtune_codegen::score::{Elements, Program, Scalar, SideData, Storage};
use half::{bf16, f16};

/// Side data in device memory, in the order that a program's kernels read it. The address of the arguments goes into
/// [`flashtune_codegen::abi::ForwardArgs::side`] and is good for as long as this lives.
pub struct SideBuffers {
    args: Box<dyn Buffer>,
    _parts: Vec<Box<dyn Buffer>>,
}

impl SideBuffers {
    /// Checks the data against what the program declares, and uploads it.
    ///
    /// # Errors
    /// Data that does not fit, by name, or a device without room.
    pub fn new(device: &dyn Device, program: &Program, sizes: &Shape, data: &SideData) -> Result<Self> {
        data.check(program, sizes).map_err(flashtune_codegen::Error::from)?;
        let mut parts = Vec::new();
        let mut upload = |bytes: &[u8]| -> Result<u64> {
            let buffer = device.alloc(bytes.len().max(8))?;
            device.upload(&*buffer, bytes)?;
            let address = buffer.address();
            parts.push(buffer);
            Ok(address)
        };
        let (mut tensors, mut scalars) = (Vec::new(), Vec::new());
        for declaration in program.declarations() {
            if declaration.axes.is_none() {
                scalars.push(match data.scalars.get(&declaration.name) {
                    Some(Scalar::Int(x)) => *x as u64,
                    Some(Scalar::Float(x)) => u64::from(x.to_bits()),
                    None => 0,
                });
                continue;
            }
            let Some(tensor) = data.tensors.get(&declaration.name) else { continue };
            let mut arg = SideTensorArg {
                data: upload(&encode(&tensor.elements, declaration.storage))?,
                stride: [0; 4],
                length: [0; 4],
            };
            let mut stride = 1;
            for (i, &n) in tensor.shape.iter().enumerate().rev() {
                arg.length[i] = n as i32;
                arg.stride[i] = if n == 1 { 0 } else { stride };
                stride *= n as i64;
            }
            tensors.push(arg);
        }
        let args = SideArgs { tensors: upload(cast_slice(&tensors))?, scalars: upload(cast_slice(&scalars))? };
        let buffer = device.alloc(size_of::<SideArgs>())?;
        device.upload(&*buffer, bytes_of(&args))?;
        Ok(Self { args: buffer, _parts: parts })
    }

    /// Address of the arguments.
    pub fn address(&self) -> u64 {
        self.args.address()
    }
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
