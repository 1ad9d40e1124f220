//! The C header, generated from the documented items of `bindings/c`.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Where the header is checked in.
pub(crate) fn path(root: &Path) -> PathBuf {
    root.join("bindings/c/include/flashtune.h")
}

/// The header's text as the sources have it now.
pub(crate) fn generate(root: &Path) -> Result<String> {
    let folder = root.join("bindings/c");
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).map_err(anyhow::Error::msg)?;
    let builder = cbindgen::Builder::new().with_config(config).with_src(folder.join("src/lib.rs"));
    let mut text = Vec::new();
    builder.generate().context("bindings/c/src cannot be turned into a header")?.write(&mut text);
    Ok(String::from_utf8(text)?)
}

/// Writes the header.
pub(crate) fn write(root: &Path) -> Result<()> {
    let path = path(root);
    std::fs::write(&path, generate(root)?).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checked_in_header_is_what_the_sources_say() {
        let root = crate::root();
        let checked_in = std::fs::read_to_string(path(&root)).expect("the header is checked in");
        assert!(checked_in == generate(&root).unwrap(), "flashtune.h is stale: run `cargo xtask header`");
    }

    #[test]
    fn every_exported_function_is_in_the_header() {
        let root = crate::root();
        let header = generate(&root).unwrap();
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
