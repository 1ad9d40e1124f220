//! Tensors in safetensors files.

use super::exit::usage;
use super::files;
use anyhow::{Context as _, Result};
use flashtune::{DType, HostTensor, Layout};
use flashtune_codegen::score::{Axis, Declaration, Elements, MAX_RANK, SideTensor, Storage};
use safetensors::tensor::{Dtype as FileDType, SafeTensors, TensorView as FileTensor};
use std::path::Path;

/// Order of the dimensions in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum FileLayout {
    /// [batch, heads, rows, dim]
    #[default]
    Bhsd,
    /// [batch, rows, heads, dim]
    Bshd,
}

impl FileLayout {
    /// The layout in memory.
    pub(crate) fn layout(self) -> Layout {
        match self {
            FileLayout::Bhsd => Layout::Bhsd,
            FileLayout::Bshd => Layout::Bshd,
        }
    }

    /// A shape in file order from one in batch, heads, rows, dim order, and back: the swap is its own inverse.
    pub(crate) fn order(self, [b, h, s, d]: [usize; 4]) -> [usize; 4] {
        match self {
            FileLayout::Bhsd => [b, h, s, d],
            FileLayout::Bshd => [b, s, h, d],
        }
    }
}

/// A whole safetensors file, checked by its header.
pub(crate) struct File {
    path: String,
    bytes: Vec<u8>,
}

impl File {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|e| usage(format!("cannot read {name}: {e}")))?;
        let file = Self { path: name, bytes };
        file.parse()?;
        Ok(file)
    }

    fn parse(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.bytes).map_err(|e| {
            usage(format!(
                "{} is not a whole safetensors file ({e}); write it again with the safetensors library",
                self.path
            ))
        })
    }

    /// The tensor of a name: rank 4, f16, bf16, f32 or e4m3.
    pub(crate) fn tensor(&self, name: &str, layout: FileLayout) -> Result<HostTensor> {
        let file = self.parse()?;
        let tensor = file.tensor(name).map_err(|_| {
            let mut names = file.names();
            names.sort_unstable();
            let names = if names.is_empty() { "no tensors".to_owned() } else { names.join(", ") };
            usage(format!("{} has no tensor `{name}` (it has {names}); name the inputs q, k and v", self.path))
        })?;
        let at = || format!("tensor {name} of {}", self.path);
        let dtype = match tensor.dtype() {
            FileDType::F16 => DType::F16,
            FileDType::BF16 => DType::Bf16,
            FileDType::F32 => DType::F32,
            FileDType::F8_E4M3 => DType::E4m3,
            other => {
                let what = at();
                return Err(usage(format!(
                    "{what}: dtype is {other:?}, but f16, bf16, f32 or e4m3 is needed; convert it"
                )));
            }
        };
        let shape: [usize; 4] = tensor.shape().try_into().map_err(|_| {
            usage(format!(
                "{}: shape is {:?}, but four dimensions are needed ([batch, heads, rows, dim], or [batch, rows, heads, \
                 dim] with --layout bshd); reshape it",
                at(),
                tensor.shape()
            ))
        })?;
        HostTensor::from_bytes(dtype, layout.order(shape), layout.layout(), tensor.data().to_vec())
            .ok_or_else(|| usage(format!("{}: its bytes are not those of shape {shape:?}; write it again", at())))
    }
}

impl File {
    /// What the file says of its tensors beside q, k and v: storage and number of axes, of those that a score program
    /// can read.
    pub(crate) fn side_declarations(&self) -> Result<Vec<Declaration>> {
        let file = self.parse()?;
        let declaration = |(name, tensor): (String, FileTensor<'_>)| {
            let storage = match tensor.dtype() {
                FileDType::BOOL => Storage::Bool,
                FileDType::I64 => Storage::I64,
                FileDType::I32 => Storage::I32,
                FileDType::F32 => Storage::F32,
                FileDType::F16 => Storage::F16,
                FileDType::BF16 => Storage::Bf16,
                _ => return None,
            };
            let input = ["q", "k", "v"].contains(&name.as_str()) || tensor.shape().len() > MAX_RANK;
            (!input).then(|| Declaration::tensor(name, storage, &vec![Axis::Any; tensor.shape().len()]))
        };
        Ok(file.tensors().into_iter().filter_map(declaration).collect())
    }

    /// A tensor that a score program reads, of any rank up to four.
    pub(crate) fn side_tensor(&self, name: &str) -> Result<SideTensor> {
        let file = self.parse()?;
        let Ok(tensor) = file.tensor(name) else {
            let why = "it is what the score program reads under that name";
            return Err(usage(format!("{} has no tensor `{name}`; {why}", self.path)));
        };
        let data = tensor.data();
        let ints = |size: usize, f: fn(&[u8]) -> i64| Elements::Int(data.chunks_exact(size).map(f).collect());
        let floats = |dtype: DType| -> Option<Elements> {
            let n = tensor.shape().iter().product();
            let all = HostTensor::from_bytes(dtype, [1, 1, 1, n], Layout::Bhsd, data.to_vec())?;
            Some(Elements::Float(all.values()))
        };
        let elements = match tensor.dtype() {
            FileDType::BOOL => Some(Elements::Bool(data.iter().map(|b| *b != 0).collect())),
            FileDType::I64 => Some(ints(8, |b| i64::from_le_bytes(b.try_into().unwrap_or_default()))),
            FileDType::I32 => Some(ints(4, |b| i32::from_le_bytes(b.try_into().unwrap_or_default()).into())),
            FileDType::F32 => floats(DType::F32),
            FileDType::F16 => floats(DType::F16),
            FileDType::BF16 => floats(DType::Bf16),
            _ => None,
        };
        let expected = "score programs read bool, i32, i64, f16, bf16 and f32; convert it";
        let elements = elements.ok_or_else(|| {
            usage(format!("tensor {name} of {}: dtype is {:?}; {expected}", self.path, tensor.dtype()))
        })?;
        Ok(SideTensor { shape: tensor.shape().to_vec(), elements })
    }
}

/// An output tensor: name, dtype, shape in file order, bytes.
pub(crate) type Output<'a> = (&'a str, DType, Vec<usize>, &'a [u8]);

/// Writes tensors to a file that appears whole or not at all. A device or a pipe is written to and stays what it is.
pub(crate) fn write(path: &Path, outputs: &[Output<'_>]) -> Result<()> {
    let mut views = Vec::new();
    for (name, dtype, shape, bytes) in outputs {
        let dtype = match dtype {
            DType::F16 => FileDType::F16,
            DType::Bf16 => FileDType::BF16,
            DType::F32 => FileDType::F32,
            DType::E4m3 => FileDType::F8_E4M3,
        };
        let view = FileTensor::new(dtype, shape.clone(), bytes).with_context(|| format!("output {name}"))?;
        views.push((*name, view));
    }
    let encoded = safetensors::serialize(views, None).context("cannot encode the outputs")?;
    files::write(path, &encoded)
}
