//! Programs as hosts state them: a text for each part, and what the call brings for them. What a text reads without
//! declaring it is declared by what is given under that name.

use super::{Program, ProgramBuilder};
use crate::score::syntax::builtin::builtin;
use crate::score::syntax::error::ProgramError;
use crate::score::syntax::parse::parse;
use crate::score::syntax::words::{Declaration, Var};

/// The parts of a program: each the text of an expression, which may come after declarations and names, or the name of
/// a built-in program ([`crate::score::BUILTINS`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Texts<'a> {
    /// Which keys a query attends to.
    pub mask: Option<&'a str>,
    /// What goes into the softmax in place of the score.
    pub score: Option<&'a str>,
    /// The logit of a key without a value.
    pub sink: Option<&'a str>,
}

impl Texts<'_> {
    /// The program. A name that no text declares means what `given` says of it; axes that `given` leaves open take the
    /// length of the one coordinate that indexes them.
    ///
    /// # Errors
    /// As [`Program::parse`].
    pub fn program(&self, given: &[Declaration]) -> Result<Program, ProgramError> {
        let parts = [("mask", self.mask), ("score", self.score), ("sink", self.sink)];
        let texts: Vec<(Option<&'static str>, &str)> = parts
            .into_iter()
            .filter_map(|(name, text)| Some((name, text?)))
            .map(|(name, text)| match builtin(text.trim()) {
                Some(b) => (None, b.text),
                None => (Some(name), text),
            })
            .collect();
        let mut declared = Vec::new();
        for (result, text) in &texts {
            declared.extend(parse(text, *result)?.declarations.into_iter().map(|(d, _)| d.name));
        }
        if let Some(d) = given.iter().find(|d| Var::from_name(&d.name).is_some()) {
            let expected = "give it a name that the language has no meaning for";
            return Err(ProgramError::new(format!("`{}` is given a value", d.name), expected));
        }
        let mut builder = ProgramBuilder::new();
        for declaration in given.iter().filter(|d| !declared.contains(&d.name)) {
            builder = builder.declare(declaration.clone())?;
        }
        for (result, text) in texts {
            builder = match result {
                Some("mask") => builder.mask(text)?,
                Some("score") => builder.score(text)?,
                Some(_) => builder.sink(text)?,
                None => builder.text(text)?,
            };
        }
        builder.infer_axes().build()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::{Axis, Storage};

    #[test]
    fn what_is_given_is_declared_unless_the_text_does_it() {
        let any = |name: &str, storage, rank| Declaration::tensor(name, storage, &vec![Axis::Any; rank]);
        let given = [any("slope", Storage::F32, 1), any("doc", Storage::I32, 2), any("unused", Storage::Bool, 1)];
        let texts = Texts {
            mask: Some("doc: i32[batch, kv_len] nondecreasing; doc[b, q] == doc[b, kv]"),
            score: Some("score + slope[h] * (kv - q)"),
            sink: None,
        };
        let program = texts.program(&given).unwrap();
        let found: Vec<String> = program.declarations().iter().map(ToString::to_string).collect();
        assert_eq!(found, ["doc: i32[batch, kv_len] nondecreasing", "slope: f32[heads]"]);
        // Two coordinates along one axis leave its length open.
        let open = Texts { mask: Some("doc[b, q] == doc[b, kv]"), ..Texts::default() }.program(&given).unwrap();
        assert_eq!(open.declarations()[0].to_string(), "doc: i32[batch, *]");
        let cap = Texts { score: Some("soft_cap"), ..Texts::default() }.program(&[]).unwrap();
        assert_eq!(cap.declarations()[0].to_string(), "cap: f32 usually in 0..50");
        let e = Texts { mask: Some("docs[b, q] == 1"), ..Texts::default() }.program(&given).unwrap_err();
        assert!(e.to_string().contains("docs"), "{e}");
        assert!(Texts::default().program(&given).unwrap().is_plain());
        let e = Texts::default().program(&[any("q_idx", Storage::F32, 1)]).unwrap_err().to_string();
        assert!(e.contains("`q_idx` is given a value"), "{e}");
    }

    #[test]
    fn built_in_names_are_suggested_for_texts_of_one_word() {
        let told = |mask: Option<&str>, score: Option<&str>| {
            let given = [Declaration::scalar("cap", Storage::F32)];
            Texts { mask, score, sink: None }.program(&given).unwrap_err().to_string()
        };
        assert!(told(Some("documnt"), None).contains("did you mean `document`?"));
        assert!(told(Some(" casual "), None).contains("did you mean `causal`?"));
        assert!(told(None, Some("soft_cup")).contains("did you mean `soft_cap`?"));
        // In a longer text it would be no program.
        assert!(told(None, Some("score + soft_cup")).contains("declare it first"));
        assert!(told(Some("nothing_like_it"), None).contains("declare it first"));
    }

    #[test]
    fn a_mask_that_is_brought_apart_makes_the_same_program() {
        let slope = [Declaration::tensor("slope", Storage::F32, &[Axis::Any])];
        let score = Some("near = q - kv; select(near * near > 9, score + slope[h] * near, score)");
        for mask in ["document", "kv <= q and q - kv < 9", "(q - kv) % 7 == 0 or (q - kv) % 7 == 3"] {
            let apart = Texts { mask: Some(mask), ..Texts::default() }.program(&[]).unwrap();
            let rest = Texts { score, sink: Some("slope[h]"), ..Texts::default() }.program(&slope).unwrap();
            let together = Texts { mask: Some(mask), score, sink: Some("slope[h]") }.program(&slope).unwrap();
            assert_eq!(rest.with_mask_of(&apart).unwrap(), together);
            // Of one that changes scores as well, the mask alone is taken.
            assert_eq!(rest.with_mask_of(&together).unwrap(), together);
            assert_eq!(together.mask_only().unwrap(), apart);
        }
        let other = Program::mask_of("slope: i32[heads]; kv < slope[h]").unwrap();
        let rest = Texts { score, ..Texts::default() }.program(&slope).unwrap();
        let e = rest.with_mask_of(&other).unwrap_err().to_string();
        assert!(e.contains("`slope` is declared twice"), "{e}");
    }

    #[test]
    fn a_program_of_too_many_tensors_says_so() {
        let names: Vec<String> = (0..33).map(|i| format!("t{i}")).collect();
        let given: Vec<Declaration> =
            names.iter().map(|n| Declaration::tensor(n.as_str(), Storage::F32, &[Axis::Heads])).collect();
        let sum = names.iter().fold("score".to_owned(), |s, n| format!("{s} + {n}[h]"));
        let e = Texts { score: Some(&sum), ..Texts::default() }.program(&given).unwrap_err().to_string();
        assert!(e.contains("33 side tensors") && e.contains("at most 32"), "{e}");
    }
}
