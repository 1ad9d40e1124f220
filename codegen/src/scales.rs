//! What of an `e4m3` operand shares a scale.

use crate::omitted::is_default;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Which elements of one operand share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum ScaleUnit {
    /// Those of a KV head of a sequence: `[batch, kv_heads]`. A tensor with one scale has it for each of these.
    #[default]
    Head,
    /// Of Q or K, those of a row of a head, or of so many rows that follow each other: `[batch, heads, rows]`.
    Rows,
    /// Of V, those of a column of a KV head: `[batch, kv_heads, head_dim_v]`.
    Channel,
}

impl ScaleUnit {
    /// The word in names.
    pub const fn name(self) -> &'static str {
        match self {
            ScaleUnit::Head => "head",
            ScaleUnit::Rows => "rows",
            ScaleUnit::Channel => "channel",
        }
    }
}

/// What shares a scale in Q, K and V: a kernel multiplies scores by row and by key, and O by channel, only where it is
/// made for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleUnits {
    /// Of Q: `Head` or `Rows`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub q: ScaleUnit,
    /// Of K: `Head` or `Rows`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub k: ScaleUnit,
    /// Of V: `Head` or `Channel`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub v: ScaleUnit,
}

impl ScaleUnits {
    /// Every combination that kernels compute.
    pub const ALL: [Self; 8] = {
        use ScaleUnit::{Channel, Head, Rows};
        [
            Self { q: Head, k: Head, v: Head },
            Self { q: Head, k: Rows, v: Head },
            Self { q: Head, k: Rows, v: Channel },
            Self { q: Rows, k: Rows, v: Channel },
            Self { q: Rows, k: Head, v: Head },
            Self { q: Rows, k: Rows, v: Head },
            Self { q: Head, k: Head, v: Channel },
            Self { q: Rows, k: Head, v: Channel },
        ]
    };
}

/// The operands whose scales are finer than a head's, as in `q_rows-k_rows-v_channel`.
impl fmt::Display for ScaleUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let finer = [("q", self.q), ("k", self.k), ("v", self.v)].into_iter().filter(|(_, unit)| !is_default(unit));
        for (i, (name, unit)) in finer.enumerate() {
            write!(f, "{}{name}_{}", if i > 0 { "-" } else { "" }, unit.name())?;
        }
        Ok(())
    }
}

/// As they are displayed, `head` where no operand has finer ones.
impl FromStr for ScaleUnits {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|units| match units.to_string() {
            name if name.is_empty() => s == "head",
            name => s == name,
        });
        found.ok_or_else(|| Error::parse("scales", s, "head, or some of q_rows, k_rows and v_channel: q_rows-k_rows"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_is_read_as_it_is_written() {
        for units in ScaleUnits::ALL.into_iter().skip(1) {
            assert_eq!(units.to_string().parse::<ScaleUnits>().unwrap(), units);
        }
        assert_eq!("head".parse::<ScaleUnits>().unwrap(), ScaleUnits::default());
        assert!("v_rows".parse::<ScaleUnits>().unwrap_err().to_string().contains("v_channel"));
    }
}
