//! What must match before a stored result may be used at all.

use flashtune_codegen::{Arch, TemplateSet, abi::ABI_VERSION};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The validity fields: results that differ in any of them are refused, with the field named.
///
/// The compiler is not among them: an artifact that was compiled elsewhere still runs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Validity {
    /// Code-generation target.
    pub arch: Arch,
    /// Hash of the template set.
    pub templates: String,
    /// Version of the kernels' argument struct and entry points.
    pub abi: u32,
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
    /// What this build needs on a device of `arch`.
    pub fn new(arch: Arch, templates: &TemplateSet) -> Self {
        Self { arch, templates: templates.hash().to_owned(), abi: ABI_VERSION }
    }

    /// The first field in which a stored result (`found`) differs from what is needed (`self`).
    pub fn difference(&self, found: &Validity) -> Option<Difference> {
        let differs = |field, found: String, expected: String| {
            (found != expected).then_some(Difference { field, found, expected })
        };
        differs("arch", found.arch.to_string(), self.arch.to_string())
            .or_else(|| differs("templates", found.templates.clone(), self.templates.clone()))
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
