//! What a call asks of its kernel beyond problem and sizes.

use flashtune_codegen::Family;

/// What a call asks of its kernel beyond problem and sizes. Weights and unaligned rows leave the plain kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Demand {
    /// O and the LSE, from tensors whose rows start at multiples of 16 bytes (on the CPU: any rows).
    #[default]
    Usual,
    /// O and the LSE, from tensors whose strides the copy engine of Hopper does not take.
    Strided,
    /// O and the LSE, with biases of a score program that the copy engine of Hopper cannot bring.
    LooseBiases,
    /// O and the LSE, from tensors with rows that start elsewhere.
    Unaligned,
    /// The attention weights as well.
    Weights,
}

impl Demand {
    /// Whether kernels of a family can meet it.
    pub(super) fn is_met_by(self, family: Family) -> bool {
        match self {
            Demand::Usual | Demand::LooseBiases => true,
            Demand::Strided => family != Family::ForwardSm90,
            Demand::Unaligned => !matches!(family, Family::ForwardSm80 | Family::ForwardSm90),
            Demand::Weights => family == Family::ForwardNaive,
        }
    }

    /// Whether only the plain kernel can meet it.
    pub(super) fn needs_the_plain_kernel(self) -> bool {
        matches!(self, Demand::Unaligned | Demand::Weights)
    }

    /// A word for it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Demand::Usual => "usual",
            Demand::Strided => "strided",
            Demand::LooseBiases => "loose biases",
            Demand::Unaligned => "unaligned",
            Demand::Weights => "weights",
        }
    }

    /// Whether tuning helps: another family than the plain kernel, which has one schedule, can meet it, and with biases as
    /// those that are tuned with.
    pub fn is_tunable(self) -> bool {
        !self.needs_the_plain_kernel() && self != Demand::LooseBiases
    }

    /// Why a family that computes the problem cannot meet it.
    pub(super) fn why_not(self) -> &'static str {
        match self {
            Demand::Usual => "it can",
            Demand::LooseBiases => LOOSE_BIASES,
            Demand::Strided => {
                "the copy engine takes strides above zero and below 2^40 bytes, and a dimension of these tensors has another"
            }
            Demand::Unaligned => {
                "it reads 16 bytes at once, and a row of these tensors starts elsewhere: align addresses and strides to \
                 16 bytes"
            }
            Demand::Weights => "it does not write the attention weights",
        }
    }
}

/// Why a schedule that has biases brought is left to other calls.
pub(super) const LOOSE_BIASES: &str = "it has biases brought by the copy engine, which takes addresses and strides in multiples of 16 bytes and \
     whole rows of queries and keys; threads load this call's biases faster than they copy them";
