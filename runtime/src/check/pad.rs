//! The check of copies of rows: random tensors in random layouts, compared to the byte with the same copy on the host.

use crate::guarded::{Guarded, POISON};
use crate::{Device, Module, Result, RowCopies, TensorView};
use flashtune_codegen::DType;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Lengths of rows: around steps of a warp, of vectors, and at both ends.
const DIMS: [u64; 14] = [1, 2, 7, 8, 16, 31, 32, 33, 59, 64, 111, 112, 255, 256];
/// Rows of a head: around those of a warp and of a thread block.
const ROWS: [u64; 9] = [0, 1, 3, 7, 8, 9, 63, 65, 130];

/// Launches one random call of [`RowCopies`] on a kernel of `pad/cuda`: what is wrong, if anything is.
///
/// # Errors
/// Those of the device.
pub fn check_pad(device: &dyn Device, module: &dyn Module, seed: u64) -> Result<std::result::Result<(), String>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut source, mut target) = (Vec::new(), Vec::new());
    let mut tensors = Vec::new();
    for _ in 0..rng.random_range(1..=5) {
        let [from_dim, to_dim] = [(); 2].map(|()| *DIMS.choose(&mut rng).expect("not empty"));
        let rows = *ROWS.choose(&mut rng).expect("not empty");
        let sizes = [rng.random_range(0..=2), rng.random_range(1..=3), rows];
        tensors.push([place(&mut rng, &mut source, sizes, from_dim), place(&mut rng, &mut target, sizes, to_dim)]);
    }
    rng.fill(&mut source[..]);
    target.fill(POISON);
    let read = Guarded::new(device, "what is read", &source)?;
    let to = Guarded::new(device, "what is written", &target)?;
    let mut copies = RowCopies::default();
    for [from, at] in &tensors {
        let [from, at] = [(from, &read), (at, &to)].map(|(t, b)| TensorView { address: b.address() + t.address, ..*t });
        copies.push("rows", &from, &at)?;
    }
    let stream = device.stream();
    if !copies.is_empty() {
        let plan = module.kernel().plan(&copies.shape())?;
        // SAFETY: every row lies in the buffers, which live until the download has waited.
        unsafe { device.launch(module, &plan, copies.args().into(), stream)? };
    }
    for [from, at] in &tensors {
        let [batch, heads, rows, to_dim] = at.shape;
        for n in 0..batch * heads * rows {
            let index = [n / rows / heads, n / rows % heads, n % rows].map(|i| i as i64);
            let start = |t: &TensorView| {
                let elements: i64 = index.iter().zip(t.strides).map(|(i, stride)| i * stride).sum();
                t.address as usize + 2 * elements as usize
            };
            let (from_byte, to_byte) = (start(from), start(at));
            let copied = 2 * from.shape[3].min(to_dim) as usize;
            let row = &mut target[to_byte..to_byte + 2 * to_dim as usize];
            row[..copied].copy_from_slice(&source[from_byte..from_byte + copied]);
            row[copied..].fill(0);
        }
    }
    for (buffer, expected) in [(&read, &source), (&to, &target)] {
        let (bytes, stray) = buffer.download(device, stream)?;
        let wrong = bytes.iter().zip(expected).position(|(a, b)| a != b);
        if let Some(wrong) = stray.or_else(|| wrong.map(|at| format!("byte {at} is not what the host copies"))) {
            return Ok(Err(format!("{wrong}: {tensors:?}")));
        }
    }
    Ok(Ok(()))
}

/// Room for a tensor at the end of `bytes`, whose rows begin at any element and lie apart by any number of them. Its
/// address counts from the first byte.
fn place(rng: &mut StdRng, bytes: &mut Vec<u8>, [batch, heads, rows]: [u64; 3], dim: u64) -> TensorView {
    let address = bytes.len() as u64 + 2 * rng.random_range(0..9);
    let apart = (dim + *[0, 0, 1, 5, 8].choose(rng).expect("not empty")) as i64;
    let [b, h, s] = [batch, heads, rows].map(|n| n as i64);
    let strides = match rng.random_range(0..3) {
        0 => [h * s * apart, s * apart, apart, 1],
        1 => [s * h * apart, apart, h * apart, 1],
        _ => [apart, b * s * apart, b * apart, 1],
    };
    bytes.resize(address as usize + 2 * (b * h * s * apart) as usize + 2 * rng.random_range(0..9), 0);
    TensorView { address, dtype: DType::Bf16, shape: [batch, heads, rows, dim], strides }
}
