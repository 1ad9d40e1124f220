//! The licences of what is compiled into the library and the command: which ones there may be, and their texts, which
//! go along with what is shipped.

use super::metadata::{Metadata, Package};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Licences of what hosts compile: those that ask for no more than their text to go along.
const LICENCES: [&str; 10] = [
    "MIT",
    "MIT-0",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    // Data: the root certificates of Mozilla, for `push` and `pull`.
    "CDLA-Permissive-2.0",
    "ISC",
    "Unicode-3.0",
    "Zlib",
];
/// Packages that are compiled for some others and whose licence is none of [`LICENCES`].
pub(crate) fn check(metadata: &Metadata, roots: &[&str]) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    for package in metadata.compiled(roots)? {
        let licence = package.license.as_deref().unwrap_or("none");
        if !is_allowed(licence) {
            faults.push(format!("{} {} has the licence {licence}, which is not listed", package.name, package.version));
        }
    }
    Ok(faults)
}

/// Whether a choice that an expression gives asks for listed licences alone. A word that is not understood is none.
fn is_allowed(expression: &str) -> bool {
    // Older manifests write a slash for OR.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let allowed = any_of(&mut rest);
    allowed && rest.is_empty()
}

/// `A OR B OR C`.
fn any_of(words: &mut &[&str]) -> bool {
    let mut allowed = all_of(words);
    while let Some(rest) = words.strip_prefix(&["OR"]) {
        *words = rest;
        allowed |= all_of(words);
    }
    allowed
}

/// `A AND (B OR C)`.
fn all_of(words: &mut &[&str]) -> bool {
    let mut allowed = one_of(words);
    while let Some(rest) = words.strip_prefix(&["AND"]) {
        *words = rest;
        allowed &= one_of(words);
    }
    allowed
}

/// A licence, one with an exception, or what stands in parentheses.
fn one_of(words: &mut &[&str]) -> bool {
    match *words {
        ["(", rest @ ..] => {
            *words = rest;
            let allowed = any_of(words);
            let Some(rest) = words.strip_prefix(&[")"]) else { return false };
            *words = rest;
            allowed
        }
        [name, "WITH", exception, rest @ ..] => {
            *words = rest;
            LICENCES.contains(&format!("{name} WITH {exception}").as_str())
        }
        [name, rest @ ..] => {
            *words = rest;
            LICENCES.contains(name)
        }
        [] => false,
    }
}

/// The texts of all licences and notices of packages from elsewhere, each once, with the packages that have it.
pub(crate) fn texts(packages: &[&Package]) -> Result<String> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut without = Vec::new();
    for package in packages.iter().filter(|package| package.source.is_some()) {
        let name = format!("{} {}", package.name, package.version);
        let folder = package.manifest_path.parent().context("a manifest lies in a folder")?;
        let mut files: Vec<_> = std::fs::read_dir(folder)
            .with_context(|| format!("cannot read {}", folder.display()))?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?;
        files.sort();
        let is_text = |file: &&std::path::PathBuf| {
            let name = file.file_name().and_then(|name| name.to_str()).unwrap_or("").to_ascii_uppercase();
            file.is_file()
                && ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"].iter().any(|w| name.starts_with(w))
        };
        let mut found = false;
        for file in files.iter().filter(is_text) {
            let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            let text = String::from_utf8_lossy(&bytes).replace("\r\n", "\n").trim().to_owned();
            let packages = texts.entry(text).or_default();
            if !packages.contains(&name) {
                packages.push(name.clone());
            }
            found = true;
        }
        if !found {
            without.push(format!("{name}: {}", package.license.as_deref().unwrap_or("none stated")));
        }
    }
    let mut all = "Licences of the packages that flashtune's library and command are built from.\n".to_owned();
    for (text, packages) in &texts {
        write!(all, "\n{}\n{}\n\n{text}\n", "=".repeat(80), packages.join(", "))?;
    }
    if !without.is_empty() {
        write!(all, "\n{}\nPackages without a text of their own\n\n{}\n", "=".repeat(80), without.join("\n"))?;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_read_as_choices() {
        for good in [
            "MIT",
            "MIT/Apache-2.0",
            "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
            "(MIT OR GPL-2.0) AND Unicode-3.0",
            "GPL-3.0 OR (ISC AND BSD-3-Clause)",
        ] {
            assert!(is_allowed(good), "{good}");
        }
        for bad in ["", "none", "GPL-3.0", "MIT AND GPL-3.0", "(MIT", "MIT)", "MIT WITH an-exception", "MIT Apache-2.0"]
        {
            assert!(!is_allowed(bad), "{bad}");
        }
    }

    #[test]
    fn a_text_of_two_packages_is_there_once() {
        let tmp = tempfile::tempdir().unwrap();
        let package = |name: &str, files: &[(&str, &str)]| {
            let folder = tmp.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            for (file, text) in files {
                std::fs::write(folder.join(file), text).unwrap();
            }
            let manifest = folder.join("Cargo.toml");
            let text = serde_json::json!({ "id": name, "name": name, "version": "1.0.0", "license": "MIT",
                "source": "registry", "manifest_path": manifest, "dependencies": [] });
            serde_json::from_value::<Package>(text).unwrap()
        };
        let a = package("a", &[("LICENSE-MIT", "text of MIT\r\nline"), ("README.md", "not this")]);
        let b = package("b", &[("license", "text of MIT\nline\n"), ("NOTICE", "a notice")]);
        let c = package("c", &[]);
        let own = Package { source: None, ..package("own", &[("LICENSE", "our own")]) };
        let all = texts(&[&a, &b, &c, &own]).unwrap();
        assert_eq!(all.matches("text of MIT\nline").count(), 1);
        assert!(all.contains("\na 1.0.0, b 1.0.0\n") && all.contains("\nb 1.0.0\n\na notice"), "{all}");
        assert!(all.ends_with("c 1.0.0: MIT\n") && !all.contains("not this") && !all.contains("our own"), "{all}");
    }
}
