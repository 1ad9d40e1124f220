//! The C header, generated from the documented items of `bindings/c` by a test: what generates it (cbindgen, with a
//! parser of Rust) is half of what this program would have to be built from before anything else can begin.

use anyhow::Result;
use std::path::{Path, PathBuf};

/// Where the header is checked in.
pub(crate) fn path(root: &Path) -> PathBuf {
    root.join("bindings/c/include/flashtune.h")
}

/// Writes the header.
pub(crate) fn write(root: &Path) -> Result<()> {
    let mut test = super::cargo();
    test.args(["test", "--quiet", "--package", "xtask", "header::"]).env("FLASHTUNE_BLESS", "1");
    super::run(test)?;
    println!("{}", path(root).display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header's text as the sources have it now.
    fn generate(root: &Path) -> String {
        let folder = root.join("bindings/c");
        let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).expect("a configuration");
        let builder = cbindgen::Builder::new().with_config(config).with_src(folder.join("src/lib.rs"));
        let mut text = Vec::new();
        builder.generate().expect("bindings/c/src can be turned into a header").write(&mut text);
        String::from_utf8(text).expect("UTF-8")
    }

    #[test]
    fn the_checked_in_header_is_what_the_sources_say() {
        let (root, header) = (crate::root(), generate(&crate::root()));
        if std::env::var_os("FLASHTUNE_BLESS").is_some() {
            std::fs::write(path(&root), &header).expect("a writable checkout");
        }
        let checked_in = std::fs::read_to_string(path(&root)).expect("the header is checked in");
        assert!(checked_in == header, "flashtune.h is stale: run `cargo xtask header`");
    }

    #[test]
    fn every_exported_function_is_in_the_header() {
        let root = crate::root();
        let header = generate(&root);
        let mut found = 0;
        for entry in std::fs::read_dir(root.join("bindings/c/src")).unwrap() {
            let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
            for name in text.split("extern \"C\" fn ").skip(1).filter_map(|rest| rest.split('(').next()) {
                if name.starts_with("flashtune_") {
                    assert!(header.contains(&format!(" {name}(")) || header.contains(&format!("*{name}(")), "{name}");
                    found += 1;
                }
            }
        }
        assert!(found >= 8, "{found}");
    }
}
