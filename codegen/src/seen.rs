//! What the compiler sees of a template: its text with all includes in place, without comments, blank lines and
//! indentation. The hash of it is what stored results are held to, so that a reworded comment, a moved file or another
//! family's kernel leaves them valid.
//!
//! Two texts of different meaning never have the same hash. Where a text has something that this file does not follow
//! (a tag other than a plain include, a raw string, a spliced comment opener), all of it counts as it stands.

use memchr::{memchr, memchr2_iter, memchr3_iter, memmem};
use std::collections::BTreeMap;

/// More text than this is not followed: files that include each other twice over grow without end.
const LARGEST: usize = 16 << 20;

/// The first 16 hex digits of a hash over what is seen of a template of these files; over all files where that cannot
/// be said.
pub(crate) fn hash(files: &BTreeMap<String, String>, template: &str) -> String {
    let mut expanded = String::new();
    let hasher = match expand(files, template, &mut Vec::new(), &mut expanded) {
        Some(()) => {
            let stripped = stripped(&expanded);
            let mut hasher = blake3::Hasher::new_derive_key(match stripped {
                Some(_) => "flashtune template seen 1",
                None => "flashtune template whole 1",
            });
            hasher.update(stripped.unwrap_or(expanded).as_bytes());
            hasher
        }
        None => {
            let mut hasher = blake3::Hasher::new_derive_key("flashtune template set 1");
            for text in [template].into_iter().chain(files.iter().flat_map(|(name, text)| [&**name, text])) {
                // Lengths keep names and texts apart.
                hasher.update(&(text.len() as u64).to_le_bytes());
                hasher.update(text.as_bytes());
            }
            hasher
        }
    };
    hasher.finalize().to_hex()[..16].to_owned()
}

