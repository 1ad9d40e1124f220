//! Where the softmax of a step does what: choices that head dims decide by timings
//! (docs/measured/log/forward-sm90.md), and that a schedule may make otherwise.

use super::Sm90Schedule;
use crate::Problem;
use crate::family::fields::{Constants, FieldValue, Place};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Declares a choice whose default is the rule of the head dim, with the words of the others.
macro_rules! choice {
    ($(#[$meta:meta])* $Choice:ident { $($(#[$doc:meta])* $Value:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
        pub enum $Choice {
            /// As the head dim has it by timings.
            #[default]
            ByHeadDim,
            $($(#[$doc])* $Value,)*
        }

        impl $Choice {
            const fn word(self) -> &'static str {
                match self {
                    Self::ByHeadDim => "",
                    $(Self::$Value => $word,)*
                }
            }
        }

        impl fmt::Display for $Choice {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }

        impl FieldValue for $Choice {
            fn place(&self) -> Place {
                Place::Word(self.word())
            }
            // The template has what was chosen, and not by whom: `Sm90Schedule::softmax_constants`.
            fn render(&self, _: &'static str, _: &mut Constants) {}
        }
    };
}

choice! {
    /// With `overlap`, when O is multiplied by the factors of its rows.
    Sm90Rescale {
        /// Among the exponentials.
        Among = "among",
        /// Beside the next scores, for which the warpgroup waits anyway: more registers live at once.
        Beside = "beside",
    }
}

choice! {
    /// In which order a thread takes the maxima and exponentials of its two rows.
    Sm90RowOrder {
        /// Both maxima, then the exponentials of both.
        Together = "together",
        /// The second maximum after the first.
        AfterMaximum = "aftermax",
        /// The second maximum after the first probability, between the exponentials of the first row.
        AfterProbability = "afterprob",
    }
}

choice! {
    /// Whether the next K and V have arrived is asked while there is other work.
    Sm90LookAhead {
        /// When they are wanted.
        Never = "noahead",
        /// While there is other work.
        Always = "ahead",
    }
}

impl Sm90RowOrder {
    /// The template's word, or that of the rule.
    const fn or(self, rule: &'static str) -> &'static str {
        match self {
            Self::ByHeadDim => rule,
            Self::Together => "kTogether",
            Self::AfterMaximum => "kAfterMaximum",
            Self::AfterProbability => "kAfterProbability",
        }
    }
}

impl Sm90Schedule {
    /// What the template is told of these choices.
    pub(super) fn softmax_constants(&self, problem: &Problem, constants: &mut Constants) {
        let columns = problem.head_dim_v.next_multiple_of(16);
        let drawn = self.drawers > 0;
        // Of dense tensors, some small head dims are better beside drawers as they are without: 32 throughout, 48 with
        // its look ahead (docs/measured/2026-11-26-h200-dropout.md).
        let small = drawn && problem.kv.is_dense() && matches!(columns, 17..=48);
        // A wide O takes longer to multiply than the exponentials leave room for. With drawers it gains 1 to 3 % at
        // other head dims, too, without a look ahead.
        let beside = match self.rescale {
            Sm90Rescale::ByHeadDim if small => columns > 32,
            Sm90Rescale::ByHeadDim => columns > 128 || drawn,
            chosen => chosen == Sm90Rescale::Beside,
        };
        let row_order = self.row_order.or(match columns {
            33..=64 if drawn => "kAfterMaximum",
            97.. if drawn => "kTogether",
            ..=64 => "kTogether",
            65..=128 => "kAfterProbability",
            _ => "kAfterMaximum",
        });
        // Steps of masked blocks wait longer for maxima.
        let rule = problem.masks() && columns <= if drawn { 96 } else { 192 };
        let masked = if rule { "kAfterProbability" } else { row_order };
        // Where biases seed the product there is work before K and V are wanted.
        let look_ahead = match self.look_ahead {
            Sm90LookAhead::ByHeadDim => columns <= 192 && !self.seeds(problem) && (!drawn || small),
            chosen => chosen == Sm90LookAhead::Always,
        };
        // Of dense tensors late, where half of a drawer's products or all are by doubles: 1 to 4 % at 64 causal, 80
        // and from 129 on; early 1.5 % at 32 where scores are masked (48: the same), and 0.4 % worse where none are.
        // Of packs early, where registers are left for it: 2 to 4 % up to 96, and 1 to 2 % above 128.
        let dense = problem.kv.is_dense();
        let read_bits = match columns {
            ..=48 if dense && problem.masks() => "kBesideScores",
            _ if dense => "kWithP",
            ..=64 | 129.. => "kBesideScores",
            65..=96 => "kBesideOutput",
            _ => "kWithP",
        };
        // Of four calls of a drawer. Dense tensors from 65 to 128: two gain 1 to 6 %, four up to 3 % more; elsewhere
        // four cost up to 4 %. Of packs two gain 1 % at 96, and cost up to 5 % at other head dims.
        let double_calls = match columns {
            65..=128 if dense => 4,
            _ if dense => 2,
            65..=96 => 2,
            _ => 0,
        };
        // Eight reads of a thread are in flight; one compiles sooner.
        let scan_together = match self.scan_together {
            0 if self.quick => 1,
            0 => 8,
            n => n,
        };
        constants.extend([
            ("rescale_beside", beside.to_string()),
            ("row_order", row_order.to_owned()),
            ("masked_row_order", self.masked_row_order.or(masked).to_owned()),
            ("look_ahead", look_ahead.to_string()),
            ("read_bits", read_bits.to_owned()),
            ("double_calls", double_calls.to_string()),
            ("scan_together", scan_together.to_string()),
        ]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, KvKind, MaskKind};

    fn constants(d: u32, mask: MaskKind, change: impl Fn(&mut Sm90Schedule)) -> [String; 7] {
        constants_of(&Problem::forward(DType::Bf16, d, mask).unwrap(), change)
    }

    fn constants_of(problem: &Problem, change: impl Fn(&mut Sm90Schedule)) -> [String; 7] {
        let mut schedule = Sm90Schedule::default();
        change(&mut schedule);
        let mut constants = Constants::new();
        schedule.softmax_constants(problem, &mut constants);
        let softmax = ["rescale_beside", "row_order", "masked_row_order", "look_ahead", "scan_together"];
        let drawn = ["read_bits", "double_calls"];
        std::array::from_fn(|i| constants[*softmax.iter().chain(&drawn).nth(i).unwrap()].clone())
    }

    /// Of [`constants`], when O is multiplied, both orders, and whether arrivals are asked for early.
    fn softmax(all: [String; 7]) -> Vec<String> {
        all[..4].to_vec()
    }

    #[test]
    fn head_dims_decide_unless_the_schedule_does() {
        let of = |d, mask| softmax(constants(d, mask, |_| {}));
        assert_eq!(of(64, MaskKind::FULL), ["false", "kTogether", "kTogether", "true"]);
        assert_eq!(of(128, MaskKind::CAUSAL), ["false", "kAfterProbability", "kAfterProbability", "true"]);
        assert_eq!(of(192, MaskKind::CAUSAL), ["true", "kAfterMaximum", "kAfterProbability", "true"]);
        assert_eq!(of(256, MaskKind::CAUSAL), ["true", "kAfterMaximum", "kAfterMaximum", "false"]);
        let chosen = constants(256, MaskKind::CAUSAL, |s| {
            s.rescale = Sm90Rescale::Among;
            s.row_order = Sm90RowOrder::Together;
            s.masked_row_order = Sm90RowOrder::AfterMaximum;
            s.look_ahead = Sm90LookAhead::Always;
            s.scan_together = 4;
        });
        assert_eq!(chosen[..5], ["false", "kTogether", "kAfterMaximum", "true", "4"]);
        assert_eq!(constants(64, MaskKind::FULL, |_| {})[4], "8");
        assert_eq!(constants(64, MaskKind::FULL, |s| s.quick = true)[4], "1");
    }

    #[test]
    fn drawers_change_the_rules_and_no_choice() {
        let of = |d, mask| softmax(constants(d, mask, |s| s.drawers = 1));
        assert_eq!(of(16, MaskKind::FULL), ["true", "kTogether", "kTogether", "false"]);
        assert_eq!(of(32, MaskKind::FULL), ["false", "kTogether", "kTogether", "true"]);
        assert_eq!(of(48, MaskKind::FULL), ["true", "kAfterMaximum", "kAfterMaximum", "true"]);
        assert_eq!(of(64, MaskKind::FULL), ["true", "kAfterMaximum", "kAfterMaximum", "false"]);
        assert_eq!(of(96, MaskKind::CAUSAL), ["true", "kAfterProbability", "kAfterProbability", "false"]);
        assert_eq!(of(128, MaskKind::CAUSAL), ["true", "kTogether", "kTogether", "false"]);
        let pack = Problem::forward(DType::Bf16, 32, MaskKind::FULL).unwrap().with_kv(KvKind::RAGGED);
        let of_pack = softmax(constants_of(&pack, |s| s.drawers = 1));
        assert_eq!(of_pack, ["true", "kTogether", "kTogether", "false"]);
        let chosen = constants(192, MaskKind::CAUSAL, |s| {
            s.drawers = 1;
            s.rescale = Sm90Rescale::Among;
            s.look_ahead = Sm90LookAhead::Always;
            s.row_order = Sm90RowOrder::AfterMaximum;
        });
        assert_eq!(softmax(chosen), ["false", "kAfterMaximum", "kAfterMaximum", "true"]);
    }

    #[test]
    fn bits_are_drawn_and_read_by_head_dim() {
        let dims = [16, 48, 64, 72, 96, 112, 128, 144, 256];
        let (early, middle, late) = ("kBesideScores", "kBesideOutput", "kWithP");
        let drawn = |mask| dims.map(|d| constants(d, mask, |s| s.drawers = 1));
        assert!(drawn(MaskKind::FULL).iter().all(|constants| constants[5] == late));
        let masked = drawn(MaskKind::CAUSAL).map(|constants| constants[5].clone());
        assert_eq!(masked, [early, early, late, late, late, late, late, late, late]);
        let double = drawn(MaskKind::FULL).map(|constants| constants[6].clone());
        assert_eq!(double, ["2", "2", "2", "4", "4", "4", "4", "2", "2"]);
        let pack = |d| Problem::forward(DType::Bf16, d, MaskKind::FULL).unwrap().with_kv(KvKind::RAGGED);
        let packs = dims.map(|d| constants_of(&pack(d), |s| s.drawers = 1));
        let places = packs.clone().map(|constants| constants[5].clone());
        assert_eq!(places, [early, early, early, middle, middle, late, late, early, early]);
        assert_eq!(packs.map(|constants| constants[6].clone()), ["0", "0", "0", "2", "2", "0", "0", "0", "0"]);
    }

    #[test]
    fn choices_stand_in_the_name_where_they_are_made() {
        let base = Sm90Schedule { consumers: 2, block_kv: 128, ..Sm90Schedule::default() };
        assert!(!base.to_string().contains("--") && base.to_string().ends_with("-l2x0"), "{base}");
        let named = Sm90Schedule { rescale: Sm90Rescale::Beside, row_order: Sm90RowOrder::Together, ..base };
        assert_eq!(named.to_string(), format!("{base}-beside-together"));
        let masked = Sm90Schedule { masked_row_order: Sm90RowOrder::Together, scan_together: 2, ..base };
        assert_eq!(masked.to_string(), format!("{base}-mtogether-scan2"));
    }
}
