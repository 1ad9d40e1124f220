//! Dropout beside a forward or a backward call.

use crate::{BackwardCall, ForwardCall, RaggedCall, Result};
use flashtune_codegen::abi::{BackwardArgs, ForwardArgs, RaggedArgs};
use flashtune_codegen::{Dropout, Problem};

/// Checks what a call of a problem drops; the problem has dropout from now on, unless the probability is 0.
fn check(problem: Problem, dropout: &Dropout) -> Result<Option<Problem>> {
    dropout.check()?;
    if dropout.p == 0.0 {
        return Ok(None);
    }
    let problem = problem.with_dropout(true);
    problem.validate()?;
    Ok(Some(problem))
}

/// Arguments with the fields that a dropout is.
macro_rules! with {
    ($args:ident, $of:expr, $dropout:expr) => {
        $args {
            dropout_threshold: $dropout.threshold(),
            dropout_scale: $dropout.scale(),
            dropout_seed: $dropout.seed,
            dropout_offset: $dropout.offset,
            dropout_seed_at: $dropout.seed_at,
            dropout_offset_at: $dropout.offset_at,
            ..$of
        }
    };
}

/// The arguments of a ragged batch with dropout.
pub(crate) fn of_ragged(args: RaggedArgs, dropout: &Dropout) -> RaggedArgs {
    with!(RaggedArgs, args, dropout)
}

impl ForwardCall {
    /// The same call with dropout; a probability of 0 is none.
    ///
    /// # Errors
    /// [`crate::Error::Codegen`] for a probability that is not from 0 to below 1, addresses off the 8-byte grid, and
    /// calls that have no dropout.
    pub fn with_dropout(self, dropout: &Dropout) -> Result<Self> {
        let Some(problem) = check(self.problem, dropout)? else { return Ok(self) };
        let args = with!(ForwardArgs, self.args, dropout);
        Ok(Self { problem, args, ..self })
    }
}

impl BackwardCall {
    /// The same call with the dropout of its forward pass.
    ///
    /// # Errors
    /// As [`ForwardCall::with_dropout`].
    pub fn with_dropout(self, dropout: &Dropout) -> Result<Self> {
        let Some(problem) = check(self.problem, dropout)? else { return Ok(self) };
        let args = with!(BackwardArgs, self.args, dropout);
        Ok(Self { problem, args, ..self })
    }
}

impl RaggedCall {
    /// The same call with dropout; of packed queries and keys.
    ///
    /// # Errors
    /// As [`ForwardCall::with_dropout`], and where queries or keys are not packed: decoding drops nothing.
    pub fn with_dropout(self, dropout: &Dropout) -> Result<Self> {
        let Some(problem) = check(self.problem, dropout)? else { return Ok(self) };
        if self.args.q_begin == 0 || self.args.kv_begin == 0 || self.args.kv_added_begin != 0 || self.args.kv_added != 0
        {
            let limit = "packed queries and keys drop scores: decoding over slots and pages does not";
            let remedy = "pass a dropout of 0, or pack queries and keys";
            return Err(flashtune_codegen::Error::unsupported("dropout", "beside a KV store", limit, remedy).into());
        }
        Ok(Self { problem, args: of_ragged(self.args, dropout), ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ForwardTensors, TensorView, forward_call};
    use flashtune_codegen::{DType, KvElement, KvKind, KvStore, Mask};

    fn call(dtype: DType) -> ForwardCall {
        let t = |heads| TensorView::bhsd(64, dtype, [2, heads, 7, 40]);
        let tensors = ForwardTensors { q: t(4), k: t(2), v: t(2), o: t(4), lse: None };
        forward_call(&tensors, Mask::Causal, None).unwrap()
    }

    #[test]
    fn a_call_has_what_its_dropout_is_by() {
        let dropout = Dropout { seed_at: 8, ..Dropout::new(0.25, 3, 4) };
        let made = call(DType::F16).with_dropout(&dropout).unwrap();
        assert_eq!(made.problem.to_string(), "forward-f16-dropout-d40-causal");
        let args = made.args;
        assert_eq!((args.dropout_threshold, args.dropout_scale), (49152, 4.0 / 3.0));
        let numbers = (args.dropout_seed, args.dropout_offset, args.dropout_seed_at, args.dropout_offset_at);
        assert_eq!(numbers, (3, 4, 8, 0));
        assert_eq!(call(DType::F16).with_dropout(&Dropout::new(0.0, 3, 4)).unwrap(), call(DType::F16));
    }

    #[test]
    fn what_has_no_dropout_refuses_it_by_name() {
        let e = call(DType::F32).with_dropout(&Dropout::new(1.0, 3, 4)).unwrap_err().to_string();
        assert!(e.contains("dropout.p"), "{e}");
        let store = KvStore { element: KvElement::Int8, ..KvStore::default() };
        let ragged = call(DType::F32).problem.with_dropout(true).with_kv(KvKind::Ragged(store));
        let e = ragged.validate().unwrap_err().to_string();
        assert!(e.contains("dropout") && e.contains("pass a dropout of 0"), "{e}");
    }
}
