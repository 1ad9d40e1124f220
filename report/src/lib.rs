//! What a benchmark measured, as data, and what is made of it: Markdown, SVG, HTML.
//!
//! ```text
//! flashtune bench --+                                        +-> markdown()
//!                   +-> Report (JSON) -> Report::from_json --+-> svg()
//! benches/peers.py -+                    checks, derives     +-> html()
//! ```
//!
//! ```
//! use flashtune_report::{CacheReport, cache_html};
//!
//! let page = cache_html(&CacheReport { title: "What is tuned here".into(), ..CacheReport::default() })?;
//! assert!(page.contains("<h1>What is tuned here</h1>"));
//! # Ok::<(), flashtune_report::Error>(())
//! ```
//!
//! A report states what was measured (times, sizes, the device and its measured ceilings) and nothing else; every
//! number that follows from those, such as TFLOP/s or a share of a ceiling, is computed here ([`Derived`]), so that two
//! programs that write reports cannot compute it in two ways. Architecture invariant: no device, no clock, no file; the
//! same report gives the same bytes.

#[cfg(test)]
mod browser;
mod cached;
mod chart;
mod compare;
mod derive;
mod draw;
mod figure;
mod group;
mod html;
mod lengths;
mod model;
mod page;
mod read;
mod served;
mod table;
mod tables;
mod text;

pub use cached::{CachePart, CacheReport, CachedRecord, Contender, InFinal, ModelCase, UntunedCalls, cache_html};
pub use compare::{COMPARISON_FORMAT, Cases, Compared, Comparison, Times, Verdict};
pub use figure::svg;
pub use html::html;
pub use model::{
    Aim, Case, Ceiling, Ceilings, Check, Conditions, Derived, DeviceFacts, FORMAT, Latency, LengthCurve, LengthReport,
    Made, MatmulCeiling, Measured, Point, Quantile, Report, ServedReport, StepTimes,
};
pub use read::Error;
pub use tables::markdown;
