//! Bad input: each a typed error that names the field, exit code 2 on the command line, and nothing lost.

use crate::common::{self, Place, fails};
use flashtune::{DType, Engine, Error, Forward, HostTensor, Layout, Stream, TensorView};
use flashtune_runtime::Error as RuntimeError;
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are text")
}

/// `run` on a file, with an output file that is there already and must stay.
#[track_caller]
fn run_fails(place: &Place, input: &Path, more: &[&str], words: &[&str]) {
    let output = place.path("old.safetensors");
    std::fs::write(&output, "something of value").unwrap();
    let args = [&["run", text(input), "-o", text(&output)], more].concat();
    fails(&mut place.flashtune(&args), 2, words);
    assert_eq!(std::fs::read_to_string(&output).unwrap(), "something of value");
}

/// Dtype and shape of q, k and v.
type Tensors = [(DType, [usize; 4]); 3];

/// Writes q, k, v of these shapes and dtypes.
fn file(place: &Place, tensors: Tensors) -> std::path::PathBuf {
    let [q, k, v] = tensors.map(|(dtype, shape)| HostTensor::zeros(dtype, shape, Layout::Bhsd));
    let path = place.path("in.safetensors");
    common::write_tensors(&path, &[("q", &q), ("k", &k), ("v", &v)]);
    path
}

#[test]
fn tensors_of_a_file_that_do_not_fit_each_other() {
    use DType::{Bf16, F16, F32};
    let place = Place::new();
    let ok = [1, 4, 8, 64];
    let cases: &[(Tensors, &[&str])] = &[
        ([(F32, ok), (F16, ok), (F32, ok)], &["tensor k", "dtype", "f16"]),
        ([(F32, ok), (F32, ok), (Bf16, ok)], &["tensor v", "dtype", "bf16"]),
        ([(F32, ok), (F32, [2, 4, 8, 64]), (F32, ok)], &["tensor k", "batch"]),
        ([(F32, ok), (F32, [1, 3, 8, 64]), (F32, [1, 3, 8, 64])], &["heads"]),
        ([(F32, ok), (F32, [1, 4, 8, 32]), (F32, ok)], &["tensor k"]),
        ([(F32, ok), (F32, ok), (F32, [1, 4, 9, 64])], &["tensor v"]),
        ([(F32, ok), (F32, ok), (F32, [1, 2, 8, 64])], &["tensor v"]),
    ];
    for (tensors, words) in cases {
        run_fails(&place, &file(&place, *tensors), &[], words);
    }
}

#[test]
fn head_dims_out_of_range() {
    let place = Place::new();
    for d in [257, 264] {
        let shape = [1, 1, 4, d];
        let path = file(&place, [(DType::F32, shape), (DType::F32, shape), (DType::F32, shape)]);
        run_fails(&place, &path, &[], &["head_dim_qk", "1 to 256", "split the heads"]);
        let d = d.to_string();
        fails(&mut place.flashtune(&["explain", "--head-dim", &d]), 2, &["head_dim_qk", &d]);
        fails(&mut place.flashtune(&["explain", "--head-dim-v", &d]), 2, &["head_dim_v", &d]);
    }
}

