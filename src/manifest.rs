//! Files that list problems with sizes: what a process met untuned, what it is to preload, what is to be tuned.
//!
//! One JSON object per line with `problem` and `shape`, and for how many calls it stood (`calls`); other fields are for
//! readers. Files of several processes can be put after one another.

use crate::{Error, Result};
use flashtune_codegen::omitted::is_default;
use flashtune_codegen::{CallSizes, PageClass, Problem, Shape, ShapeBucket};
use flashtune_runtime::dispatch::Untuned;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// One problem with the sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ManifestEntry {
    /// What is computed.
    pub problem: Problem,
    /// The sizes; of a ragged batch those of a usual sequence.
    pub shape: Shape,
    /// How keys lie, where the batch is ragged.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pages: PageClass,
    /// Calls that it stands for.
    #[serde(default)]
    pub calls: u64,
}

impl ManifestEntry {
    /// One call of a problem at some sizes.
    pub fn new(problem: Problem, sizes: impl Into<CallSizes>) -> Self {
        let CallSizes { shape, pages } = sizes.into();
        Self { problem, shape, pages, calls: 0 }
    }

    /// What a kernel is chosen by.
    pub fn sizes(&self) -> CallSizes {
        CallSizes { shape: self.shape, pages: self.pages }
    }
}

impl std::fmt::Display for ManifestEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.problem, self.sizes())
    }
}

/// Reads a file of entries: one for each problem and class of sizes, those with the most calls first; entries of one
/// class are added up.
///
/// # Errors
/// [`Error::Manifest`] with the line; [`Error::ManifestFile`] when the file cannot be read.
pub fn read_manifest(path: &Path) -> Result<Vec<ManifestEntry>> {
    let error = |line, message: String| Error::Manifest { path: path.to_path_buf(), line, message };
    let text = std::fs::read_to_string(path).map_err(|source| match source.kind() {
        // It can be read, and is no text.
        ErrorKind::InvalidData => error(0, source.to_string()),
        _ => unreadable(path, source),
    })?;
    let mut entries: Vec<ManifestEntry> = Vec::new();
    let mut classes: HashMap<(Problem, ShapeBucket), usize> = HashMap::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let entry: ManifestEntry = serde_json::from_str(line).map_err(|e| error(i + 1, e.to_string()))?;
        let valid = entry.problem.validate().and_then(|()| entry.shape.validate());
        valid.map_err(|e| error(i + 1, e.to_string()))?;
        if entry.shape.mask.kind() != entry.problem.mask {
            let message =
                format!("the mask of the shape is {}, that of the problem {}", entry.shape.mask, entry.problem.mask);
            return Err(error(i + 1, message));
        }
        // Whatever the device: on one unit the classes of ragged batches are as many as on any other.
        let class = (entry.problem, ShapeBucket::of_call(&entry.problem, &entry.sizes(), 1));
        match classes.get(&class) {
            Some(&known) => entries[known].calls = entries[known].calls.saturating_add(entry.calls),
            None => {
                classes.insert(class, entries.len());
                entries.push(entry);
            }
        }
    }
    // Stable: what was met first goes first among equals.
    entries.sort_by_key(|e| std::cmp::Reverse(e.calls));
    Ok(entries)
}

/// Writes entries to a file, in place of what it had.
///
/// # Errors
/// [`Error::ManifestFile`] with the system's reason.
pub fn write_manifest(path: &Path, entries: &[ManifestEntry]) -> Result<()> {
    let text = lines(path, entries)?;
    std::fs::write(path, text).map_err(|e| unwritable(path, e))
}

/// Appends classes to a file, in one write: processes may share it.
///
/// # Errors
/// [`Error::ManifestFile`] with the system's reason.
pub(crate) fn append_untuned(path: &Path, untuned: &[Untuned]) -> Result<()> {
    let text = lines(path, untuned)?;
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut f| f.write_all(text.as_bytes())).map_err(|e| unwritable(path, e))
}

