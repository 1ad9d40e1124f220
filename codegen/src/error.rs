//! Typed errors: every one names the field, the limit and the remedy.

/// What can go wrong before a device is involved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A field of a problem, shape or schedule is outside what is supported.
    #[error("{field} = {value} is not supported: {limit}; {remedy}")]
    Unsupported {
        /// Name of the offending field, as the user writes it.
        field: &'static str,
        /// The value that was given.
        value: String,
        /// The rule that it breaks.
        limit: String,
        /// What to do instead.
        remedy: String,
    },
    /// A name on the command line or in a file could not be read.
    #[error("cannot read {what} `{text}`: expected {expected}")]
    Parse {
        /// What was being read (dtype, mask, arch, ...).
        what: &'static str,
        /// The text that was given.
        text: String,
        /// The accepted forms.
        expected: String,
    },
    /// A score program cannot be read, or its data does not fit it.
    #[error("{0}")]
    Program(#[from] crate::score::ProgramError),
    /// A template is missing, does not parse, or uses a name that the kernel does not provide.
    #[error("template `{name}`: {message}")]
    Template {
        /// Path of the template inside the set.
        name: String,
        /// What the template engine said, with its caret.
        message: String,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Shorthand for [`Error::Unsupported`].
    pub fn unsupported(
        field: &'static str,
        value: impl ToString,
        limit: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Unsupported { field, value: value.to_string(), limit: limit.into(), remedy: remedy.into() }
    }

    /// Shorthand for [`Error::Parse`].
    pub fn parse(what: &'static str, text: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Parse { what, text: text.into(), expected: expected.into() }
    }
}
