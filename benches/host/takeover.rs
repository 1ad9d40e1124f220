//! What `quick first` promises, for many problems on the GPU that is there: how long the first call takes, when its own
//! kernel takes over, and whether both give the same bits.
//!
//!     cargo run --release --example takeover [-- FILTER]
//!
//! FILTER is a part of a problem's name. The cache is empty. The first calls come one after the other, while the
//! kernels of those before are being compiled: their times are more than those of a process that needs one. Ends with 1
//! if any bits differ.
use flashtune::{DType, DeviceSpec, Engine, Forward, HostTensor, Layout, Mask, Problem, Status, TensorView};
use std::time::{Duration, Instant};

type Answer<T> = Result<T, Box<dyn std::error::Error>>;

/// Element type, head dims of QK and V, mask, and [batch, heads, KV heads, rows of Q, keys].
fn cases() -> Vec<(DType, [u32; 2], Mask, [u64; 5])> {
    let window = Mask::Window { left: Some(300), right: Some(0) };
    let square = [1, 8, 8, 1500, 1500];
    let mut all = Vec::new();
    for dtype in [DType::Bf16, DType::F16] {
        for d in [64, 96, 128, 256] {
            all.extend([Mask::Full, Mask::Causal].map(|mask| (dtype, [d, d], mask, square)));
        }
        all.push((dtype, [128, 128], window, square));
        all.push((dtype, [192, 128], Mask::Causal, [2, 6, 3, 777, 1300]));
        // A group of heads shares a tile.
        all.push((dtype, [128, 128], Mask::Causal, [3, 16, 2, 5, 2000]));
        // Small blocks, two of them on one multiprocessor.
        all.push((dtype, [64, 64], Mask::Causal, [2, 8, 8, 600, 600]));
    }
    all
}

struct Case {
    name: String,
    call: Forward<'static>,
    /// Of O and the LSE.
    outputs: [Box<dyn flashtune_runtime::Buffer>; 2],
    _inputs: Vec<Box<dyn flashtune_runtime::Buffer>>,
    first_ms: f64,
    first: [Vec<u8>; 2],
    status: Status,
    began: Instant,
}

fn main() -> Answer<()> {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let cache = tempfile::tempdir()?;
    let engine = Engine::builder().device(DeviceSpec::Cuda(0)).cache_dir(cache.path()).quick_first(true).build()?;
    let device = engine.device().clone();
    let stream = device.stream();
    let read = |outputs: &[Box<dyn flashtune_runtime::Buffer>; 2]| -> Answer<[Vec<u8>; 2]> {
        let mut bytes = outputs.each_ref().map(|b| vec![0; b.len()]);
        for (to, from) in bytes.iter_mut().zip(outputs) {
            device.download(&**from, to, stream)?;
        }
        Ok(bytes)
    };
    let mut waiting = Vec::new();
    for (dtype, [d, dv], mask, [batch, heads, kv_heads, rows, keys]) in cases() {
        let problem = Problem::forward_qk_v(dtype, d, dv, mask.kind())?;
        let name = format!("{problem} {batch}x{heads}/{kv_heads} {rows}x{keys}");
        if !name.contains(&filter) {
            continue;
        }
        let (d, dv) = (u64::from(d), u64::from(dv));
        let shapes = [[batch, heads, rows, d], [batch, kv_heads, keys, d], [batch, kv_heads, keys, dv]];
        let mut inputs = Vec::new();
        let mut views = Vec::new();
        for (seed, shape) in (1..).zip(shapes) {
            let host = HostTensor::random(dtype, shape.map(|n| n as usize), Layout::Bhsd, seed, Default::default());
            let buffer = device.alloc(host.bytes().len())?;
            device.upload(&*buffer, host.bytes())?;
            views.push(TensorView::bhsd(buffer.address(), dtype, shape));
            inputs.push(buffer);
        }
        let of_rows = (batch * heads * rows) as usize;
        let outputs = [device.alloc(of_rows * dv as usize * dtype.bytes())?, device.alloc(of_rows * 4)?];
        let o = TensorView::bhsd(outputs[0].address(), dtype, [batch, heads, rows, dv]);
        let mut call = Forward::new(views[0], views[1], views[2], o);
        (call.mask, call.lse) = (mask, Some(outputs[1].address()));
        let began = Instant::now();
        // SAFETY: the views describe live buffers of these sizes.
        let dispatch = unsafe { engine.forward(&call, stream)? }.ok_or("nothing to compute")?;
        device.synchronize(stream)?;
        let first_ms = began.elapsed().as_secs_f64() * 1e3;
        let first = read(&outputs)?;
        let status = dispatch.plan.status();
        waiting.push(Case { name, call, outputs, _inputs: inputs, first_ms, first, status, began });
    }
    let mut other = 0;
    println!("{:52} {:>9} {:>9}  bits", "problem", "first ms", "own, ms");
    for case in &waiting {
        let same = loop {
            // SAFETY: as above; the case holds the buffers.
            let dispatch = unsafe { engine.forward(&case.call, stream)? }.ok_or("nothing to compute")?;
            if dispatch.plan.status() != Status::Quick {
                break case.first == read(&case.outputs)?;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        other += usize::from(!same);
        let (own, bits) = (case.began.elapsed().as_secs_f64() * 1e3, if same { "the same" } else { "OTHER" });
        println!("{:52} {:9.0} {own:9.0}  {bits} ({})", case.name, case.first_ms, case.status);
    }
    println!("{} problems, {other} with other bits", waiting.len());
    if other > 0 {
        return Err("a quick schedule gives other bits than the kernel that it stands in for".into());
    }
    Ok(())
}
