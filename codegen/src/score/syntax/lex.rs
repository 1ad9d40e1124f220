//! From text to tokens.

use super::error::ProgramError;
use std::ops::Range;

/// A word of the text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Token {
    /// A whole number.
    Int(i64),
    /// A number with a point or an exponent.
    Float(f32),
    /// A name or a keyword.
    Name(String),
    /// An operator or a bracket.
    Sign(&'static str),
    /// The end of the text.
    End,
}

impl Token {
    /// The token as a message names it.
    pub(crate) fn describe(&self) -> String {
        match self {
            Token::Int(x) => format!("`{x}`"),
            Token::Float(x) => format!("`{x:?}`"),
            Token::Name(x) => format!("`{x}`"),
            Token::Sign(x) => format!("`{x}`"),
            Token::End => "the end of the text".to_owned(),
        }
    }
}

/// Operators and brackets, longer ones first.
const SIGNS: [&str; 23] = [
    "//", "<=", ">=", "==", "!=", "..", "+", "-", "*", "/", "%", "<", ">", "(", ")", "[", "]", ",", ";", ":", "=", "?",
    "^",
];

/// What other languages write, and how it is written here.
const FOREIGN: [(&str, &str); 6] = [
    ("&&", "write `and`"),
    ("||", "write `or`"),
    ("&", "write `and`, which binds less tightly than a comparison"),
    ("|", "write `or`, which binds less tightly than a comparison"),
    ("!", "write `not`"),
    ("~", "write `not`"),
];

/// The tokens of a text with their bytes, the last one the end. White space and what follows a `#` on a line is left
/// out.
///
/// # Errors
/// A character that starts no token, or a number that does not fit.
pub(crate) fn tokens(text: &str) -> Result<Vec<(Token, Range<usize>)>, ProgramError> {
    let mut out = Vec::new();
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        if c.is_whitespace() {
            at += c.len_utf8();
        } else if c == '#' {
            at += rest.find('\n').unwrap_or(rest.len());
        } else if c.is_ascii_digit() {
            let (token, length) = number(text, at)?;
            out.push((token, at..at + length));
            at += length;
        } else if c.is_alphabetic() || c == '_' {
            let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            out.push((Token::Name(rest[..length].to_owned()), at..at + length));
            at += length;
        } else if let Some(sign) = SIGNS.iter().find(|s| rest.starts_with(**s)) {
            out.push((Token::Sign(sign), at..at + sign.len()));
            at += sign.len();
        } else {
            let foreign = FOREIGN.iter().find(|(s, _)| rest.starts_with(s));
            let (length, expected) =
                foreign.map_or((c.len_utf8(), "expected a name, a number or an operator"), |f| (f.0.len(), f.1));
            let what = &rest[..length];
            return Err(ProgramError::at(text, &(at..at + length), format!("`{what}` has no meaning here"), expected));
        }
    }
    out.push((Token::End, text.len()..text.len()));
    Ok(out)
}

/// The number at a place, and its length. `1..2` is two numbers around `..`.
fn number(text: &str, at: usize) -> Result<(Token, usize), ProgramError> {
    let bytes = &text.as_bytes()[at..];
    let digits = |from: usize| bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
    let mut length = digits(0);
    let mut is_float = false;
    if bytes.get(length) == Some(&b'.') && bytes.get(length + 1) != Some(&b'.') {
        is_float = true;
        length += 1 + digits(length + 1);
    }
    if let Some(b'e' | b'E') = bytes.get(length) {
        let sign = usize::from(matches!(bytes.get(length + 1), Some(b'+' | b'-')));
        let exponent = digits(length + 1 + sign);
        if exponent > 0 {
            is_float = true;
            length += 1 + sign + exponent;
        }
    }
    let (word, span) = (&text[at..at + length], at..at + length);
    let too_large = |limit: &str| ProgramError::at(text, &span, format!("`{word}` is too large"), limit);
    if is_float {
        let x: f32 = word.parse().map_err(|_| too_large("expected a number"))?;
        if x.is_infinite() {
            return Err(too_large("a float is at most 3.4028235e38; write `inf` for infinity"));
        }
        return Ok((Token::Float(x), length));
    }
    let x = word.parse().map_err(|_| too_large("an int is at most 9223372036854775807; write a float with a point"))?;
    Ok((Token::Int(x), length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        tokens(text).unwrap().iter().map(|(t, _)| t.describe()).collect()
    }

    #[test]
    fn numbers_names_and_signs() {
        assert_eq!(
            words("a<=1.5e3//2 # c\n0..3")[..8],
            ["`a`", "`<=`", "`1500.0`", "`//`", "`2`", "`0`", "`..`", "`3`"]
        );
        assert_eq!(words("2.")[0], "`2.0`");
        assert_eq!(words("1e")[..2], ["`1`", "`e`"]);
    }

    #[test]
    fn what_does_not_fit_or_has_no_meaning_says_so() {
        for (text, expect) in [
            ("99999999999999999999", "too large"),
            ("1e60", "inf"),
            ("a & b", "write `and`"),
            ("a || b", "`or`"),
            ("a $", "`$`"),
        ] {
            let e = tokens(text).unwrap_err().to_string();
            assert!(e.contains(expect), "{text}: {e}");
        }
    }
}
