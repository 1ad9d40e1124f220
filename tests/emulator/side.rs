//! What score programs read on the emulated machine.

use crate::cases::address;
use flashtune::Shape;
use flashtune_codegen::abi::SideTensorArg;
use flashtune_codegen::score::{Axis, Elements, Program, Scalar, SideData, Storage};
use flashtune_runtime::{SideInputs, SideTable, SideView};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Tables and tensors in memory.
#[derive(Default)]
pub struct Side {
    pub table: Vec<u8>,
    pub arguments: Vec<SideTensorArg>,
    pub tensors: Vec<Vec<u8>>,
}

impl Side {
    /// Tensors lie in buffers from `first` on.
    pub fn new(program: &Program, shape: &Shape, data: &SideData, first: u64) -> Result<Self, String> {
        let mut tensors = Vec::new();
        let mut views = Vec::new();
        for (name, tensor) in &data.tensors {
            let storage = program.declarations().iter().find(|d| d.name == *name).expect("declared").storage;
            let bytes = encode(&tensor.elements, storage);
            let lengths: Vec<u64> = tensor.shape.iter().map(|n| *n as u64).collect();
            let at = address(first + tensors.len() as u64, bytes.len());
            views.push((name.as_str(), SideView::contiguous(at, storage, &lengths)));
            tensors.push(bytes);
        }
        let scalars: Vec<(&str, Scalar)> = data.scalars.iter().map(|(name, x)| (name.as_str(), *x)).collect();
        let inputs = SideInputs { scalars: &scalars, tensors: &views };
        let table = SideTable::new(program, shape, &inputs).map_err(|e| e.to_string())?;
        let bytes = |address: u64, count: usize, size: usize| {
            // SAFETY: the table lives, and holds as many as any program may read.
            unsafe { std::slice::from_raw_parts(address as usize as *const u8, count.max(1) * size) }.to_vec()
        };
        let count = views.len();
        let mut all = bytes(table.args().tensors, views.len(), size_of::<SideTensorArg>());
        all.extend(bytes(table.args().scalars, scalars.len(), size_of::<u64>()));
        let arguments = all.chunks_exact(size_of::<SideTensorArg>()).take(count).map(bytemuck::pod_read_unaligned);
        let arguments = arguments.collect();
        Ok(Self { table: all, arguments, tensors })
    }
}

fn encode(elements: &Elements, storage: Storage) -> Vec<u8> {
    match elements {
        // Any byte but zero is true.
        Elements::Bool(x) => x.iter().enumerate().map(|(i, x)| if *x { (i * 37 % 255 + 1) as u8 } else { 0 }).collect(),
        Elements::Int(x) => x.iter().flat_map(|x| (*x as i32).to_ne_bytes()).collect(),
        // Values that both hold exactly.
        Elements::Float(x) if storage == Storage::Bf16 => {
            x.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_ne_bytes()).collect()
        }
        Elements::Float(x) if storage == Storage::F16 => {
            x.iter().flat_map(|x| half::f16::from_f32(*x).to_ne_bytes()).collect()
        }
        Elements::Float(x) => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
    }
}

/// Values for all that a program declares, of storages that [`encode`] knows.
pub fn side_data(program: &Program, sizes: &Shape, seed: u64) -> SideData {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x51de);
    let mut data = SideData::default();
    for d in program.declarations() {
        let range = d.int_range();
        let (lo, hi) = (range.lo.max(0), range.hi.min(30));
        let Some(axes) = &d.axes else {
            let float = Scalar::Float(rng.random_range(2.0..8.0));
            data = data.scalar(
                &d.name,
                if d.storage == Storage::F32 { float } else { Scalar::Int(rng.random_range(lo..=hi)) },
            );
            continue;
        };
        let length = |a: &Axis| a.length(sizes).unwrap_or(sizes.q_len.max(sizes.kv_len).max(41));
        let mut shape: Vec<usize> = axes.iter().map(|a| length(a) as usize).collect();
        // Biases and masks are the same for all heads, or for all queries or keys, now and then.
        let by_both = d.storage == Storage::Bool && axes.ends_with(&[Axis::QLen, Axis::KvLen]);
        if by_both || matches!(d.storage, Storage::Bf16 | Storage::F16) {
            let mut rng = StdRng::seed_from_u64(seed ^ 0xb1a5);
            shape.iter_mut().filter(|n| **n > 1).for_each(|n| *n = if rng.random_bool(0.15) { 1 } else { *n });
        }
        let n = shape.iter().product();
        let elements = match d.storage {
            // Of a mask by query and key, parts of some rows and keys are all of a kind.
            Storage::Bool if axes.ends_with(&[Axis::QLen, Axis::KvLen]) => {
                let [rows, keys] = [shape[shape.len() - 2].max(1), shape[shape.len() - 1].max(1)];
                let part = |i: usize| [i / keys / rows, i / keys % rows / 64, i % keys / 64];
                let mix = |s: u64, x: usize| (s ^ x as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
                let bool = |i| [0.0, 0.4, 1.0][(part(i).into_iter().fold(seed, mix) % 3) as usize];
                Elements::Bool((0..n).map(|i| rng.random_bool(bool(i))).collect())
            }
            Storage::Bool => Elements::Bool((0..n).map(|_| rng.random_bool(0.4)).collect()),
            Storage::I32 => {
                let mut x: Vec<i64> = (0..n).map(|_| rng.random_range(lo..=hi.min(6))).collect();
                if d.nondecreasing {
                    x.chunks_mut((*shape.last().expect("an axis")).max(1)).for_each(|row| row.sort());
                }
                Elements::Int(x)
            }
            Storage::Bf16 | Storage::F16 => {
                Elements::Float((0..n).map(|_| rng.random_range(-64..=64) as f32 / 64.0).collect())
            }
            _ => Elements::Float((0..n).map(|_| rng.random_range(-1.0..1.0)).collect()),
        };
        data = data.tensor(&d.name, &shape, elements);
    }
    data
}
