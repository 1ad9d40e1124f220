//! Files that carry tuned kernels from one machine to others: writing, signing and taking them over.
//!
//! An engine opens bundles by itself ([`Builder::bundle`](crate::Builder::bundle),
//! [`Builder::embedded`](crate::Builder::embedded)) and uses those that [`Trust`](crate::Trust) admits.

#[doc(inline)]
pub use flashtune_cache::{
    CacheDir, ExchangeSummary, ExportFilter, Key, Layers, PublicKey, SecretKey, export, sign_bundle,
};
