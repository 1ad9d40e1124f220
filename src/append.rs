//! New rows of K and V into a KV store: [`Engine::append`] and the types of its call.

#[doc(inline)]
pub use flashtune_runtime::ragged::{Added, Index, IntKind, Ints, KeyLengths, Scales, Store, StoreRows, StoreType};
#[doc(inline)]
pub use flashtune_runtime::{Append, AppendQueries, Positions, Rotary, RowCount, Rows, Target};

use crate::engine::{Dispatch, Engine};
use crate::{Error, Result};
use flashtune_codegen::{Constraints, Mask, Op, Problem, Shape};
use flashtune_runtime::{AppendCall, Stream, append_call};

/// The class of all appends, copies of rows and quantisations: one kernel serves every number of rows, so there is one
/// plan for a problem, and nothing to tune.
pub(crate) const ANY: Shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 1, kv_len: 0, mask: Mask::Full };

/// The sizes by which a problem's kernel is chosen.
pub(crate) fn class_of<'a>(problem: &Problem, shape: &'a Shape) -> &'a Shape {
    if matches!(problem.op, Op::Append | Op::Pad | Op::Quantise) { &ANY } else { shape }
}

impl Engine {
    /// Writes new rows of K and V into a store on the caller's stream, rotated and quantised as the call says, and
    /// returns at once (on the CPU when done). It is one launch, which allocates nothing, waits for nothing and can be
    /// captured; the first call of a kind of store compiles. Gives back what runs; does nothing, and gives nothing
    /// back, when there is no row.
    ///
    /// # Safety
    /// Every address in `append` must be valid on the engine's device for the extent that sizes and strides describe,
    /// tables for as many entries as lengths ask for, and stay so until the work is done. What is written must not
    /// overlap anything else in the call, but rows of Q may be rotated where they lie. `stream` must be a stream of the
    /// device's context.
    ///
    /// # Errors
    /// As [`append_call`], [`flashtune_runtime::Error::Sealed`] without a stored kernel, and what compilers and drivers
    /// report. Nothing has been launched then.
    pub unsafe fn append(&self, append: &Append, stream: Stream) -> Result<Option<Dispatch>> {
        let call = append_call(append)?;
        if let Some(log) = self.call_log.as_ref().filter(|_| !append.is_empty()) {
            self.log_append(log, &call, append.store.page_tokens);
        }
        let Some(dispatch) = self.dispatch_append(append, &call)? else { return Ok(None) };
        let Dispatch { plan, shape, .. } = &dispatch;
        plan.count_call();
        tracing::debug!(problem = %plan.kernel().problem, rows = shape.q_len, status = %plan.status(), "append");
        // SAFETY: the caller's promise about the addresses is the one that the launch asks for, and sizes and strides
        // were checked.
        unsafe { self.device().launch_shape(plan.module(), shape, &call.args, stream)? };
        Ok(Some(dispatch))
    }

    /// All that comes before the launch of [`Engine::append`]: afterwards such a call compiles nothing and may be
    /// captured. Touches no memory of the call.
    ///
    /// # Errors
    /// As [`Engine::append`].
    pub fn prepare_append(&self, append: &Append) -> Result<Option<Dispatch>> {
        self.dispatch_append(append, &append_call(append)?)
    }

    /// Refuses what is certainly not in the device's memory, as [`Engine::check_addresses`] does for a forward pass.
    ///
    /// # Errors
    /// [`flashtune_runtime::Error::Tensor`] with the tensor's name.
    pub fn check_append_addresses(&self, append: &Append) -> Result<()> {
        let check = &mut |name, address, bytes| self.device().check_address(name, address, bytes);
        append.each_range(check).map_err(Error::from)
    }

    fn dispatch_append(&self, append: &Append, call: &AppendCall) -> Result<Option<Dispatch>> {
        if append.is_empty() {
            return Ok(None);
        }
        let problem: &Problem = &call.problem;
        let plan = self.dispatcher().plan_in_haste(problem, &ANY, Constraints::NONE, || false)?;
        Ok(Some(Dispatch::new(plan, call.shape)))
    }
}
