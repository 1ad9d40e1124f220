//! Parts of score programs, for hosts that build or look at them. Most hosts parse a text
//! ([`Program::parse`](crate::Program::parse)) and bring its data ([`SideData`](crate::SideData),
//! [`SideInputs`](crate::SideInputs)).

#[doc(inline)]
pub use flashtune_codegen::score::{
    Axis, Declaration, Expr, MAX_INPUTS, MAX_RANK, Place, ProgramBuilder, ProgramError, Range, SideTensor, Storage,
    Texts, Type,
};
