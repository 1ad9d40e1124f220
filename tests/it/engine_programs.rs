//! Score programs through the engine and `flashtune run`, on the CPU: device memory by views, host memory, files, and
//! what does not fit.

use crate::common;
use flashtune::Elements;
use flashtune::{
    DType, DeviceSpec, Distribution, Engine, Forward, HostForward, HostTensor, Layout, Mask, MaskSizes, Program,
    ProgramRef, Scalar, Shape, SideData, SideInputs, SideView, Stream,
};
use flashtune_codegen::score::{BUILTINS, Storage, Texts};
use flashtune_runtime::reference::{Attention, all_rows, compare, oracle_of, unfused_rows_of};

fn engine(folder: &tempfile::TempDir) -> Engine {
    Engine::builder().device(DeviceSpec::Cpu).cache_dir(folder.path()).build().unwrap()
}

fn tensors(dtype: DType, s: &Shape, dim: usize) -> [HostTensor; 3] {
    let of = |heads: u32, rows: u32, seed| {
        let shape = [s.batch as usize, heads as usize, rows as usize, dim];
        HostTensor::random(dtype, shape, Layout::Bhsd, seed, Distribution::Normal)
    };
    [of(s.heads, s.q_len, 1), of(s.kv_heads, s.kv_len, 2), of(s.kv_heads, s.kv_len, 3)]
}

/// O and LSE against the interpreter in fp64.
fn check(
    what: &str,
    s: &Shape,
    [q, k, v]: &[HostTensor; 3],
    program: &Program,
    data: &SideData,
    o: &HostTensor,
    lse: &[f32],
) {
    let attention = Attention { mask: s.mask, scale: 0.25, program: Some((program, data)), sequence: 0, dropout: None };
    let rows = all_rows(s);
    let (oracle, unfused) = (oracle_of(q, k, v, &attention, &rows), unfused_rows_of(q, k, v, &attention, &rows));
    let verdict = compare(o, Some(lse), &oracle, &unfused);
    assert!(verdict.passed(), "{what}: {verdict}");
}

fn ints(n: usize, f: impl Fn(usize) -> i64) -> Elements {
    Elements::Int((0..n).map(f).collect())
}

/// Calls with a program, and checks the answer and that it is a kernel of the program that is to run.
fn check_host_call(
    engine: &Engine,
    what: &str,
    s: &Shape,
    t: &[HostTensor; 3],
    (called, runs): (&Program, &Program),
    data: &SideData,
) {
    let program = Some((ProgramRef::new(called.clone()), data));
    let call = HostForward { mask: s.mask, program, ..HostForward::new(&t[0], &t[1], &t[2]) };
    let out = engine.forward_host_call(&call).unwrap();
    check(what, s, t, runs, data, &out.o, &out.lse);
    assert!(out.plan.unwrap().explain().to_string().contains(&runs.name()), "{what}");
}

#[test]
fn host_calls_bring_scalars_and_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(&folder);
    let s = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 45, kv_len: 70, mask: Mask::Full };
    let floats = |n: usize| Elements::Float((0..n).map(|i| (i % 7) as f32 / 8.0 - 0.25).collect());
    let data = SideData::default()
        .scalar("cap", Scalar::Float(3.0))
        .scalar("chunk", Scalar::Int(16))
        .tensor("slope", &[4], floats(4))
        .tensor("sinks", &[4], floats(4))
        .tensor("bias", &[2, 4, 1, 70], floats(560))
        .tensor("doc_q", &[2, 45], ints(90, |i| (i % 45 / 10) as i64))
        .tensor("doc_kv", &[2, 70], ints(140, |i| (i % 70 / 15) as i64));
    for name in ["soft_cap", "chunked", "alibi", "attention_sinks", "additive_bias", "document"] {
        let b = BUILTINS.iter().find(|b| b.name == name).unwrap();
        let program = Program::parse(b.text).unwrap();
        let s = Shape { mask: if name == "alibi" { Mask::Causal } else { Mask::Full }, ..s };
        let t = tensors(DType::Bf16, &s, 16);
        check_host_call(&engine, name, &s, &t, (&program, &program), &data);
    }
}

#[test]
fn scalars_outside_of_their_usual_range_are_served_without_it() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(&folder);
    let s = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 40, kv_len: 40, mask: Mask::Causal };
    let t = tensors(DType::Bf16, &s, 16);
    let program = Program::parse(BUILTINS.iter().find(|b| b.name == "soft_cap").unwrap().text).unwrap();
    let wide = program.widened().unwrap();
    assert!(wide.text().contains("cap: f32;") && wide.widened().is_none(), "{}", wide.text());
    for (cap, runs) in [(30.0, &program), (50.0, &program), (120.0, &wide), (-4.0, &wide)] {
        let data = SideData::default().scalar("cap", Scalar::Float(cap));
        check_host_call(&engine, &format!("cap {cap}"), &s, &t, (&program, runs), &data);
    }
    // A range that is promised is one.
    let promised = Program::parse("cap: float in 0..50; score = cap * tanh(score / cap);").unwrap();
    let data = SideData::default().scalar("cap", Scalar::Float(120.0));
    let kept = ProgramRef::new(promised);
    let call = HostForward { mask: s.mask, program: Some((kept, &data)), ..HostForward::new(&t[0], &t[1], &t[2]) };
    let e = engine.forward_host_call(&call).err().unwrap().to_string();
    assert!(e.contains("`cap` is 120") && e.contains("from 0 to 50"), "{e}");
}