#[test]
fn files_that_are_no_tensor_files() {
    let place = Place::new();
    let (good, _) = place.inputs("good.safetensors", DType::F16, [1, 2, 8, 64], [1, 2, 8, 64]);
    let bytes = std::fs::read(&good).unwrap();
    let bad = place.path("bad.safetensors");
    for length in [0, 4, 8, 50, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&bad, &bytes[..length]).unwrap();
        run_fails(&place, &bad, &[], &["bad.safetensors", "not a whole safetensors file"]);
    }
    std::fs::write(&bad, "PK\u{3}\u{4} a zip archive, for example, whose first eight bytes are no length").unwrap();
    run_fails(&place, &bad, &[], &["not a whole safetensors file"]);
    run_fails(&place, &place.path("absent"), &[], &["absent"]);

    // A tensor file of something else.
    let other = HostTensor::zeros(DType::F32, [1, 1, 8, 64], Layout::Bhsd);
    common::write_tensors(&bad, &[("weight", &other), ("bias", &other)]);
    run_fails(&place, &bad, &[], &["no tensor `q`", "bias, weight"]);
    let empty: [(&str, safetensors::tensor::TensorView<'_>); 0] = [];
    std::fs::write(&bad, safetensors::serialize(empty, None).unwrap()).unwrap();
    run_fails(&place, &bad, &[], &["no tensor `q`"]);

    // Another rank and another dtype.
    use safetensors::tensor::{Dtype, TensorView as FileView};
    let data = vec![0u8; 8 * 64 * 4];
    for (dtype, shape, word) in [(Dtype::F32, vec![8, 64], "four dimensions"), (Dtype::I32, vec![1, 1, 8, 64], "I32")] {
        let view = FileView::new(dtype, shape, &data).unwrap();
        let tensors = ["q", "k", "v"].map(|name| (name, view.clone()));
        std::fs::write(&bad, safetensors::serialize(tensors, None).unwrap()).unwrap();
        run_fails(&place, &bad, &[], &["tensor q", word]);
    }
}

#[test]
fn words_that_the_command_line_does_not_know() {
    let place = Place::new();
    let (good, _) = place.inputs("good.safetensors", DType::F16, [1, 2, 8, 64], [1, 2, 8, 64]);
    run_fails(&place, &good, &["--mask", "casual"], &["`casual`", "window:LEFT,RIGHT"]);
    run_fails(&place, &good, &["--mask", "window:1"], &["`window:1`"]);
    run_fails(&place, &good, &["--policy", "strict"], &["`strict`", "sealed"]);
    run_fails(&place, &good, &["--device", "tpu"], &["`tpu`", "cuda:N"]);
    run_fails(&place, &good, &["--scale", "nan"], &["--scale"]);
    run_fails(&place, &good, &["--layout", "sbhd"], &["bshd"]);
    // Each remainder is one of its own; 10,000 operations are too many for every CUDA compiler.
    let endless: String = (2..5002).map(|i| format!(" + kv % {i}")).collect();
    let endless = format!("score{endless}");
    for (args, word) in [
        (&["explain", "--dtype", "f64"][..], "`f64`"),
        (&["emit", "--arch", "sm90"], "`sm90`"),
        (&["emit", "--arch", "sm_80", "--family", "forward/sm99"], "forward/sm99"),
        (&["check", "--family", "forward/sm90"], "forward/sm90 does not run on cpu"),
        (&["emit", "--arch", "sm_80", "--schedule", "w9"], "w9"),
        (&["emit", "--arch", "sm_80", "--family", "cpu"], "cpu only"),
        (&["explain", "--heads", "8", "--kv-heads", "3"], "check the heads axis of Q against that of K and V"),
        (&["explain", "--mask", "documnt"], "did you mean `document`?"),
        (&["explain", "--score", "soft_cup"], "did you mean `soft_cap`?"),
        (
            &["tune", "--dry-run", "--manifest", "/nonexistent/m.jsonl"],
            "cannot write /nonexistent/m.jsonl: No such file",
        ),
        (&["explain", "--q-len", "2000000000"], "q_len"),
        (&["emit", "--head-dim", "64,128"], "2 combinations"),
        (&["tune", "--budget-s", "-3"], "--budget-s"),
        (&["tune", "--budget-s", "1e20"], "--budget-s"),
        (&["tune", "--q-len", "0"], "nothing to time"),
        (&["tune", "--from", "/nonexistent/shapes"], "cannot read /nonexistent/shapes: No such file"),
        (&["tune", "--head-dims", "64,x"], "`x`: expected a whole number"),
        (&["explain", "--batch", "-1"], "-1"),
        (&["tune", "--only", "q64-r9"], "no schedule `q64-r9`"),
        (&["tune", "--only", "x", "--together"], "--together"),
        (&["bench", "--rounds", "0"], "--rounds"),
        (&["bench", "--seq-lens", "4k..512"], "FROM..TO"),
        (&["bench", "--masks", "full,casual"], "`casual`"),
        (&["bench", "--width", "100"], "--width"),
        (&["bench", "--tokens", "0"], "--tokens"),
        (&["bench", "--lengths", "/nonexistent/lengths"], "cannot read"),
        (&["bench", "--svg", "/nonexistent/folder/a.svg"], "cannot write"),
        (&["report", "/nonexistent/report.json"], "cannot read"),
        (&["build", "--arch", "sm_60", "--out", "/tmp/x.ftb"], "sm_60"),
        (&["emit", "--arch", "sm_90a", "--score", &endless], "forward/naive"),
        (&["frobnicate"], "frobnicate"),
    ] {
        fails(&mut place.flashtune(args), 2, &[word]);
    }
    let before = std::fs::read(&good).unwrap();
    fails(&mut place.flashtune(&["run", text(&good), "-o", text(&good)]), 2, &["is the input", "another file"]);
    assert!(std::fs::read(&good).unwrap() == before, "the input stays");
    let no_folder = place.path("no/such/folder/out.safetensors");
    fails(&mut place.flashtune(&["run", text(&good), "-o", text(&no_folder)]), 2, &["cannot write"]);
}

#[test]
fn sizes_beyond_the_memory_are_an_error_before_the_host_runs_out() {
    let place = Place::new();
    for command in [&["tune", "--budget-s", "2"][..], &["bench", "--rounds", "1"]] {
        let args = [command, &["--q-len", "1000000000", "--heads", "4096", "--dtype", "f32"]].concat();
        fails(&mut place.flashtune(&args), 1, &["GiB", "smaller sizes"]);
    }
}

/// An engine on the cpu and one well-formed call; the tensors' memory is never touched by the tests below.
fn engine(place: &Place) -> Engine {
    Engine::builder().device(flashtune::DeviceSpec::Cpu).cache_dir(place.cache()).build().unwrap()
}

fn call(memory: &[u64]) -> Forward<'static> {
    let view = |heads| TensorView::bhsd(memory.as_ptr() as u64, DType::F32, [1, heads, 8, 32]);
    Forward::new(view(4), view(2), view(2), view(4))
}