/// Appends a file with its includes in place and without the comments of the template language. `None` for what is not
/// followed: a file that is missing or includes itself, other tags, values that are more than a name.
fn expand<'a>(
    files: &'a BTreeMap<String, String>,
    name: &'a str,
    open: &mut Vec<&'a str>,
    out: &mut String,
) -> Option<()> {
    if open.contains(&name) {
        return None;
    }
    open.push(name);
    let mut rest = files.get(name)?.as_str();
    while let Some(at) = next_tag(rest) {
        out.push_str(&rest[..at]);
        let close = match &rest[at..at + 2] {
            "<%" => "%>",
            "<#" => "#>",
            _ => "}@",
        };
        let inside = &rest[at + 2..at + 2 + rest[at + 2..].find(close)?];
        let end = at + 2 + inside.len() + 2;
        match close {
            "%>" => {
                let name = inside.trim().strip_prefix("include")?.trim();
                let name = name.strip_prefix('"')?.strip_suffix('"')?;
                if name.contains(['"', '\\']) {
                    return None;
                }
                expand(files, name, open, out)?;
            }
            // These would trim the text around them.
            "#>" if inside.starts_with('-') || inside.ends_with('-') => return None,
            "#>" => {}
            _ => {
                let is_name = |word: &str| word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
                if !is_name(inside.trim()) {
                    return None;
                }
                out.push_str(&rest[at..end]);
            }
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    open.pop();
    (out.len() <= LARGEST).then_some(())
}

/// Where the next tag opens. One pass: a search for each kind reads on to the end of the file for those that are not
/// there.
fn next_tag(text: &str) -> Option<usize> {
    let text = text.as_bytes();
    memchr2_iter(b'<', b'@', text).find(|&at| matches!(text[at..], [b'<', b'%' | b'#', ..] | [b'@', b'{', ..]))
}

/// C or CUDA C without comments, blank lines and indentation. `None` where it is not certain what is a comment.
///
/// A comment that holds a value (`@{ }@`) stays: what is rendered there may have lines of its own.
fn stripped(text: &str) -> Option<String> {
    let text = text.as_bytes();
    // A comment's opener in two lines, and a character in three.
    let doubtful = |rest: &[u8]| matches!(rest, [b'/', b'\\', b'\n', ..] | [b'\\', b'\r', ..] | [b'?', b'?', b'/', ..]);
    if memchr3_iter(b'/', b'\\', b'?', text).any(|at| doubtful(&text[at..])) {
        return None;
    }
    let mut out: Vec<u8> = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        // Everything else stays as it is.
        let plain = text[at..].iter().position(|byte| matches!(byte, b'/' | b'@' | b'"' | b'\''));
        let plain = plain.unwrap_or(text.len() - at);
        out.extend_from_slice(&text[at..at + plain]);
        at += plain;
        let rest = &text[at..];
        let Some(&byte) = rest.first() else { break };
        let before = out.last().copied().unwrap_or(b'\n');
        let comment = match rest {
            [b'/', b'/', ..] => Some(line_comment(rest)),
            [b'/', b'*', ..] => Some(2 + find(&rest[2..], b"*/")? + 2),
            _ => None,
        };
        let length = match (comment, byte) {
            (Some(_), _) if in_header_name(&out) => return None,
            (Some(length), _) if find(&rest[..length], b"@{").is_none() => {
                // As the compiler takes it.
                out.push(b' ');
                at += length;
                continue;
            }
            (Some(length), _) => length,
            (None, b'@') if rest.starts_with(b"@{") => find(rest, b"}@")? + 2,
            // A raw string knows other ends.
            (None, b'"') if before == b'R' => return None,
            // May be the separator of a number's digits.
            (None, b'\'') if before.is_ascii_alphanumeric() || before == b'_' => return None,
            (None, b'"' | b'\'') => literal(rest)?,
            _ => 1,
        };
        out.extend_from_slice(&rest[..length]);
        at += length;
    }
    let text = String::from_utf8(out).ok()?;
    let mut lines = String::with_capacity(text.len());
    // What a backslash joins to the line before: a macro's body, or a string, to which every blank belongs.
    let mut joined = false;
    for line in text.split('\n') {
        let ended = line.trim_end();
        let joins = ended.ends_with('\\');
        if joined || joins {
            lines.push_str(line);
            lines.push('\n');
        } else if !ended.is_empty() {
            lines.push_str(ended.trim_start());
            lines.push('\n');
        }
        joined = joins;
    }
    Some(lines)
}

/// C or CUDA C without comments, and with line breaks only around directives and in macros: texts that differ in how
/// they are laid out have equal tokens. The text itself where it is not certain what is a comment.
pub(crate) fn tokens(text: &str) -> String {
    let Some(lines) = stripped(text) else { return text.to_owned() };
    let mut out = String::with_capacity(lines.len());
    let mut joined = false;
    for line in lines.lines() {
        let alone = joined || line.starts_with('#') || line.ends_with('\\');
        if alone && !out.ends_with('\n') {
            out.push('\n');
        }
        out.push_str(line.trim_end_matches(' '));
        out.push(if alone { '\n' } else { ' ' });
        joined = line.ends_with('\\');
    }
    out
}

/// Bytes of a comment to the end of its line, and of the lines that a backslash joins to it.
fn line_comment(text: &[u8]) -> usize {
    let mut end = 0;
    loop {
        end += memchr(b'\n', &text[end..]).unwrap_or(text.len() - end);
        if end == text.len() || !text[..end].trim_ascii_end().ends_with(b"\\") {
            return end;
        }
        end += 1;
    }
}

/// Bytes of a string or a character with its quotes; `None` when its line ends first.
fn literal(text: &[u8]) -> Option<usize> {
    let mut at = 1;
    loop {
        match text.get(at)? {
            b'\\' => at += 2,
            b'\n' => return None,
            byte if *byte == text[0] => return Some(at + 1),
            _ => at += 1,
        }
    }
}

/// Whether the last line is inside the angle brackets of an `#include`, where `//` is part of a path.
fn in_header_name(out: &[u8]) -> bool {
    let start = out.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    let line = out[start..].trim_ascii_start();
    line.starts_with(b"#") && find(line, b"include").is_some() && line.contains(&b'<') && !line.contains(&b'>')
}

fn find(text: &[u8], word: &[u8]) -> Option<usize> {
    memmem::find(text, word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_those_of_any_layout() {
        let laid_out = "#define F(x) \\\n    (x)\nint a = F(1, // One.\n          2);\n\n  int b;\n";
        let plain = "#define F(x) \\\n    (x)\nint a = F(1, 2); int b;";
        assert_eq!(tokens(laid_out), tokens(plain));
        assert_eq!(tokens(plain), "\n#define F(x) \\\n    (x)\nint a = F(1, 2); int b; ");
        let others = [plain.replace("(x)\n", "(x) \\\n"), plain.replace("F(1, 2)", "\"F(1,  2)\""), "/\\\n/ a".into()];
        for other in &others {
            assert_ne!(tokens(other), tokens(plain));
        }
        assert_eq!(tokens(&others[2]), others[2]);
    }

    fn files(texts: &[(&str, &str)]) -> BTreeMap<String, String> {
        texts.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    fn seen(text: &str) -> Option<String> {
        let mut out = String::new();
        let all = files(&[("a", text), ("b", "int b;\n"), ("self", "<% include \"self\" %>")]);
        expand(&all, "a", &mut Vec::new(), &mut out)?;
        stripped(&out)
    }

    #[test]
    fn comments_blank_lines_and_indentation_are_not_seen() {
        let plain = "int x;\nint b;\nint y = 1;\nreturn  x;\n";
        for text in [
            "int x;\n<% include \"b\" %>\nint y = 1;\nreturn  x;",
            "// what x is\n\n\nint x; // of it\n  <% include \"b\" %>\n\tint y = 1;   \n    return  x;\n// the \\\n  end",
            "int x;/* a\n b\n c */\nint b;<# of y #>\nint y = 1;\nreturn/**/ x;",
            "<# <% include \"nothing\" %> #>int x;\nint b;\n/* \" */int y = 1; // don't\nreturn  x;",
        ] {
            assert_eq!(seen(text).as_deref(), Some(plain), "{text}");
        }
    }

    #[test]
    fn strings_macros_and_values_keep_their_text() {
        for text in [
            "asm(\"// not a comment /* either\");\n",
            "char c = '\"'; char d = '\\''; f(\"\\\"//\");\n",
            "#define A \\\n\n",
            "#define A \\\n    b \\\n    // c\n",
            "f(\"one \\\n   two\");\n",
            "/* @{ header }@ */\n",
            "int n = @{ n }@;\n",
        ] {
            let kept = seen(text).unwrap();
            assert!(kept.trim_end() == text.trim_end() || text.contains("// c"), "{text:?}: {kept:?}");
        }
        // A macro that ends is not one that goes on.
        assert_ne!(seen("#define A \\\n\nint x;"), seen("#define A \\\nint x;"));
        assert_ne!(seen("#define A \\\n// c\nint x;"), seen("#define A \\\nint x;"));
        assert_ne!(seen("f(\"a  b\");"), seen("f(\"a b\");"));
        assert_ne!(seen("int ab;"), seen("int a/**/b;"));
    }

    #[test]
    fn what_is_not_certain_counts_as_it_stands() {
        for text in [
            "f(R\"(// text)\");",
            "int n = 1'000;",
            "#error don't",
            "/\\\n/ a comment",
            "/* without end",
            "#include <sys//types.h>",
            "??/",
            "<% if x %>a<% endif %>",
            "a <#- b #>",
            "@{ x | upper }@",
            "<% include \"absent\" %>",
            "<% include \"self\" %>",
            "<% include [\"b\"] %>",
        ] {
            assert_eq!(seen(text), None, "{text}");
            let [one, same, other] = [text.to_owned(), text.to_owned(), format!("{text} // more")]
                .map(|text| hash(&files(&[("a", &text), ("b", "int b;\n")]), "a"));
            assert!(one == same && one != other, "{text}");
        }
    }

    #[test]
    fn a_file_may_be_moved_and_others_may_change() {
        let before = files(&[("a", "int a;\n<% include \"lib/b\" %>\n"), ("lib/b", "int b;"), ("c", "int c;")]);
        let after = files(&[("a", "int a;\n<% include \"b\" %>\n"), ("b", "  int b; // b"), ("c", "int d;")]);
        assert_eq!(hash(&before, "a"), hash(&after, "a"));
        assert_ne!(hash(&before, "c"), hash(&after, "c"));
        assert_ne!(hash(&before, "a"), hash(&before, "c"));
    }
}
