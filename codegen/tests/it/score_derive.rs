//! Derivatives agree with finite differences, and say how a bias' gradient is reduced.

use crate::random::{DECLARATIONS, Generator, has_functions};
use crate::score_lower::{compile_and_run, side};
use flashtune_codegen::score::*;
use flashtune_codegen::{Shape, TemplateSet};
use std::fmt::Write;

/// The slope of a function at a place, if it has one there: differences to both sides agree.
fn slope(mut f: impl FnMut(f64) -> f64, x: f64) -> Option<f64> {
    let step = 1e-6 * x.abs().max(1.0);
    let (before, here, after) = (f(x - step), f(x), f(x + step));
    let (left, right) = ((here - before) / step, (after - here) / step);
    let smooth = (left - right).abs() <= 1e-3 * (1.0 + left.abs()) && left.abs() < 1e4 && here.abs() < 1e6;
    smooth.then_some((left + right) / 2.0)
}

#[test]
fn derivatives_by_the_score_and_by_tensors_are_those_of_finite_differences() {
    let mut g = Generator::new(5);
    let (mut by_score, mut by_tensor) = (0, 0);
    for round in 0..3000 {
        let text = format!("{DECLARATIONS} score = {};", g.score(1 + round % 5).text());
        let program = Program::parse(&text).unwrap();
        // Beside numbers of this size a step is lost in rounding.
        if ["1073741", "92233720", "e9", "e18", "wide", "any"].iter().any(|large| program.text().contains(large)) {
            continue;
        }
        let derivative = Derivative::of_score(&program);
        let sizes = g.sizes();
        let data = g.data(&sizes);
        let at = g.place(&sizes);
        let x = 0.731;
        let value = |data: &SideData, x: f64| Bound::new(&program, &sizes, data, Precision::F64).unwrap().score(at, x);
        let evaluate = |roots: &[Id]| {
            let mut e = Evaluator::new(&derivative.graph, roots, &sizes, &data, Precision::F64);
            e.go(at, [0; 4], x);
            roots.iter().map(|r| e.float(*r)).collect::<Vec<f64>>()
        };
        let near = |got: f64, want: f64| (got - want).abs() <= 1e-3 * (1.0 + want.abs());

        if let Some(want) = slope(|x| value(&data, x), x) {
            let got = derivative.score.map_or(0.0, |id| evaluate(&[id])[0]);
            assert!(near(got, want) || !got.is_finite(), "{got} is not {want}\n{program}{data:?}");
            by_score += u32::from(want != 0.0 && got.is_finite());
        }

        // Every element that is read, with the sum over the places that read it.
        for name in ["slope", "bias"] {
            let Some(tensor) = program.declarations().iter().position(|d| d.name == name) else { continue };
            let loads: Vec<&ByTensor> = derivative.tensors.iter().filter(|t| t.tensor == tensor).collect();
            let Some(first) = loads.first() else { continue };
            let place = |load: &ByTensor| {
                let mut e = Evaluator::new(&derivative.graph, &load.index, &sizes, &data, Precision::F64);
                e.go(at, [0; 4], x);
                data.tensors[name].place(load.index.iter().map(|i| e.int(*i))).unwrap()
            };
            let here = place(first);
            let got: f64 = loads.iter().filter(|l| place(l) == here).map(|l| evaluate(&[l.value])[0]).sum();
            let Elements::Float(values) = &data.tensors[name].elements else { panic!("a float tensor") };
            // The step is that of fp32, in which elements are kept.
            let (step, middle) = (2f32.powi(-10), values[here]);
            let base = value(&data, x);
            let moved = |delta: f32| {
                let mut data = data.clone();
                let Some(Elements::Float(values)) = data.tensors.get_mut(name).map(|t| &mut t.elements) else {
                    return 0.0;
                };
                values[here] = middle + delta;
                let by = values[here] as f64 - middle as f64;
                (value(&data, x) - base) / by
            };
            let (left, right) = (moved(-step), moved(step));
            // Where the way to a finite value leads over an infinite one, there is no derivative to be had.
            if got.is_finite()
                && base.abs() < 1e6
                && (left - right).abs() < 1e-2 * (1.0 + left.abs())
                && left.abs() < 1e3
            {
                let want = (left + right) / 2.0;
                assert!((got - want).abs() <= 2e-2 * (1.0 + want.abs()), "{name}: {got} is not {want}\n{program}");
                by_tensor += 1;
            }
        }
    }
    assert!(by_score > 500 && by_tensor > 300, "{by_score} {by_tensor}");
}

