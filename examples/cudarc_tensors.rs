//! Attention over tensors that a program has in cudarc's memory, in its context and on its stream.
//!
//!     cargo run --release --example cudarc_tensors

use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};
use flashtune::device::CudaDevice;
use flashtune::{DType, Engine, Forward, Mask, Stream, TensorView};
use half::bf16;
use std::error::Error;

/// [batch, rows, heads, head dim], as most models lay out their activations.
const SHAPE: [usize; 4] = [2, 512, 8, 64];

fn main() -> Result<(), Box<dyn Error>> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let engine = Engine::builder().on(CudaDevice::of_context(&context)?).build()?;

    let count: usize = SHAPE.iter().product();
    let values = |n: usize| (0..count).map(|i| bf16::from_f32(((i * n) % 17) as f32 / 8.0 - 1.0)).collect::<Vec<_>>();
    let (q, k, v) = (stream.clone_htod(&values(3))?, stream.clone_htod(&values(5))?, stream.clone_htod(&values(7))?);
    let mut o = stream.alloc_zeros::<bf16>(count)?;
    {
        // The guards tell cudarc's other streams what is read and written here.
        let ((q, _q), (k, _k), (v, _v)) = (q.device_ptr(&stream), k.device_ptr(&stream), v.device_ptr(&stream));
        let (o, _o) = o.device_ptr_mut(&stream);
        let [batch, rows, heads, dim] = SHAPE.map(|n| n as u64);
        // Any strides with a contiguous last dim: here heads lie beside each other in a row.
        let view = |address| TensorView {
            address,
            dtype: DType::Bf16,
            shape: [batch, heads, rows, dim],
            strides: [rows * heads * dim, dim, heads * dim, 1].map(|n| n as i64),
        };
        let call = Forward { mask: Mask::Causal, ..Forward::new(view(q), view(k), view(v), view(o)) };
        // SAFETY: the views lie in the slices above, which live until the stream has been waited for, and nothing else
        // writes them.
        let ran = unsafe { engine.forward(&call, Stream(stream.cu_stream() as u64))? };
        print!("{}", ran.expect("there is something to compute").explain());
    }
    let o = stream.clone_dtoh(&o)?;
    println!("o[0, 0, 0, 0] = {}", o[0]);
    Ok(())
}