#[track_caller]
fn refused(engine: &Engine, call: &Forward, tensor: &str, word: &str) {
    // SAFETY: the call is refused before anything is launched, which is what the test shows.
    let error = unsafe { engine.forward(call, Stream::default()) }.expect_err("a call that cannot be honoured");
    let Error::Runtime(RuntimeError::Tensor { tensor: named, .. }) = &error else { panic!("{error}") };
    assert_eq!(*named, tensor, "{error}");
    assert!(error.to_string().contains(word), "{error}");
}

#[test]
fn views_that_a_kernel_cannot_read_are_refused_before_the_launch() {
    let place = Place::new();
    let engine = engine(&place);
    let memory = vec![0u64; 4 * 8 * 32 / 2 + 64];
    let good = call(&memory);

    let mut c = good;
    c.q.strides[3] = 2;
    refused(&engine, &c, "q", "stride");
    let mut c = good;
    c.k.strides[2] = -32;
    refused(&engine, &c, "k", "stride");
    let mut c = good;
    c.v.address = 0;
    refused(&engine, &c, "v", "address");
    let mut c = good;
    c.o.dtype = DType::Bf16;
    refused(&engine, &c, "o", "dtype");
    let mut c = good;
    c.o.shape[2] = 9;
    refused(&engine, &c, "o", "9");
    let mut c = good;
    c.k.shape[2] = 1 << 40;
    c.v.shape[2] = 1 << 40;
    // SAFETY: refused before the launch, like the others.
    let error = unsafe { engine.forward(&c, Stream::default()) }.unwrap_err().to_string();
    assert!(error.contains("k") && error.contains("1099511627776"), "{error}");
}
