//! What follows from the nodes of a program without running it. Each analysis takes a graph and a root; where its
//! outcome depends on sizes or tensors, it is a graph of the same language, which the interpreter evaluates and kernels
//! compile.
//!
//! ```text
//! mask  -> tile                TileProgram: tiles that are masked, visible or mixed; bounds of the loop over keys
//!          (joint, keys, floats)
//!       -> rows                RowKeys: one range of keys per query, for masks that leave one
//!       -> window              WindowForm: masks that say no more than causal or a window does
//!       -> axes                MaskAxes: which of batch, head and KV head the mask depends on
//!       -> dense               DenseMask: tensors of bools indexed by (q, kv), of which a row reads many at once
//! score -> bias                Bias: tensors indexed by (q, kv), one tile per tile of scores
//!       -> facts               ScoreFacts: loads, divisions and functions per score
//!       -> far                 whether scores may be far from zero, as float masks make them
//!       -> derive              Derivative: d score' / d score, and by the elements of side tensors
//! ```

pub(in crate::score) mod axes;
pub(in crate::score) mod bias;
pub(in crate::score) mod dense;
pub(in crate::score) mod derive;
pub(in crate::score) mod facts;
mod far;
pub(in crate::score) mod floats;
mod joint;
mod keys;
pub(in crate::score) mod rows;
pub(in crate::score) mod tile;
pub(in crate::score) mod window;
