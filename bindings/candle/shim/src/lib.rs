//! flashtune-candle under the name of candle-flash-attn: what `[patch.crates-io]` puts in its place.

pub use flashtune_candle::*;
