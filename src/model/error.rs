//! What can be wrong with a model's configuration.

use std::path::PathBuf;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error(
        "cannot read the model's configuration {}: {message}; name a config.json or the folder that holds one",
        path.display()
    )]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The text is no JSON object.
    #[error("the model's configuration is not JSON: {0}; name the model's config.json")]
    Json(String),
    /// A field is missing, of the wrong type, out of its range, or contradicts another one.
    #[error("{field} {problem}; {remedy}")]
    Field {
        /// Its name, with the name of the object that it lies in.
        field: String,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// A limit of the serving plan does not fit the model.
    #[error("{option} {problem}; {remedy}")]
    Limit {
        /// The command's option, or the field of [`crate::model::Limits`].
        option: &'static str,
        /// What is wrong with its value.
        problem: String,
        /// What to do.
        remedy: String,
    },
}

impl Error {
    pub(super) fn field(field: impl Into<String>, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Field { field: field.into(), problem: problem.into(), remedy: remedy.into() }
    }

    pub(super) fn limit(option: &'static str, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Limit { option, problem: problem.into(), remedy: remedy.into() }
    }
}
