//! What a call through the C ABI costs beyond the same call in Rust, on the CPU with a problem that takes next to no
//! time.
//!
//!     cargo build --release -p flashtune-c && cargo run --release -p flashtune-c --example overhead
//!
//! Both sides compute the same tensors in turn, in blocks of calls; prints medians over the blocks in microseconds.
use engine::{DType, DeviceSpec, Engine, Forward, Stream, TensorView};
use libloading::Library;
use std::time::Instant;
use types::{Descale, Dropout, Dtype, EngineHandle, ForwardArgs, Options, Status, Tensor};

#[path = "../src/types.rs"]
#[allow(dead_code, unreachable_pub)]
mod types;

const BLOCKS: usize = 200;
const CALLS: usize = 200;
const SHAPE: [u64; 4] = [1, 1, 1, 16];

/// Microseconds of one call, over a block.
fn block(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    start.elapsed().as_secs_f64() * 1e6 / CALLS as f64
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cache = tempfile::tempdir()?;
    // SAFETY: nothing else runs yet; the library reads the variable when its engine is opened.
    unsafe { std::env::set_var("FLASHTUNE_CACHE", cache.path()) };

    let memory: [Vec<f32>; 4] = std::array::from_fn(|i| vec![i as f32; 16]);
    let view = |i: usize| TensorView::bhsd(memory[i].as_ptr() as u64, DType::F32, SHAPE);
    let call = Forward::new(view(0), view(1), view(2), view(3));
    let rust = Engine::builder().device(DeviceSpec::Cpu).build()?;

    // Two folders up from target/PROFILE/examples/overhead lies what is loaded.
    let program = std::env::current_exe()?;
    let path = program.ancestors().nth(2).ok_or("no target folder")?.join("libflashtune.so");
    // SAFETY: the library's own constructors do nothing of note; the types of the symbols are the header's.
    let (library, open, forward) = unsafe {
        let library = Library::new(&path)?;
        let open = *library
            .get::<unsafe extern "C" fn(*const Options, *mut EngineHandle) -> Status>("flashtune_engine_open")?;
        let forward =
            *library.get::<unsafe extern "C" fn(EngineHandle, *const ForwardArgs) -> Status>("flashtune_forward")?;
        (library, open, forward)
    };
    let tensor = |i: usize| Tensor {
        data: memory[i].as_ptr().cast_mut().cast(),
        shape: SHAPE.map(|n| n as i64),
        strides: view(i).strides,
        dtype: Dtype::F32 as i32,
        reserved: 0,
    };
    let options = Options {
        struct_size: size_of::<Options>() as u32,
        policy: 0,
        device: c"cpu".as_ptr(),
        cuda_context: std::ptr::null_mut(),
        cache_dir: std::ptr::null(),
        templates_dir: std::ptr::null(),
        bundles: std::ptr::null(),
        bundles_len: 0,
        quick_first: 0,
        checked: 0,
        scratch_limit: 0,
        parallel: None,
        parallel_context: std::ptr::null_mut(),
        parallel_threads: 0,
        threads: 0,
        reserved: 0,
        allow_paths: std::ptr::null(),
    };
    let args = ForwardArgs {
        struct_size: size_of::<ForwardArgs>() as u32,
        flags: 0,
        q: tensor(0),
        k: tensor(1),
        v: tensor(2),
        o: tensor(3),
        lse: std::ptr::null_mut(),
        stream: std::ptr::null_mut(),
        window_left: 0,
        window_right: 0,
        mask: 0,
        softmax_scale: 0.0,
        mask_program: std::ptr::null(),
        score_program: std::ptr::null(),
        sink_program: std::ptr::null(),
        inputs: std::ptr::null(),
        inputs_len: 0,
        input_size: 0,
        block_mask: 0,
        weights: std::ptr::null_mut(),
        q_descale: std::ptr::null(),
        k_descale: std::ptr::null(),
        v_descale: std::ptr::null(),
        q_descale_stride: [0; 2],
        k_descale_stride: [0; 2],
        v_descale_stride: [0; 2],
        residual: Tensor { data: std::ptr::null_mut(), ..tensor(3) },
        dropout: Dropout { p: 0.0, seed: 0, offset: 0, seed_at: std::ptr::null(), offset_at: std::ptr::null() },
        q_descale_by: Descale { kind: 0, rows: 0, stride: 0 },
        k_descale_by: Descale { kind: 0, rows: 0, stride: 0 },
        v_descale_by: Descale { kind: 0, rows: 0, stride: 0 },
        o_scale: std::ptr::null(),
    };
    let mut handle = 0;
    // SAFETY: pointers to live values of the header's types.
    assert!(unsafe { open(&options, &mut handle) } == Status::Ok);

    // SAFETY: the tensors are live buffers of these sizes, and one call runs at a time.
    let mut through_rust = || drop(unsafe { rust.forward(&call, Stream(0)) }.expect("a plan"));
    // SAFETY: as above.
    let mut through_c = || assert!(unsafe { forward(handle, &args) } == Status::Ok);
    through_rust();
    through_c();
    assert!(memory[3].iter().all(|x| *x == 2.0), "both computed");

    let mut times: [Vec<f64>; 2] = Default::default();
    for _ in 0..BLOCKS {
        times[0].push(block(&mut through_rust));
        times[1].push(block(&mut through_c));
    }
    let [rust_us, c_us] = times.map(|mut t| {
        t.sort_by(f64::total_cmp);
        t[BLOCKS / 2]
    });
    println!("Rust {rust_us:.3} us, C {c_us:.3} us, difference {:.3} us", c_us - rust_us);
    // Its threads live as long as the process, so the library stays.
    std::mem::forget(library);
    Ok(())
}