#[test]
fn device_calls_take_views_with_strides_and_refuse_what_does_not_fit() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(&folder);
    let s = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 33, kv_len: 33, mask: Mask::Full };
    let t = tensors(DType::F32, &s, 16);
    let mut o = HostTensor::zeros(DType::F32, t[0].shape(), Layout::Bhsd);
    let mut lse = vec![0f32; 66];
    // Every other row of a table, and slopes of which both heads share one.
    let table: Vec<f32> = (0..66 * 33).map(|i| (i % 13) as f32 / 13.0).collect();
    let slope = [0.125f32];
    let texts = Texts { mask: Some("q - kv < reach"), score: Some("score + slope[h] * kv + bias[q, kv]"), sink: None };
    let bias = SideView {
        address: table.as_ptr() as u64,
        storage: Storage::F32,
        rank: 2,
        shape: [33, 33, 1, 1],
        strides: [66, 1, 0, 0],
    };
    let slopes = SideView::contiguous(slope.as_ptr() as u64, Storage::F32, &[1]);
    let reach = ("reach", Scalar::Int(9));
    let given = [
        bias.declaration("bias"),
        slopes.declaration("slope"),
        flashtune_codegen::score::Declaration::scalar("reach", Storage::I32),
    ];
    let program = ProgramRef::new(texts.program(&given).unwrap());
    let written = o.bytes_mut().as_mut_ptr() as u64;
    let place = |t: &HostTensor| t.view_at(t.bytes().as_ptr() as u64);
    let plain = Forward {
        lse: Some(lse.as_mut_ptr() as u64),
        scale: Some(0.25),
        ..Forward::new(place(&t[0]), place(&t[1]), place(&t[2]), o.view_at(written))
    };
    let side = SideInputs { scalars: &[reach], tensors: &[("slope", slopes), ("bias", bias), ("unread", bias)] };
    // SAFETY: all addresses are of live memory of this process with the extents of their views.
    unsafe { engine.forward(&plain.with_program(program, side), Stream(0)) }.unwrap();
    let rows: Vec<f32> = table.chunks(66).flat_map(|row| row[..33].to_vec()).collect();
    let data = SideData::default()
        .scalar("reach", Scalar::Int(9))
        .tensor("slope", &[1], Elements::Float(slope.to_vec()))
        .tensor("bias", &[33, 33], Elements::Float(rows));
    check("views", &s, &t, &program, &data, &o, &lse);

    // By a block mask: with the whole program, and with a score alone.
    let sizes = MaskSizes { batch: None, heads: None, kv_heads: None, q_len: 33, kv_len: 33 };
    let mask = ProgramRef::new(program.mask_only().unwrap());
    let block_mask = engine.create_block_mask(mask, &SideInputs { scalars: &[reach], tensors: &[] }, sizes).unwrap();
    let score = ProgramRef::new(Texts { mask: None, ..texts }.program(&given).unwrap());
    let scores_own = SideInputs { scalars: &[], tensors: &[("slope", slopes), ("bias", bias)] };
    for program in [program, score] {
        o.bytes_mut().fill(0);
        let call = plain.with_program(program, scores_own).with_block_mask(&block_mask);
        // SAFETY: as above.
        unsafe { engine.forward(&call, Stream(0)) }.unwrap();
        check("a block mask", &s, &t, &program.with_mask_of(&mask).unwrap(), &data, &o, &lse);
    }
    let other = SideInputs { scalars: &[("reach", Scalar::Int(8))], ..scores_own };
    let e = engine.prepare(&plain.with_program(program, other).with_block_mask(&block_mask)).unwrap_err().to_string();
    assert!(e.contains("the scalar `reach` is Int(8)"), "{e}");
    let short = HostTensor::zeros(DType::F32, [1, 2, 32, 16], Layout::Bhsd);
    let fewer = Forward { q: place(&short), ..plain.with_block_mask(&block_mask) };
    let e = engine.prepare(&Forward { o: fewer.q, lse: None, ..fewer }).unwrap_err().to_string();
    assert!(e.contains("q_len is 32, but it was made for 33"), "{e}");

    let refused = |scalars: &[(&str, Scalar)], tensors: &[(&str, SideView)], words: &[&str]| {
        let call = plain.with_program(program, SideInputs { scalars, tensors });
        let e = engine.prepare(&call).expect_err("it does not fit").to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    let both = [("slope", slopes), ("bias", bias)];
    refused(&[], &both, &["scalar `reach` is missing"]);
    refused(&[("reach", Scalar::Float(1.0))], &both, &["`reach`", "int"]);
    refused(&[("reach", Scalar::Int(1 << 40))], &both, &["`reach`", "2147483647"]);
    refused(&[reach], &both[..1], &["tensor `bias` is missing", "bias: f32[q_len, kv_len]"]);
    let with = |change: fn(&mut SideView)| {
        let mut bias = bias;
        change(&mut bias);
        [("slope", slopes), ("bias", bias)]
    };
    refused(&[reach], &with(|b| b.storage = Storage::Bf16), &["`bias` is of bf16", "convert it"]);
    refused(&[reach], &with(|b| b.rank = 3), &["`bias` has 3 axes"]);
    refused(&[reach], &with(|b| b.shape[1] = 32), &["axis 1 of the tensor `bias`", "kv_len, which is 33"]);
    refused(&[reach], &with(|b| b.strides[0] = -66), &["stride of axis 0", "contiguous"]);
    // Each product fits 64 bits, and their sum does not; nor do the bytes of the second, nor the end of the third.
    refused(&[reach], &with(|b| b.strides = [i64::MAX / 33; 4]), &["extent of the tensor `bias`", "64-bit"]);
    refused(&[reach], &with(|b| b.strides[0] = i64::MAX / 64), &["extent of the tensor `bias`", "[33, 33] by"]);
    refused(&[reach], &with(|b| b.address = u64::MAX - 1023), &["extent of the tensor `bias`"]);
    refused(&[reach], &with(|b| b.address = 0), &["address of the tensor `bias`"]);
    refused(&[reach], &with(|b| b.address += 2), &["multiple of 4"]);
}