#[test]
fn derivatives_at_ties_are_those_of_autograd() {
    // By the score at a place, and by t[0] where the program has it.
    let at = |text: &str, x: f64, t: f32| {
        let program = Program::parse(&format!("t: float[1]; score = {text};")).unwrap();
        let d = Derivative::of_score(&program);
        let sizes = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 1, kv_len: 1, mask: Default::default() };
        let data = SideData::default().tensor("t", &[1], Elements::Float(vec![t]));
        let roots: Vec<Id> = d.score.into_iter().chain(d.tensors.iter().map(|t| t.value)).collect();
        let mut e = Evaluator::new(&d.graph, &roots, &sizes, &data, Precision::F64);
        e.go(At::default(), [0; 4], x);
        (d.score.map_or(0.0, |id| e.float(id)), d.tensors.iter().map(|t| e.float(t.value)).sum::<f64>())
    };
    let by_score = |text: &str, x: f64| at(text, x, 0.0).0;
    assert_eq!([-1.0, 0.0, 2.0].map(|x| by_score("abs(score)", x)), [-1.0, 0.0, 1.0]);
    for function in ["min", "max"] {
        let text = format!("{function}(score, 3.0)");
        assert_eq!(by_score(&text, 3.0), 0.5, "{text}");
        assert_eq!(by_score(&text, 2.0) + by_score(&text, 4.0), 1.0, "{text}");
        assert_eq!(at(&format!("{function}(score, t[0])"), 1.5, 1.5), (0.5, 0.5));
        assert_eq!(at(&format!("{function}(2.0 * score, score + 1.0)"), 1.0, 0.0).0, 1.5);
    }
    let clamp = "clamp(score, -1.0, 2.0)";
    assert_eq!([-1.5, -1.0, 0.0, 2.0, 2.5].map(|x| by_score(clamp, x)), [0.0, 1.0, 1.0, 1.0, 0.0]);
    let low = "clamp(score, t[0], 2.0)";
    assert_eq!([-1.5, -1.0, 2.0, 2.5].map(|x| at(low, x, -1.0)), [(0.0, 1.0), (1.0, 0.0), (1.0, 0.0), (0.0, 0.0)]);
    let swapped = "max(min(score, t[0]), -2.0)";
    assert_eq!([-2.0, 1.0, 1.5].map(|x| at(swapped, x, 1.0)), [(1.0, 0.0), (1.0, 0.0), (0.0, 1.0)]);
    // Functions at their ends: infinite where a root or a logarithm is, 0 where a sigmoid is flat, and 0 of a leap.
    let inf = f64::INFINITY;
    assert_eq!([0.0, 4.0].map(|x| by_score("sqrt(score)", x)), [inf, 0.25]);
    assert_eq!([0.0, 4.0, -2.0].map(|x| by_score("log(score)", x)), [inf, 0.25, -0.5]);
    assert_eq!([0.0, -inf, inf].map(|x| by_score("exp(score)", x)), [1.0, 0.0, inf]);
    assert_eq!([0.0, -inf, inf].map(|x| by_score("sigmoid(score)", x)), [0.25, 0.0, 0.0]);
    assert!(by_score("sqrt(score)", -1.0).is_nan());
    assert_eq!([0.5, 2.0].map(|x| by_score("2.0 * score + int_floor(score)", x)), [2.0, 2.0]);
    for function in ["int_floor", "int_ceil", "int_trunc", "int_round"] {
        let program = Program::parse(&format!("score = float({function}(score));")).unwrap();
        assert!(Derivative::of_score(&program).score.is_none(), "{function}");
    }
    // Of what does not change with the score, what a tensor holds is clamped, and numbers are bounds.
    let of_tensor = "score + clamp(t[0], -1.0, 2.0)";
    assert_eq!([-1.5, -1.0, 0.0, 2.0, 2.5].map(|t| at(of_tensor, 0.0, t).1), [0.0, 1.0, 1.0, 1.0, 0.0]);
    assert_eq!([-1.0, 0.0, 3.0].map(|t| at("score + max(t[0], 0.0)", 0.0, t).1), [0.0, 0.5, 1.0]);
    assert_eq!([-2.0, 0.0, 2.0].map(|t| at("score * abs(t[0])", 3.0, t).1), [-3.0, 0.0, 3.0]);
    // What a condition reads has no part in it.
    assert_eq!(by_score("select(score > 1.0, 2.0, 5.0)", 1.0), 0.0);
    assert_eq!(by_score("select(score > 1.0, 2.0 * score, 5.0 * score)", 1.0), 5.0);
}

