//! Parts of score programs, for hosts that build or look at them. Most hosts parse a text
//! ([`Program::parse`](crate::Program::parse)) and bring its data ([`SideData`](crate::SideData),
//! [`SideInputs`](crate::SideInputs)).
//!
//! ```
//! use flashtune::score::{Declaration, Expr, ProgramBuilder, Storage};
//!
//! # fn main() -> flashtune::Result<()> {
//! let near = (Expr::q() - Expr::kv()).lt(Expr::scalar("left"));
//! let program = ProgramBuilder::new()
//!     .declare(Declaration::scalar("left", Storage::I32).within(0, 4096))?
//!     .mask_expr(&near)?
//!     .score("score + 0.5 * float(kv - q)")?
//!     .build()?;
//! assert_eq!(program.declarations()[0].name, "left");
//! # Ok(())
//! # }
//! ```

#[doc(inline)]
pub use flashtune_codegen::score::{
    Axis, BUILTINS, Builtin, Declaration, Expr, MAX_INPUTS, MAX_RANK, Place, ProgramBuilder, ProgramError, Range,
    SideTensor, Storage, Texts, Type, builtin,
};
