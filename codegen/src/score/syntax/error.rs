//! What can be wrong with a program, with the place in its text.

use std::fmt;
use std::ops::Range;

/// A program that cannot be taken: what is wrong, where, and what was expected there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramError {
    /// What is wrong.
    pub message: String,
    /// What was expected or what to do instead.
    pub expected: String,
    /// The place, for a program that came as text.
    pub place: Option<Place>,
}

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The number of the line, from 1.
    pub row: usize,
    /// The first character of it on the line, from 1.
    pub column: usize,
    /// The line, or what is around the place in a long one.
    pub excerpt: String,
    /// Characters of the excerpt before the place.
    pub indent: usize,
    /// Characters of the excerpt in the place, at least 1.
    pub length: usize,
}

/// Characters of an excerpt.
const SHOWN: usize = 100;

impl Place {
    /// The place of some bytes of a text.
    pub fn of(text: &str, span: &Range<usize>) -> Self {
        let start = boundary(text, span.start);
        let begin = text[..start].rfind('\n').map_or(0, |i| i + 1);
        let line = text[begin..].lines().next().unwrap_or("");
        let end = boundary(text, span.end.min(begin + line.len())).max(start);
        let before = text[begin..start].chars().count();
        let cut = if line.chars().count() <= SHOWN { 0 } else { before.saturating_sub(SHOWN / 2) };
        let indent = before - cut;
        let length = text[start..end].chars().count().min(SHOWN.saturating_sub(indent)).max(1);
        let excerpt = line.chars().skip(cut).take(SHOWN).collect();
        Self { row: text[..begin].matches('\n').count() + 1, column: before + 1, excerpt, indent, length }
    }
}

/// The last place at or before this one that is between two characters.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0)
}

impl ProgramError {
    /// An error at no place.
    pub fn new(message: impl Into<String>, expected: impl Into<String>) -> Self {
        Self { message: message.into(), expected: expected.into(), place: None }
    }

    /// An error at some bytes of a text.
    pub fn at(text: &str, span: &Range<usize>, message: impl Into<String>, expected: impl Into<String>) -> Self {
        Self { place: Some(Place::of(text, span)), ..Self::new(message, expected) }
    }
}

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(Place { row, column, excerpt, indent, length }) = &self.place else {
            return write!(f, "{}; {}", self.message, self.expected);
        };
        match row {
            1 => write!(f, "column {column}")?,
            _ => write!(f, "line {row}, column {column}")?,
        }
        let marks = " ".repeat(*indent) + &"^".repeat(*length);
        write!(f, ": {}; {}\n  {excerpt}\n  {marks}", self.message, self.expected)
    }
}

impl std::error::Error for ProgramError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_characters_and_lines() {
        let text = "mask =\n  é + kw";
        let at = text.find("kw").unwrap();
        let e = ProgramError::at(text, &(at..at + 2), "unknown name `kw`", "did you mean `kv`?").to_string();
        assert_eq!(e, "line 2, column 7: unknown name `kw`; did you mean `kv`?\n    é + kw\n        ^^");
        let end = ProgramError::at("kv <", &(4..4), "the text ends", "expected a value").to_string();
        assert!(end.ends_with("  kv <\n      ^"), "{end}");
    }

    #[test]
    fn long_lines_are_cut_around_the_place() {
        let text = format!("{}!{}", "a".repeat(5000), "b".repeat(5000));
        let e = ProgramError::at(&text, &(5000..5001), "bad", "good").to_string();
        assert!(e.len() < 400 && e.contains("column 5001"), "{e}");
        let lines: Vec<&str> = e.lines().collect();
        assert_eq!(lines[1].find('!'), lines[2].find('^'));
    }
}
