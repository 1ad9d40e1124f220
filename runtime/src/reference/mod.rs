//! Attention computed on the host, as the measure of every kernel.

mod compare;
pub mod e4m3;
mod gradients;
mod host;
mod oracle;
mod precision;
mod reads;
mod sampled;
mod unfused;

pub use compare::{Verdict, compare, compare_gradient_by, compare_gradients, compare_rows};
pub use gradients::{GradientInputs, Gradients, oracle_gradients, unfused_gradients};
pub(crate) use host::decode;
pub use host::{Distribution, HostTensor, Layout};
pub use oracle::{Attention, RowId, RowScale, Rows, all_rows, oracle, oracle_of, sample_rows};
pub use precision::unfused_rows_in;
pub use reads::{oracle_gradient_by, unfused_gradient_by};
pub use sampled::{GivenGradients, GradientRow, GradientSample, sample_gradients};
pub use unfused::{unfused, unfused_rows, unfused_rows_of};