#[test]
fn the_command_reads_what_programs_read_from_the_file_and_the_command_line() {
    let place = common::Place::new();
    let s = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 40, kv_len: 40, mask: Mask::Causal };
    let t = tensors(DType::F32, &s, 16);
    let slope = HostTensor::from_values(DType::F32, [1, 1, 1, 2], Layout::Bhsd, &[0.5, 0.125]).unwrap();
    let path = place.path("in.safetensors");
    common::write_tensors(&path, &[("q", &t[0]), ("k", &t[1]), ("v", &t[2]), ("slope", &slope)]);
    let out = place.path("out.safetensors");
    let run = ["run", path.to_str().unwrap(), "-o", out.to_str().unwrap(), "--scale", "0.25"];
    let score = ["--score", "score + slope[0, 0, 0, h] * (kv - q)"];
    let mask = ["--mask", "kv <= q and q - kv < reach"];
    let all = [&run[..], &score, &mask, &["--set", "reach=7"]].concat();
    place.flashtune(&all).assert().success();

    let text = format!("slope: f32[1, 1, 1, *]; reach: int; mask = {}; score = {};", mask[1], score[1]);
    let program = Program::parse(&text).unwrap();
    let data = SideData::default().scalar("reach", Scalar::Int(7)).tensor(
        "slope",
        &[1, 1, 1, 2],
        Elements::Float(vec![0.5, 0.125]),
    );
    let bytes = std::fs::read(&out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let o = file.tensor("o").unwrap().data().to_vec();
    let o = HostTensor::from_bytes(DType::F32, t[0].shape(), Layout::Bhsd, o).unwrap();
    let lse = file.tensor("lse").unwrap().data().to_vec();
    let lse: Vec<f32> = lse.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
    check("run", &s, &t, &program, &data, &o, &lse);

    let fails = |more: &[&str], words: &[&str]| {
        common::fails(&mut place.flashtune(&[&run[..], more].concat()), 2, words);
    };
    fails(&["--mask", "casual"], &["mask", "casual"]);
    fails(&["--mask", "kv <= qq"], &["`qq`", "did you mean"]);
    fails(&mask, &["`reach`"]);
    fails(&["--mask", "document"], &["no tensor `doc_kv`"]);
    fails(&["--score", "reach: int; score * reach", "--set", "reach=x"], &["--set reach=x", "int"]);
    fails(&["--score", "alibi"], &["the tensor `slope` has shape"]);
}

#[test]
fn programs_are_tuned_benched_and_then_dispatched_as_tuned() {
    let place = common::Place::new();
    let program = ["--mask", "chunked", "--score", "alibi", "--dtype", "f32", "--head-dim", "16", "--heads", "2"];
    let with = |command: &[&'static str], more: &[&'static str]| -> Vec<&'static str> {
        [command, &program, &["--device", "cpu", "--q-len", "150"], more].concat()
    };
    place.json(&with(&["tune"], &["--trials", "2"]));
    let explained = place.json(&with(&["explain"], &[])).to_string();
    assert!(explained.contains("tuned") && !explained.contains("nothing tuned fits"), "{explained}");
    let bench = place.json(&with(&["bench"], &["--rounds", "3"]));
    let case = &bench["points"][0]["case"];
    assert!(case["mask"].as_str().unwrap().contains("mask ="), "{bench}");
}
