//! flashtune-candle under the name of candle-flash-attn-v3: what `[patch.crates-io]` puts in its place.

pub use flashtune_candle::v3::*;
