//! The language as it is written: words, tokens, declarations, the syntax tree, and what can be wrong with a text.
//!
//! ```text
//! text -> lex -> parse (declare) -> Ast
//! Expr (values with operators, in Rust) -> Ast
//! ```
//!
//! Knows no [`Graph`](crate::score::Graph): names and types are resolved there.

pub(in crate::score) mod ast;
pub(in crate::score) mod builder;
pub(in crate::score) mod builtin;
mod declare;
pub(in crate::score) mod error;
mod lex;
pub(in crate::score) mod near;
pub(in crate::score) mod parse;
pub(in crate::score) mod range;
pub(in crate::score) mod words;
