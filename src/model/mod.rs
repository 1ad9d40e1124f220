//! What serving a model asks of attention, read from its Hugging Face `config.json`.
//!
//! ```text
//! config.json -> fields (typed, with the error's field named) -> Model (heads, dims, layers by mask)
//!             -> Serving (problems and shapes to tune, and what no kernel computes yet)
//! ```
//!
//! [`Model::from_json`] is pure; [`read_model`] adds the file. Nothing that a model needs is left out in silence: what
//! cannot be tuned is a [`Gap`] of the plan.

mod config;
mod error;
mod fields;
mod gap;
mod layers;
mod serving;

pub use config::{Latent, Model, read_model};
pub use error::Error;
pub use gap::Gap;
pub use layers::LayerKind;
pub use serving::{Case, Limits, Need, Serving, Use};

#[cfg(test)]
mod tests;
