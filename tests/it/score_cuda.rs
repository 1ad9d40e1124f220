//! What score programs are lowered to in CUDA C compiles, without a GPU.

use crate::common;
use crate::random::{DECLARATIONS, Generator};
use flashtune_codegen::abi::{SideTensorArg, declaration};
use flashtune_codegen::score::{
    BUILTINS, Derivative, Dialect, Form, Id, Program, TileProgram, lower, lower_derivative,
};
use flashtune_codegen::{Language, Source, TemplateSet};
use flashtune_runtime::Compiler;
use flashtune_runtime::compile::Nvrtc;
use std::fmt::Write;

/// One kernel for each program, which stores every result.
fn source(programs: &[Program]) -> String {
    let set = TemplateSet::embedded();
    let file = |wanted: &str| set.files().find(|(name, _)| *name == wanted).expect("it is embedded").1;
    let mut text = format!(
        "{}\n{}\nstruct Side {{ SideTensor tensors[12]; SideScalar scalars[12]; }};\n\
         template <typename T> __device__ void keep(float *out, int &n, T x) {{ out[n++] = float(x); }}\n",
        file("lib/cuda/attention/types.cuh"),
        file("lib/cuda/score/score.cuh").replace("@{ side_tensor }@", &declaration::<SideTensorArg>(Language::Cuda))
    );
    for (i, program) in programs.iter().enumerate() {
        let tiles = TileProgram::new(program);
        let roots: Vec<Id> = [program.mask(), program.score(), program.sink()].into_iter().flatten().collect();
        let ends = [tiles.all_masked, tiles.all_visible, tiles.kv_begin, tiles.kv_end];
        let (code, tile) = (lower(program.graph(), &roots), lower(&tiles.graph, &ends));
        let (code, tile) = (code.print(Dialect::Cuda, "v"), tile.print(Dialect::Cuda, "t"));
        let _ = writeln!(
            text,
            "extern \"C\" __global__ void program{i}(const __grid_constant__ Side arg, float *out, float score, int b, \
             int h, int h_kv, int q, int kv, int q_len, int kv_len, int q_first, int q_last, int kv_first, \
             int kv_last) {{\n\
             const Side *side = &arg; int n = 0;\n{}{}",
            code.all(),
            tile.all()
        );
        for result in code.results().into_iter().chain(tile.results()) {
            let _ = writeln!(text, "keep(out, n, {result});");
        }
        text.push_str("}\n");
        derivative(&mut text, i, program);
    }
    text
}

/// A kernel that stores a program's derivatives, lowered for threads that hold scores of neighbouring keys.
fn derivative(text: &mut String, i: usize, program: &Program) {
    let code = lower_derivative(&Derivative::of_score(program), Form::AlongKeys);
    let code = code.print(Dialect::Cuda, "d");
    let _ = writeln!(
        text,
        "extern \"C\" __global__ void derivative{i}(const __grid_constant__ Side arg, float *out, float raw, \
         float scale, int b, int h, int h_kv, int q, int kv_first, int q_len, int kv_len) {{\n\
         const Side *side = &arg; const AlongKeys<false> along; const auto ft_capf = ft_cap<false>;\n\
         const auto ft_along_bf16 = [&](const u16* p, int at, i64 stride, int nth) {{ \
         return along.bf16(p, at, stride, nth); }};\n\
         const auto ft_along_f16 = [&](const u16* p, int at, i64 stride, int nth) {{ \
         return along.f16(p, at, stride, nth); }};\n\
         const auto ft_along_f32 = [&](const float* p, int at, i64 stride, int nth) {{ \
         return along.f32(p, at, stride, nth); }};\n\
         for (int offset = 0, n = 0; offset < 4; offset++) {{\n\
         const int kv = kv_first + offset; const float score = raw * scale;\n{}",
        code.all()
    );
    for result in code.results() {
        let _ = writeln!(text, "keep(out, n, {result});");
    }
    text.push_str("}\n}\n");
}

#[test]
fn lowered_programs_compile_for_every_generation() {
    if common::nvrtc_or_skip("lowered_programs_compile_for_every_generation").is_none() {
        return;
    }
    let nvrtc = Nvrtc::find().expect("checked above");
    let mut programs: Vec<Program> = BUILTINS.iter().map(|b| Program::parse(b.text).unwrap()).collect();
    let mut g = Generator::new(41);
    for round in 0..40 {
        let (mask, score) = (g.mask(1 + round % 6), g.score(1 + round % 6));
        let text = format!("{DECLARATIONS} mask = {}; score = {};", mask.text(), score.text());
        programs.push(Program::parse(&text).unwrap());
    }
    for arch in ["sm_80", "sm_90a"] {
        let source = Source {
            name: format!("programs.{arch}"),
            entry: "program0".into(),
            language: Language::Cuda,
            options: [format!("--gpu-architecture={arch}"), "--std=c++17".into(), "--ptxas-options=-v".into()].to_vec(),
            text: source(&programs),
        };
        let (bytes, _) = nvrtc.compile(&source).unwrap_or_else(|e| panic!("{e}"));
        assert!(bytes.starts_with(b"\x7fELF"));
    }
}
