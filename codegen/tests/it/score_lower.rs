//! What a program is lowered to computes what the interpreter computes: random programs, compiled by the C compiler.

use crate::random::{DECLARATIONS, Generator, has_functions};
use flashtune_codegen::abi::{SideArgs, SideTensorArg, declaration};
use flashtune_codegen::score::*;
use flashtune_codegen::{Language, Shape, TemplateSet};
use std::fmt::Write;
use std::process::Command;

/// A program with what it is evaluated on.
struct Case {
    program: Program,
    sizes: Shape,
    data: SideData,
    places: Vec<(At, f32)>,
}

/// C that prints the mask, the score's bits, and the tile's class for every place of every case.
fn source(cases: &[Case]) -> String {
    let set = TemplateSet::embedded();
    let header = header(&set);
    let mut c = format!("#include <stdint.h>\n#include <stdio.h>\n{header}\n");
    for (n, case) in cases.iter().enumerate() {
        let roots: Vec<Id> = case.program.mask().into_iter().chain(case.program.score()).collect();
        let code = lower(case.program.graph(), &roots);
        let code = code.print(Dialect::C, "v");
        let mut results = code.results().into_iter();
        let mask = case.program.mask().map_or("1".to_owned(), |_| results.next().unwrap());
        let score = case.program.score().map_or("score".to_owned(), |_| results.next().unwrap());
        let tiles = TileProgram::new(&case.program);
        let tile_code = lower(&tiles.graph, &[tiles.all_masked, tiles.all_visible]);
        let tile_code = tile_code.print(Dialect::C, "t");
        let arguments = "const Side *side, int32_t b, int32_t h, int32_t h_kv, int32_t q, int32_t kv, int32_t q_len, \
                         int32_t kv_len, float score, int32_t q_first, int32_t q_last, int32_t kv_first, \
                         int32_t kv_last";
        writeln!(c, "static void f{n}({arguments}) {{\n{}", code.all()).unwrap();
        writeln!(c, "printf(\"%d %08x \", (int)({mask}), (ft_bits){{.f = {score}}}.u);\n}}").unwrap();
        writeln!(c, "static void g{n}({arguments}) {{\n{}", tile_code.all()).unwrap();
        let [masked, visible] = &tile_code.results()[..] else { panic!("two results") };
        writeln!(c, "printf(\"%d %d\\n\", (int)({masked}), (int)({visible}));\n}}").unwrap();
    }
    c.push_str("int main(void) {\n");
    for (n, case) in cases.iter().enumerate() {
        c.push_str("{\n");
        side(&mut c, case.program.declarations(), &case.data);
        for (at, score) in &case.places {
            let At { b, h, q, kv } = at;
            let Shape { q_len, kv_len, .. } = case.sizes;
            let (q_last, kv_last) = ((q + 3).min(q_len - 1), (kv + 5).min(kv_len - 1));
            for f in ["f", "g"] {
                writeln!(
                    c,
                    "{f}{n}(&side, {b}, {h}, {}, {q}, {kv}, {q_len}, {kv_len}, {score:?}f, {q}, {q_last}, {kv}, \
                     {kv_last});",
                    h / case.sizes.group()
                )
                .unwrap();
            }
        }
        c.push_str("}\n");
    }
    c.push_str("return 0;\n}\n");
    c
}

