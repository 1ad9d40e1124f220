//! Commands as text that a shell takes.

use std::path::PathBuf;

/// The command of this process.
pub(crate) fn typed() -> String {
    let mut words = std::env::args_os();
    let program = words.next().map(PathBuf::from);
    let program = program.and_then(|p| p.file_name().map(ToOwned::to_owned)).unwrap_or_else(|| "flashtune".into());
    let words = std::iter::once(program).chain(words).map(|word| quoted(&word.to_string_lossy()));
    words.collect::<Vec<_>>().join(" ")
}

/// A word as a shell takes it.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=+@%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_reach_the_program_as_they_were() {
        let words = ["", "a", "kv <= q and q - kv < 1024", "it's", "$HOME", "a;b", "*", "--mask", "~/x", "a\\b", "\n#"];
        let line = words.map(quoted).join(" ");
        let shell = std::process::Command::new("sh").args(["-c", &format!("printf '%s|' {line}")]).output().unwrap();
        assert_eq!(String::from_utf8(shell.stdout).unwrap(), words.map(|w| format!("{w}|")).concat());
    }
}
