use super::check_quantise;
use crate::compile::memory::compile_or_plant;
use crate::{CpuDevice, Descale, Device, Quantise, QuantiseOperand, ScaleKind, TensorView, compile, quantise_call};
use flashtune_codegen::{DType, Family, Kernel, MaskKind, Op, Problem, Schedule, ShapeBucket, TemplateSet};
use std::collections::BTreeMap;

fn problem(dtype: DType, dim: u32, dim_v: u32) -> Problem {
    let problem = Problem::forward_qk_v(dtype, dim, dim_v, MaskKind::FULL).unwrap();
    Problem { op: Op::Quantise, ..problem }
}

fn kernel(device: &dyn Device, problem: Problem) -> Kernel {
    let arch = device.fingerprint().arch;
    let schedule = Schedule::default_for(Family::QuantiseCpu, &problem, arch, &ShapeBucket::default()).unwrap();
    Kernel { problem, schedule, arch }
}

/// Every dtype and kind of head dim on the host processor: scales, means, codes, and that nothing else is written.
#[test]
fn codes_and_scales_are_those_of_the_elements() {
    let device = CpuDevice::open().unwrap();
    let compiler = device.compiler().unwrap();
    let templates = TemplateSet::embedded();
    let mut wrong = Vec::new();
    let dims = [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (59, 33), (16, 24), (1, 2)];
    for (n, (dim, dim_v)) in dims.into_iter().enumerate() {
        let kernel = kernel(&*device, problem(DType::ALL[n % 3], dim, dim_v));
        let artifact = compile::compile_with(&*compiler, &kernel, &templates).unwrap();
        let module = device.load(&artifact).unwrap();
        // Others in each run.
        let first: u64 = rand::random_range(0..1 << 40);
        for seed in first..first + 20 {
            if let Err(e) = check_quantise(&*device, &*module, seed).unwrap() {
                wrong.push(format!("{seed} {}: {e}", kernel.name()));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn faults_of_the_host_are_found() {
    let device = CpuDevice::open().unwrap();
    let embedded = TemplateSet::embedded();
    let text = embedded.files().find(|(name, _)| *name == "quantise/cpu.c").unwrap().1;
    let problem = problem(DType::Bf16, 32, 32);
    for (from, to) in [
        ("args->is_whole[tile->tensor] ? 0 : tile->unit", "0"),
        ("bits < 0x7f800000 ? bits : 0", "bits"),
        ("!largest ? 1 : scale", "scale"),
        ("sums[i] += is_finite(x[i]) ? x[i] : 0", "sums[i] += x[i]"),
        ("mean[i] /= args->kv_len", "mean[i] /= ROWS"),
        ("x[i] -= mean[i]", "x[i] += mean[i]"),
        ("x[i + step] = a - b;", "x[i + step] = b - a;"),
        ("x[i] *= root;", "x[i] *= 1;"),
        ("if (t == TENSOR_V || !args->cos) return;", "if (!args->cos) return;"),
        (": args->first_position[t] + row", ": row"),
        ("+ head * of_scales[1];", ";"),
        ("kind == OF_ROWS ? tile->head : tile->unit", "tile->unit"),
        ("row % together == 0) {", "row % together == 0 && row % 2 == 0) {"),
        ("of < row + together && of <", "of <= row + together && of <"),
        ("scales + row / together * apart", "scales + row * apart"),
        ("tile->unit * HEAD_DIM_V + i, of_column[i]", "tile->unit * HEAD_DIM_V + i, most"),
        ("scales + i * apart, scale", "scales, scale"),
        ("narrow_kv(x[i] * inverse[i])", "narrow_kv(x[i] * inverse[i] * 1.1f)"),
    ] {
        assert!(text.contains(from), "{from}");
        let set = BTreeMap::from([("quantise/cpu.c".to_owned(), text.replacen(from, to, 1))]);
        let kernel = kernel(&*device, problem);
        let artifact = compile_or_plant(&kernel, &TemplateSet::overlaid(set).unwrap()).unwrap();
        let module = device.load(&artifact).unwrap();
        let found = (0..60).any(|seed| check_quantise(&*device, &*module, seed).unwrap().is_err());
        assert!(found, "{to}");
    }
}

#[test]
fn what_no_kernel_takes_is_refused_by_name() {
    let view = |shape| TensorView::bhsd(64, DType::Bf16, shape);
    let operand = |shape: [u64; 4], kv_heads: u64| QuantiseOperand {
        from: view(shape),
        to: TensorView { dtype: DType::E4m3, ..view(shape) },
        scale: Descale::heads(64, [shape[0], kv_heads], [kv_heads as i64, 1]),
    };
    let (q, k, v) = (operand([2, 4, 5, 96], 2), operand([2, 2, 7, 96], 2), operand([2, 2, 7, 64], 2));
    let call = Quantise { q: Some(q), k: Some(k), v: Some(v), ..Quantise::default() };
    let problem = quantise_call(&call).unwrap().problem;
    assert_eq!(problem.to_string(), "quantise-bf16-d96v64-full");
    let refused = |call: Quantise, words: &[&str]| {
        let e = quantise_call(&call).unwrap_err().to_string();
        assert!(words.iter().all(|word| e.contains(word)), "{e}");
    };
    refused(Quantise::default(), &["q, k and v", "at least one"]);
    refused(Quantise { hadamard: true, ..call }, &["head_dim_qk", "powers of two", "leave the Hadamard matrix out"]);
    quantise_call(&Quantise { hadamard: true, q: None, k: None, ..call }).unwrap();
    refused(Quantise { mean: Some(crate::KeyMean::UNSAID), k: None, ..call }, &["mean", "no K"]);
    let f16 = QuantiseOperand { from: TensorView { dtype: DType::F16, ..v.from }, ..v };
    refused(Quantise { v: Some(f16), ..call }, &["v", "dtype", "bf16"]);
    let wide = QuantiseOperand { to: k.from, ..k };
    refused(Quantise { k: Some(wide), ..call }, &["k_out", "e4m3"]);
    let short = QuantiseOperand { scale: Descale { shape: [2, 4, 1], ..q.scale }, ..q };
    refused(Quantise { q: Some(short), ..call }, &["q_descale", "[2, 2, 1]"]);
    let shared = QuantiseOperand { scale: Descale { strides: [0, 1, 0], ..k.scale }, ..k };
    refused(Quantise { k: Some(shared), ..call }, &["k_descale", "stride"]);
    let whole = QuantiseOperand { scale: Descale { kind: ScaleKind::Tensor, ..shared.scale }, ..shared };
    quantise_call(&Quantise { k: Some(whole), ..call }).unwrap();
    let by = |of: QuantiseOperand, kind: ScaleKind| {
        let shape = kind.sizes(of.from.shape, 2);
        let [_, heads, units] = shape.map(|n| n as i64);
        QuantiseOperand { scale: Descale { address: 64, kind, shape, strides: [heads * units, units, 1] }, ..of }
    };
    for kind in [ScaleKind::Token, ScaleKind::Block(64), ScaleKind::Block(128)] {
        quantise_call(&Quantise { q: Some(by(q, kind)), k: Some(by(k, kind)), ..call }).unwrap();
        let e = &["v_descale", "rows of a scale", "quantise V by channel"];
        refused(Quantise { v: Some(by(v, kind)), ..call }, e);
    }
    quantise_call(&Quantise { v: Some(by(v, ScaleKind::Channel)), ..call }).unwrap();
    refused(Quantise { k: Some(by(k, ScaleKind::Channel)), ..call }, &["k_descale", "by channel"]);
    refused(Quantise { k: Some(by(k, ScaleKind::Block(96))), ..call }, &["k_descale", "power of two"]);
    refused(Quantise { k: Some(by(k, ScaleKind::Block(256))), ..call }, &["k_descale", "at most 128 rows"]);
    refused(Quantise { q: Some(operand([2, 3, 5, 96], 2)), ..call }, &["heads"]);
}
