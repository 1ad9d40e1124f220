//! A folder of templates that replace the embedded ones.

use crate::{Error, Result};
use flashtune_codegen::TemplateSet;
use std::collections::BTreeMap;
use std::path::Path;

/// The variable that names the folder.
pub const TEMPLATES_VARIABLE: &str = "FLASHTUNE_TEMPLATES";

/// File name endings of templates; other files of the folder are left alone.
const ENDINGS: [&str; 6] = ["c", "h", "cu", "cuh", "inc", "ptx"];

/// The embedded templates with those of a folder, read recursively, over them. A file's path inside the folder is its
/// name: `DIR/forward/cpu.c` replaces `forward/cpu.c`. A family's hash changes with what its
/// compiler sees, so results of different templates never mix.
///
/// # Errors
/// [`Error::Templates`] when the folder cannot be read or holds no template; a template error when one does not parse.
pub fn read_templates(folder: &Path) -> Result<TemplateSet> {
    let mut files = BTreeMap::new();
    read_into(folder, "", &mut files)?;
    if files.is_empty() {
        return Err(fail(folder, "the folder holds no template"));
    }
    Ok(TemplateSet::overlaid(files)?)
}

fn fail(path: &Path, message: impl ToString) -> Error {
    Error::Templates { path: path.to_owned(), message: message.to_string() }
}

fn read_into(folder: &Path, prefix: &str, files: &mut BTreeMap<String, String>) -> Result<()> {
    for entry in std::fs::read_dir(folder).map_err(|e| fail(folder, e))? {
        let entry = entry.map_err(|e| fail(folder, e))?;
        let path = entry.path();
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|n| !n.starts_with('.')) else { continue };
        let name = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}/{name}") };
        // Links are followed: a folder of links to edited files is a fair override.
        if path.is_dir() {
            read_into(&path, &name, files)?;
        } else if path.extension().and_then(|e| e.to_str()).is_some_and(|e| ENDINGS.contains(&e)) {
            files.insert(name, std::fs::read_to_string(&path).map_err(|e| fail(&path, e))?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_overlays_by_path_and_changes_the_hash() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("forward")).unwrap();
        std::fs::write(dir.path().join("forward/cpu.c"), "/* @{ header }@ */ int mine;").unwrap();
        std::fs::write(dir.path().join("notes.md"), "not a template").unwrap();
        let set = read_templates(dir.path()).unwrap();
        let embedded = TemplateSet::embedded();
        assert_ne!(set.hash(), embedded.hash());
        assert_eq!(set.files().count(), embedded.files().count());
        assert!(set.files().any(|(name, text)| name == "forward/cpu.c" && text.contains("mine")));
    }

    #[test]
    fn an_absent_or_empty_folder_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let e = read_templates(dir.path()).unwrap_err().to_string();
        assert!(e.contains("no template") && e.contains("forward/cpu.c"), "{e}");
        let gone = dir.path().join("gone");
        assert!(read_templates(&gone).unwrap_err().to_string().contains("gone"));
    }

    #[test]
    fn a_template_that_does_not_parse_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("broken.cu"), "<% if %>").unwrap();
        let e = read_templates(dir.path()).unwrap_err().to_string();
        assert!(e.contains("broken.cu"), "{e}");
    }
}
