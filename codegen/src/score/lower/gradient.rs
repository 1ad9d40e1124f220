//! A program with its derivative as the pieces that the templates of the backward pass paste, beside those of
//! [`super::pieces`] for its mask.

use super::pieces::LONG;
use super::stmt::Scope;
use super::{Dialect, Form, lower, lower_derivative};
use crate::Language;
use crate::score::analysis::derive::Derivative;
use crate::score::program::Program;
use std::collections::BTreeMap;

/// What becomes of a score, and its derivative by the score; without a program the score and 1.
pub(crate) fn gradient_fields(program: Option<&Program>, language: Language) -> BTreeMap<&'static str, String> {
    let derivative = program.map_or_else(Derivative::of_nothing, Derivative::of_score);
    // Gradients of what the program reads are no part of these kernels.
    let code = lower_derivative(&Derivative { tensors: Vec::new(), ..derivative }, Form::Single);
    let dialect = if language == Language::C { Dialect::C } else { Dialect::Cuda };
    let print = code.print(dialect, "g");
    let mut results = print.results().into_iter();
    let mut next = || results.next().expect("a value and its derivative");
    let both = [("gradient_value", next()), ("gradient_slope", next())];
    let text: Vec<(&'static str, String)> = match language {
        Language::Cuda => vec![("gradient_code", print.all())],
        Language::C => {
            let rows = |line: fn(&str, &str) -> String| -> String {
                print.kept(&code.kept_of_row).iter().map(|(ty, name)| line(ty, name)).collect()
            };
            let mask = program.and_then(|p| Some(lower(p.graph(), &[p.mask()?]))).unwrap_or_default();
            let statements =
                [&mask, &code].iter().map(|c| c.cost(&Scope::ALL) + 3 * c.kept_of_row.len()).sum::<usize>();
            vec![
                ("gradient_row_fields", rows(|ty, name| format!("    {ty} {name}[PANEL];\n"))),
                ("gradient_row_save", rows(|_, name| format!("rows->{name}[lane] = {name};\n"))),
                ("gradient_row_load", rows(|ty, name| format!("const {ty} {name} = rows->{name}[x];\n"))),
                ("gradient_uniform", print.scope(Scope::Input) + &print.scope(Scope::Head)),
                ("gradient_row", print.scope(Scope::Row)),
                ("gradient_column", print.scope(Scope::Key)),
                ("gradient_element", print.scope(Scope::Score)),
                ("gradient_long", u32::from(statements > LONG).to_string()),
            ]
        }
    };
    both.into_iter().chain(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TemplateSet;

    #[test]
    fn templates_paste_every_gradient_piece_and_no_other() {
        let set = TemplateSet::embedded();
        for (language, endings) in [(Language::C, [".c", ".h"]), (Language::Cuda, [".cu", ".cuh"])] {
            let texts = set.files().filter(|(name, _)| endings.iter().any(|e| name.ends_with(e)));
            let texts: String = texts.map(|(_, text)| text).collect();
            let mut pasted: Vec<&str> =
                texts.split("@{ gradient_").skip(1).map(|t| t.split(" }@").next().unwrap()).collect();
            pasted.sort_unstable();
            pasted.dedup();
            let program = Program::parse("mask = kv <= q; score = tanh(score);").unwrap();
            for program in [None, Some(&program)] {
                let fields = gradient_fields(program, language);
                let names: Vec<&str> = fields.keys().map(|name| &name["gradient_".len()..]).collect();
                assert_eq!(names, pasted);
            }
        }
    }

    #[test]
    fn without_a_change_the_score_stays_and_its_slope_is_one() {
        for program in [None, Some(Program::parse("mask = kv <= q;").unwrap())] {
            let fields = gradient_fields(program.as_ref(), Language::Cuda);
            assert_eq!((&fields["gradient_value"][..], &fields["gradient_slope"][..]), ("score", "1.0f"));
            assert_eq!(fields["gradient_code"], "");
        }
    }
}
