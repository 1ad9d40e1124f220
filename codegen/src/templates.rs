//! The template set: kernel skeletons and the device functions that they include.
//!
//! Delimiters differ from tera's defaults, which collide with C++ initialisers and inline assembly: blocks are
//! `<% %>`, values `@{ }@`, comments `<# #>`.

use crate::{Error, Result};
use std::collections::BTreeMap;

/// Files by their path inside `templates/`, sorted, with a hash over all of them.
#[derive(Debug, Clone)]
pub struct TemplateSet {
    files: BTreeMap<String, String>,
    hash: String,
    engine: std::sync::Arc<tera::Tera>,
}

macro_rules! embed {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_str!(concat!("../../templates/", $path)))),*]
    };
}

/// The templates that this build was made with.
const EMBEDDED: &[(&str, &str)] = embed!["forward/cpu.c", "forward/naive.cu", "forward/sm80.cu",];

impl TemplateSet {
    /// The set that is compiled into the library.
    pub fn embedded() -> Self {
        Self::from_files(EMBEDDED.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
            .expect("the embedded templates parse: a unit test renders all of them")
    }

    /// The embedded set with some files replaced or added: what an override folder gives.
    pub fn overlaid(overrides: BTreeMap<String, String>) -> Result<Self> {
        let mut files = Self::embedded().files;
        files.extend(overrides);
        Self::from_files(files)
    }

    /// A set made of these files alone.
    pub fn from_files(files: BTreeMap<String, String>) -> Result<Self> {
        let mut hasher = blake3::Hasher::new();
        for (name, text) in &files {
            // Lengths keep (name, text) pairs apart.
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        let mut engine = tera::Tera::new();
        engine.set_delimiters(tera::Delimiters {
            block_start: "<%".into(),
            block_end: "%>".into(),
            variable_start: "@{".into(),
            variable_end: "}@".into(),
            comment_start: "<#".into(),
            comment_end: "#>".into(),
            ..Default::default()
        })?;
        engine
            .add_raw_templates(files.iter().map(|(k, v)| (k.as_str(), v.as_str())))
            .map_err(|e| Error::Template { name: "set".into(), message: e.to_string() })?;
        Ok(Self { files, hash: hasher.finalize().to_hex()[..16].to_owned(), engine: engine.into() })
    }

    /// The first 16 hex digits of the BLAKE3 hash over all names and texts.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Paths and texts.
    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }

    pub(crate) fn render(&self, name: &str, fields: &BTreeMap<&'static str, String>) -> Result<String> {
        let mut context = tera::Context::new();
        for (k, v) in fields {
            context.insert(*k, v);
        }
        self.engine
            .render(name, &context)
            .map_err(|e| Error::Template { name: name.to_owned(), message: e.to_string() })
    }
}
