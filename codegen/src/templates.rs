//! The template set: kernel skeletons and the device functions that they include.
//!
//! Delimiters differ from tera's defaults, which collide with C++ initialisers and inline assembly: blocks are
//! `<% %>`, values `@{ }@`, comments `<# #>`.

use crate::{Error, Family, Result, seen};
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, OnceLock};

/// Files by their path inside `templates/`, sorted, with a hash over all of them and one for each family.
#[derive(Debug, Clone)]
pub struct TemplateSet {
    files: Arc<BTreeMap<String, String>>,
    hash: String,
    /// Hashes of families, where somebody has asked.
    families: Arc<BTreeMap<Family, OnceLock<String>>>,
    engine: Arc<tera::Tera>,
}

impl TemplateSet {
    /// The set that is compiled into the library ([`flashtune_templates::FILES`]), parsed once in a process.
    pub fn embedded() -> Self {
        static SET: LazyLock<TemplateSet> = LazyLock::new(|| {
            let files = flashtune_templates::FILES.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            TemplateSet::from_files(files.collect())
                .expect("the embedded templates parse: a unit test renders all of them")
        });
        SET.clone()
    }

    /// The embedded set with some files replaced or added: what an override folder gives.
    pub fn overlaid(overrides: BTreeMap<String, String>) -> Result<Self> {
        let mut files = (*Self::embedded().files).clone();
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
        })?;
        engine
            .add_raw_templates(files.iter().map(|(k, v)| (k.as_str(), v.as_str())))
            .map_err(|e| Error::Template { name: "set".into(), message: e.to_string() })?;
        let families = Family::ALL.into_iter().map(|family| (family, OnceLock::new())).collect();
        let hash = hasher.finalize().to_hex()[..16].to_owned();
        Ok(Self { files: files.into(), hash, families: Arc::new(families), engine: engine.into() })
    }

    /// The first 16 hex digits of the BLAKE3 hash over all names and texts: what the set is, to the byte. Stored
    /// results are held to [`TemplateSet::hash_of`].
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// 16 hex digits that stand for what the compiler sees of a family's kernels: the text of its template with all
    /// that it includes, less comments, blank lines and indentation.
    pub fn hash_of(&self, family: Family) -> &str {
        self.families[&family].get_or_init(|| seen::hash(&self.files, family.template()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_changes_the_hash_and_the_text() {
        let embedded = TemplateSet::embedded();
        let changed = BTreeMap::from([("lib/cuda/attention/types.cuh".to_owned(), "// mine".to_owned())]);
        let overlaid = TemplateSet::overlaid(changed).unwrap();
        assert_ne!(embedded.hash(), overlaid.hash());
        assert_eq!(overlaid.files().count(), embedded.files().count());
    }

    #[test]
    fn a_family_is_hashed_by_what_its_compiler_sees() {
        let embedded = TemplateSet::embedded();
        let changed = |file: &str, from: &str, to: &str| {
            let text = embedded.files().find(|(name, _)| *name == file).unwrap().1;
            assert!(text.contains(from), "{file} has no `{from}`");
            let set = TemplateSet::overlaid(BTreeMap::from([(file.to_owned(), text.replace(from, to))])).unwrap();
            assert_ne!(set.hash(), embedded.hash());
            let differs = |family: &Family| set.hash_of(*family) != embedded.hash_of(*family);
            Family::ALL.into_iter().filter(differs).map(Family::name).collect::<Vec<_>>()
        };
        assert!(changed("lib/cuda/attention/types.cuh", "// Scalar types", "\n  // Words").is_empty());
        assert!(changed("forward/cpu.c", "/* queries of a tile */", "").is_empty());
        assert_eq!(
            changed("lib/cpu/score.h", "\n#define", "\n#define MORE\n#define"),
            ["forward/cpu", "forward/cpu_e4m3", "forward/cpu_ragged", "backward/cpu", "gradient/cpu"]
        );
        assert_eq!(changed("forward/sm90/steps.cuh", "const", "volatile"), ["forward/sm90", "forward/sm90_ragged"]);
        let cuda = [
            "forward/sm90",
            "forward/sm90_fp8",
            "forward/sm89_fp8",
            "forward/sm90_fp8_ragged",
            "forward/sm90_ragged",
            "forward/sm80",
            "forward/sm80_f32",
            "forward/sm80_ragged",
            "forward/naive",
            "forward/naive_ragged",
            "append/cuda",
            "backward/sm90",
            "backward/sm80",
            "backward/naive",
            "gradient/naive",
            "pad/cuda",
            "quantise/cuda",
        ];
        assert_eq!(changed("lib/cuda/attention/types.cuh", "typedef", "typedef volatile"), cuda);
    }

    /// Else a comment anywhere in them would make all records of the family void.
    #[test]
    fn no_embedded_template_is_too_odd_for_its_comments_to_be_told() {
        let embedded = TemplateSet::embedded();
        for family in Family::ALL {
            let text = embedded.files().find(|(name, _)| *name == family.template()).unwrap().1;
            let more = BTreeMap::from([(family.template().to_owned(), format!("{text}\n/* more */\n"))]);
            let set = TemplateSet::overlaid(more).unwrap();
            assert_eq!(set.hash_of(family), embedded.hash_of(family), "{family}");
        }
    }

    #[test]
    fn a_misspelt_name_or_a_broken_block_is_a_template_error() {
        let one = |text: &str| TemplateSet::from_files(BTreeMap::from([("a.cu".to_owned(), text.to_owned())]));
        let fields = BTreeMap::from([("dtype", "f16".to_owned())]);
        assert_eq!(one("x @{ dtype }@ {{1, 2}} {%0}").unwrap().render("a.cu", &fields).unwrap(), "x f16 {{1, 2}} {%0}");
        assert!(matches!(one("@{ dtpye }@").unwrap().render("a.cu", &fields), Err(Error::Template { .. })));
        assert!(matches!(one("<% include \"absent\" %>"), Err(Error::Template { .. })));
        assert!(matches!(one("<% if %>"), Err(Error::Template { .. })));
    }
}