/// Entries as the file has them, one on each line.
fn lines<T: Serialize>(path: &Path, entries: &[T]) -> Result<String> {
    let mut text = String::new();
    for entry in entries {
        let line = serde_json::to_string(entry);
        let error =
            |e: serde_json::Error| Error::Manifest { path: path.to_path_buf(), line: 0, message: e.to_string() };
        text.push_str(&line.map_err(error)?);
        text.push('\n');
    }
    Ok(text)
}

fn unreadable(path: &Path, source: std::io::Error) -> Error {
    let remedy = "check the path; `Engine::write_untuned`, FLASHTUNE_UNTUNED and `flashtune tune --manifest` write \
                  such files";
    Error::ManifestFile { action: "read", path: path.to_path_buf(), source, remedy }
}

fn unwritable(path: &Path, source: std::io::Error) -> Error {
    Error::ManifestFile {
        action: "write",
        path: path.to_path_buf(),
        source,
        remedy: "name a file in a writable folder",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::score::Program;
    use flashtune_codegen::{DType, Mask, MaskKind};

    fn untuned(q_len: u32, calls: u64, program: Option<&str>) -> Untuned {
        let mut problem = Problem::forward(DType::Bf16, 64, MaskKind::CAUSAL).unwrap();
        if let Some(text) = program {
            problem = problem.with_program(Program::parse(text).unwrap());
        }
        let shape = Shape { batch: 1, heads: 8, kv_heads: 2, q_len, kv_len: 1000, mask: Mask::Causal };
        Untuned { problem, shape, pages: PageClass::Dense, calls, status: "default" }
    }

    #[test]
    fn what_processes_append_is_read_by_class_and_weight() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("untuned.jsonl");
        append_untuned(&path, &[untuned(1, 3, None), untuned(1000, 5, Some("score = score * 2.0;"))]).unwrap();
        append_untuned(&path, &[untuned(513, 4, None), untuned(1, 9, None), untuned(1000, 2, None)]).unwrap();
        let read = read_manifest(&path).unwrap();
        let short: Vec<_> = read.iter().map(|e| (e.shape.q_len, e.calls, e.problem.program.is_some())).collect();
        // 513 and 1000 rows are of one class.
        assert_eq!(short, [(1, 12, false), (513, 6, false), (1000, 5, true)]);
    }

    #[test]
    fn a_bad_line_is_named() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("m");
        let good = serde_json::to_string(&untuned(8, 1, None)).unwrap();
        for bad in ["{", "[]", "{\"problem\": 3}", &good.replace("64", "257"), &good.replace("\"Causal\"", "\"Full\"")]
        {
            std::fs::write(&path, format!("{good}\n\n{bad}\n")).unwrap();
            let e = read_manifest(&path).unwrap_err().to_string();
            assert!(e.contains("line 3") && e.contains("m"), "{bad}: {e}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_no_matter_of_json() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("none/m");
        let entry = ManifestEntry::new(untuned(8, 1, None).problem, &untuned(8, 1, None).shape);
        let errors = [
            (read_manifest(&path).unwrap_err(), "cannot read "),
            (write_manifest(&path, &[entry]).unwrap_err(), "cannot write "),
            (append_untuned(&path, &[untuned(8, 1, None)]).unwrap_err(), "cannot write "),
            (write_manifest(tmp.path(), &[entry]).unwrap_err(), "cannot write "),
        ];
        for (e, start) in errors {
            assert!(matches!(e, Error::ManifestFile { .. }), "{e:?}");
            let e = e.to_string();
            assert!(e.starts_with(start) && e.contains("os error") && !e.contains("JSON"), "{e}");
        }
        // What can be read and is no text is a matter of what is in the file.
        let bytes = tmp.path().join("bytes");
        std::fs::write(&bytes, b"\xff\xfe").unwrap();
        assert!(matches!(read_manifest(&bytes).unwrap_err(), Error::Manifest { line: 0, .. }));
    }
}
