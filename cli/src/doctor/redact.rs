//! What a report leaves out before it is given to strangers: folders, the user's and the machine's name, and keys.

use serde_json::Value;

/// Names that are replaced wherever they stand alone.
pub(crate) struct Redactor {
    home: Option<String>,
    names: Vec<(String, &'static str)>,
}

impl Redactor {
    pub(crate) fn new() -> Self {
        let set = |name: &str| std::env::var(name).ok();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        Self::of(set("HOME"), set("USER").or_else(|| set("LOGNAME")), host)
    }

    fn of(home: Option<String>, user: Option<String>, host: Option<String>) -> Self {
        let name = |name: Option<String>, instead| {
            let name = name.map(|n| n.trim().to_owned()).filter(|n| n.len() > 1)?;
            Some((name, instead))
        };
        Self {
            home: home.map(|h| h.trim_end_matches('/').to_owned()).filter(|h| h.len() > 1),
            names: [name(user, "USER"), name(host, "HOST")].into_iter().flatten().collect(),
        }
    }

    /// Every text in a value.
    pub(crate) fn value(&self, value: Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(&text)),
            Value::Array(items) => items.into_iter().map(|item| self.value(item)).collect(),
            Value::Object(fields) => fields.into_iter().map(|(name, field)| (name, self.value(field))).collect(),
            other => other,
        }
    }

    /// A text: of each path its last name, of keys and hashes the first eight digits.
    pub(crate) fn text(&self, text: &str) -> String {
        let is_end = |c: char| c.is_whitespace() || ",;:()[]'\"`=<>|".contains(c);
        let (mut done, mut word) = (String::new(), String::new());
        for c in text.chars() {
            if is_end(c) {
                done += &self.word(&word);
                word.clear();
                done.push(c);
            } else {
                word.push(c);
            }
        }
        done + &self.word(&word)
    }

    fn word(&self, word: &str) -> String {
        if let Some(path) = word.strip_prefix('/').filter(|path| !path.is_empty()) {
            if self.home.as_deref() == Some(word.trim_end_matches('/')) {
                return "~".to_owned();
            }
            let mut names = path.trim_end_matches('/').rsplit('/');
            let last = names.next().unwrap_or_default();
            return match names.next() {
                None => word.to_owned(),
                Some(_) => format!("/.../{}", self.named(last)),
            };
        }
        if word.len() == 64 && word.bytes().all(|b| b.is_ascii_hexdigit()) {
            return format!("{}...", &word[..8]);
        }
        self.named(word)
    }

    /// Names where they stand alone: in `alice-build.art` and `alice@host`, and not in `malice`.
    fn named(&self, word: &str) -> String {
        self.names.iter().fold(word.to_owned(), |text, (name, instead)| replaced(&text, name, instead))
    }
}

fn replaced(text: &str, name: &str, instead: &str) -> String {
    let (mut done, mut rest, mut before) = (String::new(), text, None);
    while let Some(at) = rest.find(name) {
        let (begin, end) = rest.split_at(at);
        let end = &end[name.len()..];
        let joined = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let is_part = joined(begin.chars().next_back().or(before)) || joined(end.chars().next());
        done += begin;
        done += if is_part { name } else { instead };
        (rest, before) = (end, name.chars().next_back());
    }
    done + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_names_and_keys_are_left_out() {
        let of = |text: &str| {
            let some = |text: &str| Some(text.to_owned());
            Redactor::of(some("/home/alice"), some("alice"), some("build-7.corp\n")).text(text)
        };
        assert_eq!(of("cc 12.2 at /home/alice/bin/cc"), "cc 12.2 at /.../cc");
        assert_eq!(of("/home/alice/.cache/flashtune is writable"), "/.../flashtune is writable");
        assert_eq!(of("HOME=/home/alice:/srv/alice:/tmp"), "HOME=~:/.../USER:/tmp");
        assert_eq!(of("at build-7.corp, not build-7.corp2"), "at HOST, not build-7.corp2");
        assert_eq!(of(&format!("signed by {}", "ab".repeat(32))), "signed by abababab...");
        assert_eq!(of("alice@x and malice"), "USER@x and malice");
        assert_eq!(of("cpu: AMD EPYC (cpu-avx512), 120 MiB"), "cpu: AMD EPYC (cpu-avx512), 120 MiB");
    }

    #[test]
    fn every_text_of_a_report_is_looked_at() {
        let all = Redactor::of(None, Some("alice".to_owned()), None);
        let value = serde_json::json!({ "a": ["alice", { "b": "/x/y/z" }], "n": 1 });
        assert_eq!(all.value(value), serde_json::json!({ "a": ["USER", { "b": "/.../z" }], "n": 1 }));
    }
}
