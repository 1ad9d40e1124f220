//! Windows as candle-flash-attn states them.

use candle_core::Tensor;
use flashtune::Mask;

/// The mask of a window. Reaches beyond `longest` keys are no bounds.
pub(crate) fn mask(left: Option<usize>, right: Option<usize>, longest: usize) -> Mask {
    let reach = |side: Option<usize>| side.filter(|&n| n <= longest).map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    match (reach(left), reach(right)) {
        (None, None) => Mask::Full,
        (None, Some(0)) => Mask::Causal,
        (left, right) => Mask::Window { left, right },
    }
}

/// The window of what is causal or is not.
pub(crate) fn of_causal(causal: bool) -> [Option<usize>; 2] {
    [None, causal.then_some(0)]
}

/// Both results of a call that wanted the log-sum-exp.
pub(crate) fn both((o, lse): (Tensor, Option<Tensor>)) -> candle_core::Result<(Tensor, Tensor)> {
    Ok((o, lse.ok_or(candle_core::Error::UnwrapNone)?))
}
