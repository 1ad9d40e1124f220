//! What the scores of a case are dropped by.

use crate::guarded::Guarded;
use crate::{Device, Result};
use flashtune_codegen::{Dropout, DropoutMask, Problem};

/// The dropout of a case, and the memory for what of it lies on the device.
pub(super) struct CaseDropout {
    pub(super) call: Dropout,
    _state: Option<Guarded>,
}

/// Of a problem with dropout, what a case of this seed has: few, half or most scores dropped, by a seed and an offset
/// of 64 bits. With an odd seed both have a part on the device, the second of what is returned.
pub fn drawn(problem: &Problem, seed: u64) -> Option<(Dropout, Option<[u64; 2]>)> {
    let mixed = |n: u64| seed.wrapping_add(n).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let call = Dropout::new([0.1, 0.5, 0.8][(seed % 3) as usize], mixed(1), mixed(2));
    problem.dropout.then_some((call, (seed % 2 == 1).then(|| [mixed(3), mixed(4)])))
}

/// The mask of that case.
pub fn mask(problem: &Problem, seed: u64) -> Option<DropoutMask> {
    drawn(problem, seed).map(|(call, on_device)| call.mask(on_device.unwrap_or_default()))
}

/// Of a ragged batch: by the host alone.
pub(super) fn of_host(problem: &Problem, seed: u64) -> Option<Dropout> {
    drawn(problem, seed).map(|(call, _)| call)
}

/// The same with its part on a device.
pub(super) fn place(device: &dyn Device, problem: &Problem, seed: u64) -> Result<Option<CaseDropout>> {
    let Some((call, on_device)) = drawn(problem, seed) else { return Ok(None) };
    let Some(words) = on_device else { return Ok(Some(CaseDropout { call, _state: None })) };
    let state = Guarded::new(device, "dropout", bytemuck::bytes_of(&words))?;
    let call = Dropout { seed_at: state.address(), offset_at: state.address() + 8, ..call };
    Ok(Some(CaseDropout { call, _state: Some(state) }))
}
