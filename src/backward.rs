//! Gradients of attention: [`Engine::backward`] and its call.
//!
//! Gradients of what a score program reads are kernels of their own, one for each, which are launched behind that of
//! dQ, dK and dV and recompute the scores.

use crate::engine::{Dispatch, Engine};
use crate::padding;
use crate::{Mask, Plan, Result, SideInputs, TensorView};
use flashtune_codegen::score::ProgramRef;
use flashtune_codegen::{CallSizes, Constraint, Constraints, Dropout, backward_unaddressable};
#[doc(inline)]
pub use flashtune_runtime::Packed;
use flashtune_runtime::{
    BackwardCall, BackwardTensors, GradientCall, SideTable, SideView, Stream, backward_call, gradient_call,
};
use std::sync::Arc;

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
    /// What O lost when it was rounded to 16 bits, as the forward pass wrote it ([`crate::Forward::residual`]):
    /// gradients of rows that attend mostly to one key then have as many digits as others.
    pub residual: Option<TensorView>,
    /// What the forward pass dropped ([`crate::Forward::dropout`]): the same probability, seed and offset.
    pub dropout: Dropout,
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
    /// What the program reads. Of packed sequences axes along `q_len` and `kv_len` have the lengths of the bounds.
    pub side: SideInputs<'a>,
    /// Sequences of different lengths, whose rows lie one after the other in tensors of a batch of one; masks and
    /// windows are aligned at the end of each. Absent: the tensors' batch says which there are.
    pub packed: Option<Packed>,
    /// By which of the float tensors and scalars that the program reads gradients are wanted, too, by their names, and
    /// memory of the shape of each (of no axis for a scalar), in f32, f16 or bf16; written. Of a tensor that is
    /// broadcast it is the sum over all that read an element.
    pub gradients: &'a [(&'a str, SideView)],
}

impl<'a> Backward<'a> {
    /// The same call with a score program and what it reads.
    #[must_use]
    pub fn with_program(self, program: ProgramRef, side: SideInputs<'a>) -> Self {
        Self { program: Some(program), side, ..self }
    }