#[test]
fn the_built_ins_have_the_derivatives_of_the_book() {
    let text = |name: &str| {
        let program = Program::parse(builtin(name).unwrap().text).unwrap();
        let d = Derivative::of_score(&program);
        let one = |id: Id| d.graph.as_float(id) == Some(1.0);
        (d.score.is_some_and(one), d.tensors.clone(), d)
    };
    let (is_one, tensors, _) = text("alibi");
    assert!(is_one);
    assert_eq!(tensors[0].summed, [Var::B, Var::Q, Var::Kv]);
    let (is_one, tensors, d) = text("additive_bias");
    assert!(is_one && tensors[0].summed.is_empty());
    assert_eq!(d.graph.as_float(tensors[0].value), Some(1.0));
    let (_, tensors, _) = text("relative_bias");
    assert_eq!(tensors[0].axes, [GradientAxis::Coordinate(Var::H), GradientAxis::Scattered]);
    assert_eq!(tensors[0].summed, [Var::B, Var::Q, Var::Kv]);
    let (is_one, tensors, d) = text("soft_cap");
    assert!(!is_one && d.score.is_some());
    // By the cap, a scalar, which has no index.
    assert!(tensors.len() == 1 && tensors[0].index.is_empty() && tensors[0].summed.len() == 4);
    // A mask alone leaves the score as it is.
    assert!(text("causal").0);
    let sinks = Program::parse(builtin("attention_sinks").unwrap().text).unwrap();
    let d = Derivative::of_sink(&sinks).unwrap();
    assert!(d.score.is_none());
    assert_eq!(d.tensors[0].summed, [Var::B, Var::Q, Var::Kv]);
    // A bias of KV heads is summed over the query heads of each.
    let kv_bias = Program::score_of("t: float[kv_heads, kv_len]; score + t[h_kv, kv]").unwrap();
    assert_eq!(Derivative::of_score(&kv_bias).tensors[0].summed, [Var::B, Var::H, Var::Q]);
}

/// A program with its derivatives, and where they are evaluated.
struct Case {
    program: Program,
    derivative: Derivative,
    sizes: Shape,
    data: SideData,
    places: Vec<(At, f32)>,
}

/// What fragments find in scope in CUDA C, in C: a cap is its tanh, whichever polynomial a kernel takes.
const FRAGMENTS: &str = "
typedef struct { float factor; } CapSeries;
static CapSeries cap_series(float cap, float factor) { return (CapSeries){factor}; }
static float ft_capf(float x, float cap, float factor, CapSeries s) { return cap * ft_tanhf(x * s.factor); }
static float ft_along_f32(const float *p, int offset, int64_t stride, int nth) { return p[offset * stride]; }
";

/// C that prints the bits of all results of every case at every place, once for each form.
fn source(cases: &[Case]) -> String {
    let set = TemplateSet::embedded();
    let header = crate::score_lower::header(&set);
    let mut c = format!("#include <math.h>\n#include <stdint.h>\n#include <stdio.h>\n{header}\n{FRAGMENTS}\n");
    let arguments = "const Side *side, int32_t b, int32_t h, int32_t h_kv, int32_t q, int32_t kv, int32_t q_len, \
                     int32_t kv_len, float score, int32_t kv_first, int32_t offset, float raw, float scale";
    for (n, case) in cases.iter().enumerate() {
        for (f, form) in [Form::Single, Form::Fragments, Form::AlongKeys].into_iter().enumerate() {
            let code = lower_derivative(&case.derivative, form);
            let code = code.print(Dialect::C, "v");
            writeln!(c, "static void f{n}_{f}({arguments}) {{\n{}", code.all()).unwrap();
            for result in code.results() {
                writeln!(c, "printf(\"%08x \", (ft_bits){{.f = {result}}}.u);").unwrap();
            }
            writeln!(c, "puts(\"\");\n}}").unwrap();
        }
    }
    c.push_str("int main(void) {\n");
    for (n, case) in cases.iter().enumerate() {
        c.push_str("{\n");
        side(&mut c, case.program.declarations(), &case.data);
        for (At { b, h, q, kv }, score) in &case.places {
            let (h_kv, Shape { q_len, kv_len, .. }) = (h / case.sizes.group(), case.sizes);
            let (kv_first, raw) = (kv / 4 * 4, score * 4.0);
            let at = format!("&side, {b}, {h}, {h_kv}, {q}, {kv}, {q_len}, {kv_len}, {score:?}f");
            for f in 0..3 {
                writeln!(c, "f{n}_{f}({at}, {kv_first}, {}, {raw:?}f, 0.25f);", kv - kv_first).unwrap();
            }
        }
        c.push_str("}\n");
    }
    c.push_str("return 0;\n}\n");
    c
}

