//! What happens when nothing tuned fits a call.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What helps a call that would need a compiler where none may run.
pub(super) const SEALED_REMEDY: &str =
    "tune or build the problem where a compiler is allowed and import the bundle here, or use the policy `default`";

/// What to do on a miss: when no record serves the problem and its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// Take the default schedule, compiling it when no binary of it is at hand.
    #[default]
    Default,
    /// Tune the problem now, on this device, then take the winner.
    Tune,
    /// Run no compiler and look for none: the nearest tuned kernel, or an error.
    Sealed,
}

impl Policy {
    /// Every policy.
    pub const ALL: [Policy; 3] = [Policy::Default, Policy::Tune, Policy::Sealed];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Policy::Default => "default",
            Policy::Tune => "tune",
            Policy::Sealed => "sealed",
        }
    }

    /// Whether a compiler may run.
    pub const fn may_compile(self) -> bool {
        !matches!(self, Policy::Sealed)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = flashtune_codegen::Error;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Policy::ALL
            .into_iter()
            .find(|p| p.name() == s.to_ascii_lowercase())
            .ok_or_else(|| flashtune_codegen::Error::parse("policy", s, "default, tune or sealed"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_an_unknown_one_lists_the_known() {
        for p in Policy::ALL {
            assert_eq!(p.to_string().parse::<Policy>().unwrap(), p);
        }
        let e = "strict".parse::<Policy>().unwrap_err().to_string();
        assert!(e.contains("`strict`") && e.contains("default, tune or sealed"), "{e}");
    }
}
