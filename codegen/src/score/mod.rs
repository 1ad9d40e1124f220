//! Score programs: masks and changes of the score as one small typed language.
//!
//! ```text
//! text or Expr -> Ast -> checked, normalised Graph = Program -> text, hash
//!                                                   -> Bound: the interpreter, the oracle of all the rest
//!                                                   -> RowKeys: the run of keys of each query, for masks that leave one
//!                                                   -> TileProgram: which tiles are all masked, all visible, mixed
//!                                                   -> MaskAxes: what a mask changes with, for all that is found of it ahead
//!                                                   -> Bias: tensors of which a tile of scores reads a tile
//!                                                   -> Derivative: d score' / d score, and by each side tensor
//!                                                   -> lower: statements of C and CUDA C for the kernels
//! ```
//!
//! Ints are 64 bits wide and wrap around; `//` and `%` round down, `x // 0` is 0 and `x % 0` is `x`. Floats are fp32 and
//! follow IEEE 754, division by zero included. An index beyond an axis reads the nearest element, so that an axis of
//! length 1 is broadcast and nothing outside of a tensor is ever read. All of this holds for masked keys too: what is
//! computed for them is defined, and never seen.

mod arith;
mod ast;
mod axes;
mod bias;
mod builder;
mod builtin;
mod check;
mod classify;
mod compare;
mod data;
mod declare;
mod derive;
mod error;
mod given;
mod graph;
mod intern;
mod interp;
mod joint;
mod keys;
mod lex;
mod linear;
mod lower;
mod normal;
mod parse;
mod pieces;
mod print;
mod program;
mod range;
mod rows;
mod tile;
mod window;
mod words;

pub use axes::MaskAxes;
pub use bias::{Bias, MAX_BIASES};
pub use builder::Expr;
pub use builtin::{BUILTINS, Builtin, builtin};
pub use classify::{Classifier, Visit};
pub use data::{Elements, Scalar, SideData, SideTensor, check_float, check_shape};
pub use derive::{ByTensor, Derivative, GradientAxis};
pub use error::{Place, ProgramError};
pub use given::Texts;
pub use graph::{Depends, Graph, Node};
pub use intern::ProgramRef;
pub use interp::{At, Bound, Evaluator, Precision};
pub use linear::Linear;
pub use lower::{AlongKeys, Capped, Code, Dialect, lower, lower_fragments, lower_scores, slot};
pub(crate) use pieces::{cpu_fields, cuda_fields};
pub use program::{MAX_INPUTS, MAX_NODES, OfScores, Program, ProgramBuilder};
pub use range::Range;
pub use rows::{RowKeys, Search};
pub use tile::{TileKind, TileProgram};
pub use window::WindowForm;
pub use words::{Axis, Binary, Declaration, Id, MAX_LEN, MAX_RANK, Storage, Type, Unary, Var};