#[test]
fn lowered_derivatives_are_those_of_interpreter_and_differences() {
    let mut g = Generator::new(31);
    let mut cases = Vec::new();
    let random = (0..90).map(|round| {
        let mut g = Generator::new(900 + round as u64);
        g.functions = round % 3 == 0;
        format!("{DECLARATIONS} score = {};", g.score(1 + round % 5).text())
    });
    let capped = "score = cap * tanh(score / cap) + slope[h] * (kv - q) + bias[h, q, kv];";
    let texts = random.chain([format!("{DECLARATIONS} {capped}")]);
    for text in texts {
        let program = Program::parse(&text).unwrap();
        let (sizes, derivative) = (g.sizes(), Derivative::of_score(&program));
        let data = g.data(&sizes);
        let places = (0..8).map(|i| (g.place(&sizes), [0.75f32, -3.5, 40.0][i % 3])).collect();
        cases.push(Case { program, derivative, sizes, data, places });
    }
    let mut lines = compile_and_run("derivatives", &source(&cases)).into_iter();
    let (mut exact, mut fragments, mut differences) = (0, 0, 0);
    for case in &cases {
        let text = case.program.text();
        let functions = has_functions(text);
        // Beside numbers of this size sums of fragments, and steps, are lost in rounding.
        let large = ["1073741", "92233720", "e9", "e18", "wide", "any"].iter().any(|large| text.contains(large));
        let d = &case.derivative;
        let by_tensors = d.tensors.iter().map(|t| Some(t.value));
        let roots: Vec<Option<Id>> = [Some(d.value), d.score].into_iter().chain(by_tensors).collect();
        let ids: Vec<Id> = roots.iter().copied().flatten().collect();
        let mut e = Evaluator::new(&d.graph, &ids, &case.sizes, &case.data, Precision::F32);
        let mut bound = Bound::new(&case.program, &case.sizes, &case.data, Precision::F64).unwrap();
        for &(at, score) in &case.places {
            e.go(at, [0; 4], score.into());
            let want: Vec<f64> = roots.iter().map(|id| id.map_or(0.0, |id| e.float(id))).collect();
            let tame = want.iter().all(|x| x.is_finite() && x.abs() < 1e4);
            for form in [Form::Single, Form::Fragments, Form::AlongKeys] {
                let line = lines.next().unwrap();
                let got = line.split_whitespace().map(|w| f32::from_bits(u32::from_str_radix(w, 16).unwrap()));
                let got: Vec<f64> = got.map(f64::from).collect();
                let context = || format!("{form:?} {at:?} {score}: {got:?} is not {want:?}\n{text}");
                assert_eq!(got.len(), want.len());
                let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
                let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 2e-3 * (1.0 + b.abs());
                if form == Form::Single && !functions {
                    assert!(got.iter().zip(&want).all(same), "{}", context());
                    exact += 1;
                } else if tame && !large {
                    assert!(got.iter().zip(&want).all(near), "{}", context());
                    fragments += u32::from(form != Form::Single);
                }
                if let Some(slope) = slope(|x| bound.score(at, x), score.into()).filter(|_| tame && !large) {
                    assert!((got[1] - slope).abs() <= 5e-3 * (1.0 + slope.abs()), "{slope} {}", context());
                    differences += u32::from(slope != 0.0);
                }
            }
        }
    }
    assert!(lines.next().is_none());
    assert!(exact > 300 && fragments > 300 && differences > 200, "{exact} {fragments} {differences}");
}
