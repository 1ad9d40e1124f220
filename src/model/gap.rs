//! What a model needs and no kernel does.

use serde::Serialize;

/// Something that the model needs and the kernels do not do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gap {
    /// What it is, in a word or two.
    pub feature: String,
    /// What that means for serving.
    pub text: String,
    /// Whether the layers cannot be served at all; otherwise the host has something to do.
    pub blocks: bool,
}

impl Gap {
    pub(super) fn blocking(feature: impl Into<String>, text: impl Into<String>) -> Self {
        Self { feature: feature.into(), text: text.into(), blocks: true }
    }

    pub(super) fn partial(feature: impl Into<String>, text: impl Into<String>) -> Self {
        Self { blocks: false, ..Self::blocking(feature, text) }
    }
}
