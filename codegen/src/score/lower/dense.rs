//! A mask in memory as pieces of templates: a tensor of bools by query and key, and the conditions beside it.

use super::pieces::{Piece, result};
use super::print::Dialect;
use super::{Code, lower, slot};
use crate::score::analysis::dense::DenseMask;
use crate::score::analysis::tile::TileProgram;

/// A tensor of bools by query and key: where it lies for a head, and what the mask says beside it.
pub(super) fn dense_pieces(dense: Option<&DenseMask>) -> [(Piece, String); 9] {
    let flag = |on: bool| u32::from(on).to_string();
    let (mut at, mut rest, mut tile) = (String::new(), Code::default(), Code::default());
    if let Some(d) = dense {
        let code = lower(&d.graph, &d.leading);
        let code = code.print(Dialect::Cuda, "x");
        let (names, t) = (code.results(), slot(&d.graph, d.tensor));
        let (axes, values) = (names.len(), if names.is_empty() { "0".to_owned() } else { names.join(", ") });
        at =
            format!("{}const i64 at[] = {{{values}}};\nreturn dense_at<{axes}>(side->tensors[{t}], at);\n", code.all());
        let beside = TileProgram::beside(d);
        rest = d.rest.map_or(Code::default(), |rest| lower(&d.graph, &[rest]));
        tile = lower(&beside.graph, &[beside.all_masked, beside.all_visible]);
    }
    let (rest, tile) = (rest.print(Dialect::Cuda, "y"), tile.print(Dialect::Cuda, "t"));
    let mut of_tile = tile.results().into_iter();
    let mut next = || of_tile.next().unwrap_or_else(|| "0".to_owned());
    [
        (Piece::ProgramDense, flag(dense.is_some())),
        (Piece::DenseCode, at),
        (Piece::DenseNegated, flag(dense.is_some_and(|d| d.negated))),
        (Piece::DenseAlone, flag(dense.is_some_and(|d| d.rest.is_none()))),
        (Piece::RestResult, result(&rest, "true")),
        (Piece::RestCode, rest.all()),
        (Piece::RestTileMasked, next()),
        (Piece::RestTileVisible, next()),
        (Piece::RestTileCode, tile.all()),
    ]
}
