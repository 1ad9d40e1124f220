//! What the gradient of a tensor or scalar gains by one score, and by the sink of one row, as the pieces that the
//! templates of such gradients paste.

use super::{Dialect, lower};
use crate::Language;
use crate::score::analysis::derive::{ByTensor, Derivative};
use crate::score::graph::Graph;
use crate::score::program::Program;
use crate::score::syntax::words::Id;
use std::collections::BTreeMap;

/// The derivatives of score and sink by what the program declares at a place. Of each load one term: what the
/// gradient by the changed score (or the sink) is multiplied by, and the place in the tensor.
pub(crate) fn term_fields(program: Option<&Program>, by: usize, language: Language) -> BTreeMap<&'static str, String> {
    let score = program.map_or_else(Derivative::of_nothing, Derivative::of_score).by(by);
    let sink = program.and_then(Derivative::of_sink).map(|d| d.by(by));
    let depends = |of: fn(&Graph, Id) -> bool| {
        let mut index = score.tensors.iter().flat_map(|t| &t.index);
        u32::from(index.any(|i| of(&score.graph, *i)))
    };
    let mut fields = BTreeMap::from([
        ("term_count", score.tensors.len().to_string()),
        ("term_sink_count", sink.as_ref().map_or(0, |d| d.tensors.len()).to_string()),
        // What is the same for all queries or all keys of a tile is added up before its place is looked at.
        ("term_place_by_query", depends(|g, i| g.depends(i).q || g.depends(i).score).to_string()),
        ("term_place_by_key", depends(|g, i| g.depends(i).kv || g.depends(i).score).to_string()),
    ]);
    let names = [
        ["term_code", "term_value", "term_factors", "term_places"],
        ["term_sink_code", "term_sink_value", "term_sink_factors", "term_sink_places"],
    ];
    for ((derivative, prefix), [code, value, factors, places]) in
        [(Some(&score), "d"), (sink.as_ref(), "e")].into_iter().zip(names)
    {
        let text = derivative.map_or_else(Texts::default, |d| Texts::of(d, prefix, language));
        fields.extend([(code, text.code), (value, text.value), (factors, text.factors), (places, text.places)]);
    }
    fields
}

/// Statements, the value that they derive, and of each term the derivative and the place.
struct Texts {
    code: String,
    value: String,
    factors: String,
    places: String,
}

impl Default for Texts {
    fn default() -> Self {
        let zero = || "0".to_owned();
        Self { code: String::new(), value: "0.0f".to_owned(), factors: zero(), places: zero() }
    }
}

impl Texts {
    fn of(derivative: &Derivative, prefix: &str, language: Language) -> Self {
        let terms = &derivative.tensors;
        let roots: Vec<Id> = [derivative.value]
            .into_iter()
            .chain(terms.iter().flat_map(|ByTensor { value, index, .. }| [*value].into_iter().chain(index.clone())))
            .collect();
        let code = lower(&derivative.graph, &roots);
        let print = code.print(if language == Language::C { Dialect::C } else { Dialect::Cuda }, prefix);
        let mut results = print.results().into_iter();
        let value = results.next().expect("the value");
        let (mut factors, mut places) = (Vec::new(), Vec::new());
        for term in terms {
            factors.push(results.next().expect("a derivative"));
            let index: Vec<String> = results.by_ref().take(term.index.len()).collect();
            let along = |(axis, i)| format!("term_place(args, {axis}, {i})");
            let sum: Vec<String> = index.into_iter().enumerate().map(along).collect();
            places.push(if sum.is_empty() { "0".to_owned() } else { sum.join(" + ") });
        }
        let none = Self::default();
        Self {
            code: print.all(),
            value,
            factors: if terms.is_empty() { none.factors } else { factors.join(", ") },
            places: if terms.is_empty() { none.places } else { places.join(", ") },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TemplateSet;

    #[test]
    fn templates_paste_every_piece_of_terms_and_no_other() {
        let set = TemplateSet::embedded();
        for (language, endings) in [(Language::C, [".c", ".h"]), (Language::Cuda, [".cu", ".cuh"])] {
            let texts = set.files().filter(|(name, _)| endings.iter().any(|e| name.ends_with(e)));
            let texts: String = texts.map(|(_, text)| text).collect();
            let mut pasted: Vec<&str> =
                texts.split("@{ term_").skip(1).map(|t| t.split(" }@").next().unwrap()).collect();
            pasted.sort_unstable();
            pasted.dedup();
            let fields = term_fields(None, 0, language);
            let names: Vec<&str> = fields.keys().map(|name| &name["term_".len()..]).collect();
            assert_eq!(names, pasted, "{language:?}");
        }
    }

    #[test]
    fn every_load_of_a_tensor_is_a_term_of_its_gradient() {
        let text = "t: float[heads, *]; u: float[*]; score = score + t[h, kv] * t[h, q] + u[b]; sink = t[h, 0];";
        let program = Program::parse(text).unwrap();
        let of = |by| term_fields(Some(&program), by, Language::Cuda);
        let t = of(0);
        assert_eq!(["term_count", "term_sink_count"].map(|f| t[f].as_str()), ["2", "1"]);
        assert_eq!(["term_place_by_query", "term_place_by_key"].map(|f| t[f].as_str()), ["1", "1"]);
        assert!(t["term_places"].contains("term_place(args, 0, h) + term_place(args, 1, kv)"), "{t:?}");
        let u = of(1);
        assert_eq!(["term_count", "term_sink_count"].map(|f| u[f].as_str()), ["1", "0"]);
        assert_eq!((&u["term_factors"][..], &u["term_places"][..]), ("1.0f", "term_place(args, 0, b)"));
        assert_eq!(["term_place_by_query", "term_place_by_key"].map(|f| u[f].as_str()), ["0", "0"]);
        let scalar = Program::parse("s: float; score = s * score;").unwrap();
        let s = term_fields(Some(&scalar), 0, Language::C);
        assert_eq!((&s["term_count"][..], &s["term_factors"][..], &s["term_places"][..]), ("1", "score", "0"));
    }
}