/// The tensors and scalars of a case.
pub(crate) fn side(c: &mut String, declarations: &[Declaration], data: &SideData) {
    let (mut tensors, mut scalars) = (Vec::new(), Vec::new());
    for d in declarations {
        let Some(tensor) = data.tensors.get(&d.name) else {
            scalars.push(match data.scalars[&d.name] {
                Scalar::Int(x) => format!("{{.i = {x}ll}}"),
                Scalar::Float(x) => format!("{{.f = {x:?}f}}"),
            });
            continue;
        };
        let (ty, values): (&str, Vec<String>) = match (&tensor.elements, d.storage) {
            (Elements::Bool(x), _) => ("uint8_t", x.iter().map(|x| u8::from(*x).to_string()).collect()),
            (Elements::Int(x), Storage::I64) => {
                ("int64_t", x.iter().map(|x| format!("(int64_t){}ull", *x as u64)).collect())
            }
            (Elements::Int(x), _) => ("int32_t", x.iter().map(|x| x.to_string()).collect()),
            (Elements::Float(x), _) => ("float", x.iter().map(|x| format!("{x:?}f")).collect()),
        };
        writeln!(c, "static const {ty} {}[] = {{{}}};", d.name, values.join(", ")).unwrap();
        let mut strides = vec![0; tensor.shape.len()];
        let mut stride = 1;
        for (i, n) in tensor.shape.iter().enumerate().rev() {
            strides[i] = if *n == 1 { 0 } else { stride };
            stride *= n;
        }
        let list = |x: &[usize]| x.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        tensors.push(format!("{{{}, {{{}}}, {{{}}}}}", d.name, list(&strides), list(&tensor.shape)));
    }
    writeln!(c, "static const SideTensor tensors[] = {{{}}};", tensors.join(", ")).unwrap();
    writeln!(c, "static const SideScalar scalars[] = {{{}}};", scalars.join(", ")).unwrap();
    writeln!(c, "const Side side = {{tensors, scalars}};").unwrap();
}

/// What lowered statements call, with the argument structs that rendering puts in.
pub(crate) fn header(set: &TemplateSet) -> String {
    let text = set.files().find(|(name, _)| *name == "lib/cpu/score.h").unwrap().1;
    let side_args = declaration::<SideArgs>(Language::C);
    text.replace("@{ side_tensor }@", &declaration::<SideTensorArg>(Language::C)).replace("@{ side_args }@", &side_args)
}

