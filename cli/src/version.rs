//! What `--version` tells: all that decides whether one build can use what another one stored.

use flashtune_cache::BUNDLE_FORMAT;
use flashtune_codegen::abi::ABI_VERSION;
use flashtune_codegen::{Family, TemplateSet};
use std::fmt::Write;

/// The version and the commit: the first line of `--version`, beyond what `-V` prints.
pub(crate) const LONG: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("FLASHTUNE_COMMIT"), ")");

/// The other lines. To hash the templates takes milliseconds, which only those pay who ask.
pub(crate) fn details() -> String {
    let templates = TemplateSet::embedded();
    let mut text = format!("kernel ABI {ABI_VERSION}\nbundle format {BUNDLE_FORMAT}\ntemplates {}\n", templates.hash());
    for family in Family::ALL {
        let _ = writeln!(text, "  {:<20} {}", family.name(), templates.hash_of(family));
    }
    text
}
