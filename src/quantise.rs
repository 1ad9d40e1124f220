//! Low-precision operands with their scales: [`Engine::quantise`] and the types of its call.

#[doc(inline)]
pub use flashtune_runtime::{BLOCK_ROWS, KeyMean, Quantise, QuantiseOperand, QuantiseRotary, RowPositions};

use crate::append::ANY;
use crate::engine::{Dispatch, Engine};
use crate::{Error, Result};
use flashtune_codegen::Constraints;
use flashtune_runtime::{QuantiseCall, Stream, quantise_call};

impl Engine {
    /// Makes `e4m3` operands and their scales from wider ones on the caller's stream, and returns at once (on the CPU
    /// when done); a forward pass behind it takes both as they are. Two launches, which wait for nothing, can be
    /// captured, and allocate nothing but memory for what they leave for each other, in the stream's order; the first
    /// call of a dtype and head dims compiles. The same bytes in every run. Gives back what runs; does nothing, and
    /// gives nothing back, when there is no row: scales of tensors without rows are not written.
    ///
    /// # Safety
    /// Every address in `quantise` must be valid on the engine's device for the extent that sizes and strides describe,
    /// and stay so until the work is done. What is written must not overlap anything else in the call. `stream` must be
    /// a stream of the device's context.
    ///
    /// # Errors
    /// As [`quantise_call`], [`flashtune_runtime::Error::Sealed`] without a stored kernel, and what compilers and
    /// drivers report. Nothing has been launched then.
    pub unsafe fn quantise(&self, quantise: &Quantise, stream: Stream) -> Result<Option<Dispatch>> {
        let call = quantise_call(quantise)?;
        let Some(dispatch) = self.dispatch_quantise(quantise, &call)? else { return Ok(None) };
        let Dispatch { plan, shape, .. } = &dispatch;
        plan.count_call();
        tracing::debug!(problem = %plan.kernel().problem, %shape, status = %plan.status(), "quantise");
        // SAFETY: the caller's promise about the addresses is the one that the launch asks for, and sizes and strides
        // were checked.
        unsafe { self.device().launch_shape(plan.module(), shape, &call.args, stream)? };
        Ok(Some(dispatch))
    }

    /// All that comes before the launch of [`Engine::quantise`]: afterwards such a call compiles nothing and may be
    /// captured. Touches no memory of the call.
    ///
    /// # Errors
    /// As [`Engine::quantise`].
    pub fn prepare_quantise(&self, quantise: &Quantise) -> Result<Option<Dispatch>> {
        self.dispatch_quantise(quantise, &quantise_call(quantise)?)
    }

    /// Refuses what is certainly not in the device's memory, as [`Engine::check_addresses`] does for a forward pass.
    ///
    /// # Errors
    /// [`flashtune_runtime::Error::Tensor`] with the tensor's name.
    pub fn check_quantise_addresses(&self, quantise: &Quantise) -> Result<()> {
        let check = &mut |name, address, bytes| self.device().check_address(name, address, bytes);
        quantise.each_range(check).map_err(Error::from)
    }

    fn dispatch_quantise(&self, quantise: &Quantise, call: &QuantiseCall) -> Result<Option<Dispatch>> {
        if quantise.is_empty() {
            return Ok(None);
        }
        let plan = self.dispatcher().plan_in_haste(&call.problem, &ANY, Constraints::NONE, || false)?;
        Ok(Some(Dispatch::new(plan, call.shape)))
    }
}
