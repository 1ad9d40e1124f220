//! Derivatives agree with finite differences, and say how a bias' gradient is reduced.

use crate::random::{DECLARATIONS, Generator};
use flashtune_codegen::score::*;

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
    assert!(!is_one && tensors.is_empty() && d.score.is_some());
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
