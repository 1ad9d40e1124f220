//! What must match before a stored result may be used at all.

use crate::Recipe;
use flashtune_codegen::{Arch, Family, TemplateSet, abi::ABI_VERSION};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The validity fields: results that differ in any of them are refused, with the field named.
///
/// The compiler is not among them: an artifact that was compiled elsewhere still runs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Validity {
    /// Code-generation target.
    pub arch: Arch,
    /// Whose kernel it is: that of the winning schedule.
    pub family: Family,
    /// Hash of the family's templates ([`TemplateSet::hash_of`]).
    pub templates: String,
    /// Version of the kernels' argument struct and entry points.
    pub abi: u32,
}

/// What this build needs of results for one arch: for each family the hash of its own templates, so that an edit to one
/// leaves the results of the others valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needed {
    pub(crate) arch: Arch,
    pub(crate) templates: BTreeMap<Family, String>,
    pub(crate) abi: u32,
}

/// A validity field with its two values.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Difference {
    /// `arch`, `templates` or `abi`.
    pub field: &'static str,
    /// The value of the stored result.
    pub found: String,
    /// The value that is needed.
    pub expected: String,
}

impl Validity {
    /// Those of what a recipe makes.
    pub fn of(recipe: &Recipe) -> Self {
        let Recipe { kernel, templates, abi, .. } = recipe;
        Self { arch: kernel.arch, family: kernel.schedule.family(), templates: templates.clone(), abi: *abi }
    }
}

impl Needed {
    /// What this build needs on a device of `arch`.
    pub fn new(arch: Arch, templates: &TemplateSet) -> Self {
        let hash = |family| (family, templates.hash_of(family).to_owned());
        Self { arch, templates: Family::ALL.into_iter().map(hash).collect(), abi: ABI_VERSION }
    }

    /// The target.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The hash that results of a family must have.
    pub fn templates(&self, family: Family) -> &str {
        &self.templates[&family]
    }

    /// What results of a family must have.
    pub fn validity(&self, family: Family) -> Validity {
        Validity { arch: self.arch, family, templates: self.templates(family).to_owned(), abi: self.abi }
    }

    /// The first field in which a stored result differs from what is needed.
    pub fn difference(&self, found: &Validity) -> Option<Difference> {
        let differs = |field, found: String, expected: String| {
            (found != expected).then_some(Difference { field, found, expected })
        };
        differs("arch", found.arch.to_string(), self.arch.to_string())
            .or_else(|| differs("templates", found.templates.clone(), self.templates(found.family).to_owned()))
            .or_else(|| differs("abi", found.abi.to_string(), self.abi.to_string()))
    }
}

impl Difference {
    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self.field {
            "arch" => "tune on this device, or build the bundle anew for its arch (`flashtune build --relink`)",
            "templates" => "tune again, or build the bundle anew with these templates (`flashtune build --relink`)",
            _ => "tune again with this version of flashtune",
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, but {} is needed", self.field, self.found, self.expected)
    }
}
