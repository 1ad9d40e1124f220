//! Gradients of attention: [`Engine::backward`] and its call.

use crate::engine::{Dispatch, Engine};
use crate::{Mask, Result, SideInputs, TensorView};
use flashtune_codegen::score::ProgramRef;
use flashtune_codegen::{CallSizes, Constraint, Constraints, backward_unaddressable};
use flashtune_runtime::{BackwardCall, BackwardTensors, SideTable, Stream, backward_call};

/// One backward pass over device memory: dQ, dK and dV of a loss, from its gradient by O (and by the log-sum-exp, where
/// it depends on that), with what the forward pass read and wrote.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backward<'a> {
    /// The loss's gradient by O, `[batch, heads, q_len, head_dim_v]`.
    pub dout: TensorView,
    /// Q, `[batch, heads, q_len, head_dim_qk]`.
    pub q: TensorView,
    /// K, `[batch, kv_heads, kv_len, head_dim_qk]`.
    pub k: TensorView,
    /// V, `[batch, kv_heads, kv_len, head_dim_v]`.
    pub v: TensorView,
    /// O of the forward pass, `[batch, heads, q_len, head_dim_v]`.
    pub o: TensorView,
    /// Address of the forward pass's log-sum-exp (natural log), fp32, contiguous `[batch, heads, q_len]`.
    pub lse: u64,
    /// Address of the loss's gradient by the log-sum-exp, fp32, contiguous `[batch, heads, q_len]`; absent where the
    /// loss does not depend on it.
    pub dlse: Option<u64>,
    /// dQ, of Q's shape; written.
    pub dq: TensorView,
    /// dK, of K's shape: of each KV head the sum over its query heads; written.
    pub dk: TensorView,
    /// dV, of V's shape; written.
    pub dv: TensorView,
    /// Which keys a query attends to, as in the forward pass.
    pub mask: Mask,
    /// Factor of the scores, as in the forward pass; `1 / sqrt(head_dim_qk)` when absent.
    pub scale: Option<f32>,
    /// The forward pass's score program.
    pub program: Option<ProgramRef>,
    /// What the program reads.
    pub side: SideInputs<'a>,
}

impl<'a> Backward<'a> {
    /// The same call with a score program and what it reads.
    #[must_use]
    pub fn with_program(self, program: ProgramRef, side: SideInputs<'a>) -> Self {
        Self { program: Some(program), side, ..self }
    }

    fn tensors(&self) -> BackwardTensors {
        let Self { dout, q, k, v, o, lse, dlse, dq, dk, dv, .. } = *self;
        let [batch, heads, q_len, _] = q.shape;
        let rows = |address| TensorView::rows(address, [batch, heads, q_len]);
        BackwardTensors { dout, q, k, v, o, lse: rows(lse), dlse: dlse.map(rows), dq, dk, dv }
    }

    /// Checks the tensors and says what they ask for.
    fn resolve(&self) -> Result<BackwardCall> {
        let resolved = backward_call(&self.tensors(), self.mask, self.scale)?;
        let program = self.program.map(|p| p.admitting(|name| self.side.scalar(name))).filter(|p| !p.is_plain());
        Ok(program.map_or(resolved, |program| resolved.with_program(program)))
    }

    fn side_table(&self, resolved: &BackwardCall) -> Result<Option<SideTable>> {
        let Some(program) = resolved.problem.program else { return Ok(None) };
        let table = SideTable::new(&program, &resolved.shape, &self.side);
        Ok(Some(table.map_err(flashtune_codegen::Error::from)?))
    }
}

impl Engine {
    /// Computes dQ, dK and dV on the caller's stream and returns at once (on the CPU when done). The same call gives
    /// the same bytes. A warm call allocates nothing (but where stages leave results for each other: memory for that,
    /// in the stream's order, within [`crate::Builder::scratch_limit`]); the first of its class may compile, by policy.
    /// Gives back what runs; does nothing, and gives nothing back, when no gradient has an element.
    ///
    /// Rows that attend to nothing, and keys that no query sees, have gradients of zero.
    ///
    /// # Safety
    /// Every address in `call` must be valid on the engine's device for the extent that its shape and strides describe,
    /// and stay so until the work is done; dQ, dK and dV must not overlap anything else in the call. `stream` must be a
    /// stream of the device's context.
    ///
    /// # Errors
    /// Tensors that do not fit each other, or what the score program reads and is not given, problems that no kernel
    /// computes, [`flashtune_runtime::Error::Sealed`], and what compilers and drivers report. Nothing has been launched
    /// then.
    pub unsafe fn backward(&self, call: &Backward<'_>, stream: Stream) -> Result<Option<Dispatch>> {
        let mut resolved = call.resolve()?;
        let table = call.side_table(&resolved)?;
        let side = table.as_ref().map(SideTable::args);
        resolved.args.side = side.as_ref().map_or(0, |side| std::ptr::from_ref(side) as u64);
        let Some(dispatch) = self.dispatch_backward(&resolved)? else { return Ok(None) };
        let Dispatch { plan, shape } = &dispatch;
        plan.count_call();
        tracing::debug!(problem = %plan.kernel().problem, %shape, schedule = %plan.kernel().schedule, status = %plan.status(), "backward");
        // SAFETY: the caller's promise about the addresses is the one that the launch asks for, the sizes were checked
        // against the tensors, and what a score program reads lives until the launch returns.
        unsafe {
            let launch = plan.kernel().plan(shape)?.within(self.scratch_limit);
            self.device().launch(plan.module(), &launch, (&resolved.args).into(), stream)?;
        }
        Ok(Some(dispatch))
    }

    /// All that comes before the launch of [`Engine::backward`]: afterwards such a call compiles nothing and may be
    /// captured. Touches no tensor.
    ///
    /// # Errors
    /// As [`Engine::backward`].
    pub fn prepare_backward(&self, call: &Backward<'_>) -> Result<Option<Dispatch>> {
        let resolved = call.resolve()?;
        call.side_table(&resolved)?;
        self.dispatch_backward(&resolved)
    }

    /// Refuses tensors that are certainly not in the device's memory, as [`Engine::check_addresses`] does for a forward
    /// pass.
    ///
    /// # Errors
    /// [`flashtune_runtime::Error::Tensor`] with the tensor's name.
    pub fn check_backward_addresses(&self, call: &Backward<'_>) -> Result<()> {
        for (name, view) in call.tensors().named() {
            // Addresses of 0 and extents that overflow are told with the other errors of a tensor.
            if !view.is_empty() && view.address != 0 {
                self.device().check_address(name, view.address, view.extent_bytes().unwrap_or(1))?;
            }
        }
        self.check_side_addresses(&call.side)
    }

    fn dispatch_backward(&self, resolved: &BackwardCall) -> Result<Option<Dispatch>> {
        let BackwardCall { problem, shape, args, aligned } = resolved;
        if problem.has_no_output(shape) {
            return Ok(None);
        }
        let demands = Constraints::NONE
            .with_if(Constraint::Unaligned, !*aligned)
            .with_if(Constraint::Strided, *aligned && backward_unaddressable(args).is_some());
        let plan = self.plan_for(problem, &CallSizes::from(shape), demands, || false)?;
        Ok(Some(Dispatch { plan, shape: *shape }))
    }
}
