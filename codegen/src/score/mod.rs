//! Score programs: masks and changes of the score as one small typed language.
//!
//! ```text
//! syntax    text, Expr -> Ast                 tokens, declarations, errors with their place
//!   v
//! graph     Ast -> Graph                      typed, normalised, interned nodes; and back to the canonical text
//!   v
//! analysis  Graph -> what follows from it     tiles, ranges of keys, windows, biases, derivatives, facts
//!   v
//! program   Graph + analyses = Program        what a host names; hash, ProgramRef
//!   v     \
//! eval      \                                 interpreter (the oracle of all kernels), side data, tile classes
//!            lower  Graph -> statements        and from those C and CUDA C, the pieces that templates paste
//! ```
//!
//! Data flows down: a room uses those above it, never one below (`rooms_use_only_those_above` holds them to it).
//!
//! Ints are 64 bits wide and wrap around; `//` and `%` round down, `x // 0` is 0 and `x % 0` is `x`. Floats are fp32
//! and follow IEEE 754, division by zero included. An index beyond an axis reads the nearest element, so that an axis
//! of length 1 is broadcast and nothing outside of a tensor is ever read. All of this holds for masked keys too: what
//! is computed for them is defined, and never seen.

mod analysis;
mod eval;
mod graph;
mod lower;
mod program;
mod syntax;

pub use analysis::axes::MaskAxes;
pub use analysis::bias::{Bias, MAX_BIASES};
pub use analysis::dense::DenseMask;
pub use analysis::derive::{ByTensor, Derivative, GradientAxis};
pub(crate) use analysis::facts::ScoreFacts;
pub use analysis::rows::{KeySearch, RowKeys};
pub use analysis::tile::{TileKind, TileProgram};
pub use eval::classify::{Classifier, Visit};
pub use eval::data::{Elements, SideData, SideTensor, check_float, check_shape};
pub use eval::interp::{At, Bound, Evaluator, Precision};
pub use graph::{Graph, Node};
pub use lower::{Code, Dialect, Form, Printer, Scope, lower, lower_derivative};
pub(crate) use lower::{cpu_fields, cuda_fields, gradient_fields, slot, term_fields};
pub use program::given::Texts;
pub use program::intern::ProgramRef;
pub use program::{MAX_INPUTS, Program, ProgramBuilder};
pub use syntax::builder::Expr;
pub use syntax::builtin::{BUILTINS, Builtin, builtin};
pub use syntax::error::{Place, ProgramError};
pub use syntax::near::nearest_name;
pub use syntax::range::Range;
pub use syntax::words::{Axis, Binary, Declaration, Id, MAX_RANK, Scalar, Storage, Type, Unary, Var};

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// Rooms, and those that each may use.
    const ROOMS: [(&str, &[&str]); 6] = [
        ("syntax", &[]),
        ("graph", &["syntax"]),
        ("analysis", &["syntax", "graph"]),
        ("program", &["syntax", "graph", "analysis"]),
        ("eval", &["syntax", "graph", "analysis", "program"]),
        ("lower", &["syntax", "graph", "analysis", "program"]),
    ];

    /// The rooms that a file's code uses, its tests left out.
    fn used(text: &str) -> impl Iterator<Item = &str> {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        lines.flat_map(|line| line.split("crate::score::").skip(1)).map(|path| {
            let end = path.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(path.len());
            &path[..end]
        })
    }

    #[test]
    fn rooms_use_only_those_above() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/score");
        let mut seen = 0;
        for (room, above) in ROOMS {
            for entry in std::fs::read_dir(root.join(room)).unwrap() {
                let path = entry.unwrap().path();
                let text = std::fs::read_to_string(&path).unwrap();
                for other in used(&text) {
                    assert!(above.contains(&other), "{} uses `{other}`, which is not above `{room}`", path.display());
                    seen += 1;
                }
            }
        }
        assert!(seen > 50, "{seen}");
        assert_eq!(
            used("use crate::score::lower::slot;\n#[cfg(test)]\ncrate::score::eval").collect::<Vec<_>>(),
            ["lower"]
        );
    }
}