    /// The same call with gradients of what the program reads.
    #[must_use]
    pub fn with_gradients(self, gradients: &'a [(&'a str, SideView)]) -> Self {
        Self { gradients, ..self }
    }

    fn tensors(&self) -> BackwardTensors {
        let Self { dout, q, k, v, o, lse, dlse, dq, dk, dv, .. } = *self;
        let [batch, heads, q_len, _] = q.shape;
        let rows = |address| TensorView::rows(address, [batch, heads, q_len]);
        BackwardTensors { dout, q, k, v, o, lse: rows(lse), dlse: dlse.map(rows), dq, dk, dv }
    }

    /// The call without packed sequences and score program.
    fn dense_call(&self) -> Result<BackwardCall> {
        let call = backward_call(&self.tensors(), self.mask, self.scale)?;
        let call = self.residual.map_or(Ok(call), |residual| call.with_residual(&residual))?;
        Ok(call.with_dropout(&self.dropout)?)
    }

    /// Checks the tensors and says what they ask for.
    fn resolve(&self) -> Result<BackwardCall> {
        let resolved = self.dense_call()?;
        let resolved = self.packed.map_or(Ok(resolved), |packed| resolved.packed(&packed))?;
        Ok(self.admitted().map_or(resolved, |program| resolved.with_program(program)))
    }

    /// The program, for the scalars of this call.
    fn admitted(&self) -> Option<ProgramRef> {
        self.program.map(|p| p.admitting(|name| self.side.scalar(name))).filter(|p| !p.is_plain())
    }

    /// What each gradient of what the program reads comes down to, with what the program reads.
    fn resolve_gradients(&self) -> Result<Vec<(GradientCall, SideTable)>> {
        if self.gradients.is_empty() {
            return Ok(Vec::new());
        }
        let of_none = |limit: &str, remedy: &str| {
            let value = format!("`{}`", self.gradients[0].0);
            Err(flashtune_codegen::Error::unsupported("gradient", value, limit, remedy).into())
        };
        if self.packed.is_some() {
            return of_none("of tensors beside packed sequences", "call each sequence by itself");
        }
        let call = self.dense_call()?;
        if call.problem.dropout {
            return of_none("of tensors beside dropout", "pass a dropout of 0, or ask for dQ, dK and dV alone");
        }
        let Some(program) = self.admitted() else {
            return of_none("of what a score program reads", "give the program, or ask for dQ, dK and dV alone");
        };
        let resolve = |(name, out): &(&str, SideView)| {
            let read = self.side.tensors.iter().find(|(n, _)| n == name).map(|(_, view)| view);
            let gradient = gradient_call(&call, program, name, read, out)?;
            let program = gradient.problem.program.expect("a gradient has one");
            let table = SideTable::new(&program, &gradient.shape, &self.side);
            Ok((gradient, table.map_err(flashtune_codegen::Error::from)?))
        };
        self.gradients.iter().map(resolve).collect()
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
    /// Rows that attend to nothing, and keys that no query sees, have gradients of zero, as have elements of tensors
    /// that nobody reads. Rows of no packed sequence, or behind those that are used, are left as they are.
    ///
    /// # Safety
    /// Every address in `call` must be valid on the engine's device for the extent that its shape and strides describe,
    /// and stay so until the work is done; gradients must not overlap anything else in the call. `stream` must be a
    /// stream of the device's context.
    ///
    /// # Errors
    /// Tensors that do not fit each other, or what the score program reads and is not given, problems that no kernel
    /// computes, [`flashtune_runtime::Error::Sealed`], and what compilers and drivers report. Nothing has been launched
    /// then.
    pub unsafe fn backward(&self, call: &Backward<'_>, stream: Stream) -> Result<Option<Dispatch>> {
        let resolved = call.resolve()?;
        if let Some(log) = &self.call_log {
            let Backward { dout, q, k, v, o, dq, dk, dv, .. } = call;
            let views = [("dout", dout), ("q", q), ("k", k), ("v", v), ("o", o), ("dq", dq), ("dk", dk), ("dv", dv)];
            self.log_backward(log, &views, &resolved, call.gradients.len());
        }
        // All is found and compiled before anything is launched.
        let mut gradients = self.dispatch_gradients(call, &resolved)?;
        let dispatch = if self.pads_backward(&resolved) {
            let make = |base| padding::backward(&resolved, base);
            // SAFETY: the caller's promise is this function's own; what is launched is the same call over copies.
            unsafe {
                self.with_padding(&resolved.problem, stream, make, |padded| self.launch_backward(call, padded, stream))
            }?
        } else {
            // SAFETY: the caller's promise is this function's own.
            unsafe { self.launch_backward(call, resolved, stream) }?
        };
        for (gradient, table, plan) in &mut gradients {
            let side = table.args();
            gradient.args.backward.side = std::ptr::from_ref(&side) as u64;
            plan.count_call();
            let (kernel, shape) = (plan.kernel(), &gradient.shape);
            tracing::debug!(
                problem = %kernel.problem, %shape, schedule = %kernel.schedule, status = %plan.status(),
                "gradient"
            );
            // SAFETY: as above.
            unsafe {
                let launch = gradient.plan(kernel)?;
                self.device().launch(plan.module(), &launch, (&gradient.args).into(), stream)?;
            }
        }
        Ok(dispatch)
    }

    /// Whether rows are copied for the kernels. Those of packed sequences go to `backward/naive` where they lie.
    fn pads_backward(&self, resolved: &BackwardCall) -> bool {
        let problem = &resolved.problem;
        problem.kv.is_dense() && !problem.has_no_output(&resolved.shape) && self.pads(problem, resolved.aligned)
    }

    /// [`Engine::backward`] on rows that the kernel takes where they lie, without what the program reads.
    ///
    /// # Safety
    /// As [`Engine::backward`], at the addresses of `resolved`.
    unsafe fn launch_backward(
        &self,
        call: &Backward<'_>,
        mut resolved: BackwardCall,
        stream: Stream,
    ) -> Result<Option<Dispatch>> {
        let table = call.side_table(&resolved)?;
        let side = table.as_ref().map(SideTable::args);
        resolved.args.side = side.as_ref().map_or(0, |side| std::ptr::from_ref(side) as u64);
        let Some(dispatch) = self.dispatch_backward(&resolved)? else { return Ok(None) };
        let Dispatch { plan, shape, .. } = &dispatch;
        plan.count_call();
        tracing::debug!(
            problem = %plan.kernel().problem, %shape, schedule = %plan.kernel().schedule, status = %plan.status(),
            "backward"
        );
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
        self.dispatch_gradients(call, &resolved)?;
        if self.pads_backward(&resolved) {
            let made = padding::backward(&resolved, 1 << 12)?;
            return self.prepare_padding(&resolved.problem, made, |padded| self.dispatch_backward(&padded));
        }
        self.dispatch_backward(&resolved)
    }

    /// Refuses tensors that are certainly not in the device's memory, as [`Engine::check_addresses`] does for a forward
    /// pass.
    ///
    /// # Errors
    /// [`flashtune_runtime::Error::Tensor`] with the tensor's name.
    pub fn check_backward_addresses(&self, call: &Backward<'_>) -> Result<()> {
        for (name, view) in call.tensors().named().chain(call.residual.map(|view| ("residual", view))) {
            // Addresses of 0 and extents that overflow are told with the other errors of a tensor.
            if !view.is_empty() && view.address != 0 {
                self.device().check_address(name, view.address, view.extent_bytes().unwrap_or(1))?;
            }
        }
        self.check_dropout_addresses(&call.dropout)?;
        for (name, ints, count) in call.packed.iter().flat_map(Packed::arrays) {
            if ints.address != 0 {
                self.device().check_address(name, ints.address, count * ints.kind.bytes())?;
            }
        }
        for (_, view) in call.gradients {
            let axes = || view.shape.iter().zip(&view.strides).take(view.rank);
            if view.address != 0 && axes().all(|(n, _)| *n > 0) {
                // Strides that are negative or overflow are told with the other errors of a gradient.
                let last = axes().map(|(n, s)| (*n as i64 - 1).saturating_mul(*s)).fold(0, i64::saturating_add);
                let bytes = (last.max(0) as u64 + 1).saturating_mul(view.storage.bytes() as u64);
                self.device().check_address("gradient", view.address, bytes)?;
            }
        }
        self.check_side_addresses(&call.side)
    }

    /// The kernel of each gradient of what the program reads that has an element.
    fn dispatch_gradients(
        &self,
        call: &Backward<'_>,
        resolved: &BackwardCall,
    ) -> Result<Vec<(GradientCall, SideTable, Arc<Plan>)>> {
        let with_plan = |(gradient, table): (GradientCall, SideTable)| {
            let demands = Constraints::NONE.with_if(Constraint::Unaligned, !resolved.aligned);
            let plan = self.plan_for(&gradient.problem, &gradient.sizes(), demands, || false)?;
            Ok((gradient, table, plan))
        };
        let wanted = call.resolve_gradients()?.into_iter().filter(|(g, _)| g.summation.elements > 0);
        wanted.map(with_plan).collect()
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
        Ok(Some(Dispatch::new(plan, *shape)))
    }
}