pub(crate) fn compile_and_run(name: &str, text: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let (file, binary) = (dir.path().join("a.c"), dir.path().join("a"));
    std::fs::write(&file, text).unwrap();
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    // Undefined behaviour ends the program; contraction would round once where the interpreter rounds twice.
    let options =
        ["-std=gnu11", "-O0", "-ffp-contract=off", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-w", "-o"];
    let out = Command::new(&cc).args(options).arg(&binary).arg(&file).arg("-lm").output().unwrap();
    assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
    let run = Command::new(&binary).output().unwrap();
    assert!(run.status.success(), "{name}: {}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn lowered_c_computes_what_the_interpreter_computes() {
    let mut g = Generator::new(21);
    let mut cases = Vec::new();
    for round in 0..90 {
        g.functions = round % 3 == 0;
        let (mask, score) = (g.mask(1 + round % 5), g.score(1 + round % 5));
        let text = format!("{DECLARATIONS} mask = {}; score = {};", mask.text(), score.text());
        let sizes = g.sizes();
        let data = g.data(&sizes);
        let places = (0..12).map(|i| (g.place(&sizes), [0.75f32, -3.5, 40.0][i % 3])).collect();
        cases.push(Case { program: Program::parse(&text).unwrap(), sizes, data, places });
    }
    let mut lines = compile_and_run("random", &source(&cases)).into_iter();
    for case in &cases {
        let functions = has_functions(case.program.text());
        let tiles = TileProgram::new(&case.program);
        let roots = [tiles.all_masked, tiles.all_visible];
        let mut bound = Bound::new(&case.program, &case.sizes, &case.data, Precision::F32).unwrap();
        let mut tile = Evaluator::new(&tiles.graph, &roots, &case.sizes, &case.data, Precision::F32);
        for &(at, score) in &case.places {
            let line = lines.next().unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            let got = f32::from_bits(u32::from_str_radix(words[1], 16).unwrap());
            let want = bound.score(at, score as f64) as f32;
            let same = got == want || got.is_nan() && want.is_nan();
            // A function's last digit may differ, and what follows may make more of it: only then look away.
            let near = functions && ((got - want).abs() <= 1e-5 * (1.0 + want.abs()));
            let context = || format!("{at:?} {score} {:?}\n{}", case.sizes, case.program);
            if !functions {
                assert!(same, "score {got} is not {want} at {}", context());
                assert_eq!(words[0] == "1", bound.visible(at), "mask at {}", context());
            } else if bound.visible(at) == (words[0] == "1") {
                assert!(
                    same || near || !want.is_finite() || want.abs() > 1e6,
                    "score {got} is not {want} at {}",
                    context()
                );
            }
            let (q_last, kv_last) = ((at.q + 3).min(case.sizes.q_len - 1), (at.kv + 5).min(case.sizes.kv_len - 1));
            tile.go(at, [at.q.into(), q_last.into(), at.kv.into(), kv_last.into()], 0.0);
            if !functions {
                let class = (tile.bool(roots[0]), tile.bool(roots[1]));
                assert_eq!((words[2] == "1", words[3] == "1"), class, "tile at {}", context());
            }
        }
    }
    assert!(lines.next().is_none());
}

/// The functions of lib/cpu/score.h over their whole domain, and floats as ints.
#[test]
fn the_functions_are_as_near_as_they_say() {
    let set = TemplateSet::embedded();
    let header = header(&set);
    let text = format!(
        "#include <stdint.h>\n#include <stdio.h>\n{header}\nint main(void) {{ \
         for (uint64_t u = 0; u < 1ull << 32; u += 104729) {{\n\
         float x = (ft_bits){{.u = u}}.f, f[] = {{x, ft_exp2f(x), ft_log2f(x), ft_tanhf(x), ft_expf(x), ft_logf(x), \
         ft_sqrtf(x), ft_sigmoidf(x)}};\n\
         for (int i = 0; i < 8; i++) printf(\"%08x \", (ft_bits){{.f = f[i]}}.u);\n\
         printf(\"%lld %lld %lld %lld\\n\", (long long)ft_int_floor(x), (long long)ft_int_ceil(x), \
         (long long)ft_int_trunc(x),\n\
         (long long)ft_int_round(x)); }} return 0; }}"
    );
    let lines = compile_and_run("functions", &text);
    assert!(lines.len() > 40_000);
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let v: Vec<f32> = words[..8].iter().map(|w| f32::from_bits(u32::from_str_radix(w, 16).unwrap())).collect();
        let x = v[0] as f64;
        let ints: Vec<i64> = words[8..].iter().map(|w| w.parse().unwrap()).collect();
        assert_eq!(ints, [x.floor() as i64, x.ceil() as i64, x as i64, x.round_ties_even() as i64], "of {x}");
        for (got, want, ulps, floor) in [
            (v[1], x.exp2(), 3.0, 0.0),
            (v[2], x.log2(), 3.0, 6e-8),
            (v[3], x.tanh(), 4.0, 0.0),
            (v[4], x.exp(), 3.0, 0.0),
            (v[5], x.ln(), 4.0, 6e-8),
            (v[6], x.sqrt(), 0.0, 0.0),
            // Beyond 88.7 e^-x is infinite.
            (v[7], 1.0 / (1.0 + (-x).exp()), 5.0, 3e-39),
        ] {
            let rounded = want as f32;
            let ulp = if rounded.is_finite() { (rounded.next_up() - rounded) as f64 } else { 0.0 };
            let near = (got as f64 - want).abs() <= f64::max(ulps * ulp.abs(), floor) || got == rounded;
            assert!(near || got.is_nan() && want.is_nan(), "of {x}: {got} is not {want}");
        }
    }
}

/// What is the same for a row or a key is computed outside of the inner loop.
#[test]
fn statements_are_where_they_depend_on_the_least() {
    let text = "chunk: int in 1..4096; slope: float[heads]; doc: int[kv_len];
                mask = kv // chunk == (q + kv_len - q_len) // chunk and doc[kv] == doc[q];
                score = score * 0.5 + slope[h] * (kv - q);";
    let program = Program::parse(text).unwrap();
    let code = lower(program.graph(), &[program.mask().unwrap(), program.score().unwrap()]);
    for dialect in [Dialect::C, Dialect::Cuda] {
        let [head, row, key, score] =
            [Scope::Head, Scope::Row, Scope::Key, Scope::Score].map(|scope| code.print(dialect, "v").scope(scope));
        assert!(!score.contains('[') && !score.contains(" / "), "{score}");
        assert!(!score.contains("int64_t") && !score.contains('?'), "{score}");
        assert!(key.contains("kv / ") && row.contains("ft_floor_div32"), "{key}{row}");
        assert!(head.contains("slope") || head.contains("[h * "), "{head}");
    }
}
