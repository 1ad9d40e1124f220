//! How kernels are launched, as far as times depend on it.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How a host launches kernels, and so how they are timed for it.
///
/// A confidence field of a record: one that was measured the other way still serves, as provisional, and is no answer
/// to a tuning that asks for this way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Launches {
    /// One launch after the other on a stream.
    #[default]
    Eager,
    /// As replays of a captured CUDA graph.
    Graph,
}

impl Launches {
    /// The word used in output.
    pub const fn name(self) -> &'static str {
        match self {
            Launches::Eager => "eager",
            Launches::Graph => "graph",
        }
    }
}

impl FromStr for Launches {
    type Err = flashtune_codegen::Error;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let found = [Launches::Eager, Launches::Graph].into_iter().find(|l| l.name() == s.to_ascii_lowercase());
        found.ok_or_else(|| flashtune_codegen::Error::parse("launches", s, "eager or graph"))
    }
}

impl fmt::Display for Launches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_an_unknown_one_lists_the_known() {
        for l in [Launches::Eager, Launches::Graph] {
            assert_eq!(l.to_string().parse::<Launches>().unwrap(), l);
        }
        let e = "lazy".parse::<Launches>().unwrap_err().to_string();
        assert!(e.contains("`lazy`") && e.contains("eager or graph"), "{e}");
    }
}
