//! How long a score program may be: the compiler sees its operations once for each score that a thread holds, and takes
//! half a minute at these limits (a whole one for `forward/naive`).

use crate::{Error, Problem, Result};

/// The limits of a family, in operations of a score as
/// [`Program::cost_of_a_score`](crate::score::Program::cost_of_a_score) counts them.
pub(crate) enum MostOperations {
    /// Mask and change of the score together.
    Together(usize),
    /// Apart: the mask is computed for one score at a time, the change for each that a thread holds.
    Apart { mask: usize, change: usize },
}

/// Refuses a program above the limit of a family.
pub(crate) fn check(family: &'static str, problem: &Problem, most: MostOperations, remedy: &str) -> Result<()> {
    let Some(program) = problem.program else { return Ok(()) };
    let [mask, change] = program.cost_of_a_score();
    let (exceeded, limit) = match most {
        MostOperations::Together(most) => {
            (mask + change > most, format!("programs of up to {most} operations a score"))
        }
        MostOperations::Apart { mask: most_mask, change: most_change } => (
            mask > most_mask || change > most_change,
            format!("changes of the score of up to {most_change} operations, and masks of up to {most_mask}"),
        ),
    };
    match exceeded {
        false => Ok(()),
        true => {
            Err(Error::unsupported("family", family, format!("computes {limit}: more compile for minutes"), remedy))
        }
    }
}
