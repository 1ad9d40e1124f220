//! What this crate promises: kernels, and the language of score programs.
//! `cargo test -p flashtune-codegen --test it score_rows::` runs one part.

mod dropout;
mod kernels;
mod random;
mod score_derive;
mod score_language;
mod score_lower;
mod score_rows;
mod score_tiles;
