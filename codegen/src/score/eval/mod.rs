//! Programs on the host: side data checked against declarations, the interpreter (the oracle of all kernels), and the
//! classes of tiles.

pub(in crate::score) mod classify;
pub(in crate::score) mod data;
pub(in crate::score) mod interp;
