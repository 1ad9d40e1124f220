//! Calls over ragged batches: packed prompts, chunks beside caches, and decoding.

use crate::engine::Dispatch;
use crate::padding::{self, Room};
use crate::{Engine, Result};
use flashtune_codegen::score::ProgramRef;
use flashtune_codegen::{Constraint, Constraints, Dropout, Mask, ragged_unaddressable};
#[doc(inline)]
pub use flashtune_codegen::{KvElement, KvKind, KvStore};
#[doc(inline)]
pub use flashtune_runtime::ragged::{
    Added, Bounds, Expected, Index, IntKind, Ints, KeyLengths, LogBase, Lse, Output, Queries, QueryRows, RaggedBatch,
    Scales, Store, StoreRows, StoreType,
};
use flashtune_runtime::ragged::{RaggedCall, ragged_call};
use flashtune_runtime::{SideInputs, SideTable, Stream};

/// One forward pass over sequences of different lengths, whose K and V lie in a store that is indexed on the device.
/// Masks and windows are aligned at the end of each sequence: its last row stands at its last key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ragged<'a> {
    /// Tensors, tables, lengths, bounds and the hint.
    pub batch: RaggedBatch,
    /// Which keys a query attends to.
    pub mask: Mask,
    /// Factor of the scores; `1 / sqrt(head_dim)` when absent.
    pub scale: Option<f32>,
    /// What an element of `e4m3` queries is multiplied by: for each sequence and KV head, or fewer.
    pub q_scale: Scales,
    /// Address of one fp32 on the device by which an O of `e4m3` is multiplied before it is rounded; 1 when absent.
    pub o_scale: Option<u64>,
    /// Which scores are dropped behind the softmax, of packed queries and keys; none by default.
    pub dropout: Dropout,
    /// What else masks and changes the scores; its mask holds beside `mask`. `q` and `kv` count the rows and keys of a
    /// sequence, `q_len` and `kv_len` are its lengths.
    pub program: Option<ProgramRef>,
    /// What the program reads. Axes along `q_len` and `kv_len` have the lengths of the bounds.
    pub side: SideInputs<'a>,
}

impl<'a> Ragged<'a> {
    /// A call without mask and program, with the default scale.
    pub fn new(batch: RaggedBatch) -> Self {
        let (mask, q_scale, dropout, side) = (Mask::Full, Scales::One, Dropout::default(), SideInputs::default());
        Self { batch, mask, scale: None, q_scale, o_scale: None, dropout, program: None, side }
    }

    /// The same call with a score program and what it reads.
    #[must_use]
    pub fn with_program(self, program: ProgramRef, side: SideInputs<'a>) -> Self {
        Self { program: Some(program), side, ..self }
    }
}

impl Engine {
    /// Computes a ragged batch on the caller's stream and returns at once (on the CPU when done). A warm call waits for
    /// nothing, allocates nothing and reads no length; it may be captured, and replayed with other lengths and tables
    /// within its bounds. Gives back what runs, with the bounds as sizes; does nothing, and gives nothing back, when O
    /// has no row.
    ///
    /// Every row of every sequence is written: rows that attend to nothing as zeros, with `empty` as log-sum-exp.
    ///
    /// # Safety
    /// Every address in `call` must be valid on the engine's device for what sizes, strides and bounds describe, and
    /// stay so until the work is done; O and the log-sum-exp must not overlap anything else in the call. First rows
    /// must not decrease, and their last must lie inside of Q and of packed K. Entries of tables up to a sequence's
    /// length must be readable; their values may be anything. `stream` must be a stream of the device's context.
    ///
    /// # Errors
    /// As [`Engine::forward`], and what [`ragged_call`] refuses. Nothing has been launched then.
    pub unsafe fn forward_ragged(&self, call: &Ragged<'_>, stream: Stream) -> Result<Option<Dispatch>> {
        let resolved = resolve(call)?;
        if let Some(log) = &self.call_log {
            self.log_ragged(log, &resolved, [call.batch.store.pages, call.batch.store.page_tokens]);
        }
        if !resolved.is_empty() && self.pads_pack(&call.batch, &resolved.problem, resolved.aligned) {
            let make = |base| padded(call, &resolved, base);
            // SAFETY: the caller's promise is this function's own; what is launched is the same call over copies.
            return unsafe {
                self.with_padding(&resolved.problem, stream, make, |padded| {
                    self.launch_ragged_any(&padded, resolve(&padded)?, stream)
                })
            };
        }
        // SAFETY: the caller's promise is this function's own.
        unsafe { self.launch_ragged_any(call, resolved, stream) }
    }

    /// [`Engine::forward_ragged`] on rows that the kernel takes where they lie.
    ///
    /// # Safety
    /// As [`Engine::forward_ragged`].
    unsafe fn launch_ragged_any(
        &self,
        call: &Ragged<'_>,
        resolved: RaggedCall,
        stream: Stream,
    ) -> Result<Option<Dispatch>> {
        match resolved.problem.program {
            // SAFETY: the caller's promise is this function's own.
            None => unsafe { self.launch_ragged(&resolved, stream) },
            // SAFETY: as above.
            Some(_) => unsafe { self.launch_ragged_program(call, resolved, stream) },
        }
    }

    /// All that comes before the launch of [`Engine::forward_ragged`], with the kernel itself and no quick one in its
    /// place: afterwards such a call compiles nothing, and may be captured. Touches no tensor.
    ///
    /// # Errors
    /// As [`Engine::forward_ragged`].
    pub fn prepare_ragged(&self, call: &Ragged<'_>) -> Result<Option<Dispatch>> {
        let resolved = resolve(call)?;
        side_table(call, &resolved)?;
        if !resolved.is_empty() && self.pads_pack(&call.batch, &resolved.problem, resolved.aligned) {
            let made = padded(call, &resolved, 1 << 12)?;
            let prepare = |padded: Ragged<'_>| self.dispatch_ragged(&resolve(&padded)?, || false);
            return self.prepare_padding(&resolved.problem, made, prepare);
        }
        self.dispatch_ragged(&resolved, || false)
    }

    /// [`Engine::check_addresses`] for a ragged batch: of K and V the whole store, of tables and lengths their
    /// beginnings.
    ///
    /// # Errors
    /// [`flashtune_runtime::Error::Tensor`] with the tensor's name.
    pub fn check_ragged_addresses(&self, call: &Ragged<'_>) -> Result<()> {
        const TENSORS: [&str; 5] = ["q", "k", "v", "o", "lse"];
        call.batch.each_range(&mut |name, address, bytes| {
            let bytes = if TENSORS.contains(&name) { bytes } else { 1 };
            self.device().check_address(name, address, bytes)
        })?;
        self.check_dropout_addresses(&call.dropout)?;
        let q_scale = match call.q_scale {
            Scales::PerHead { address, .. } | Scales::PerToken { address, .. } => Some(address),
            Scales::One => None,
        };
        for (name, address) in [("q_scale", q_scale), ("o_scale", call.o_scale)] {
            if let Some(at) = address.filter(|at| *at != 0) {
                self.device().check_address(name, at, 4)?;
            }
        }
        if call.batch.is_empty() { Ok(()) } else { self.check_side_addresses(&call.side) }
    }

    /// # Safety
    /// As [`Engine::forward_ragged`], and `side` in the arguments is 0 or the address of what the score program reads.
    unsafe fn launch_ragged(&self, resolved: &RaggedCall, stream: Stream) -> Result<Option<Dispatch>> {
        let haste = || self.quick_first && !self.device().is_capturing(stream);
        let Some(dispatch) = self.dispatch_ragged(resolved, haste)? else { return Ok(None) };
        let Dispatch { plan, shape, .. } = &dispatch;
        plan.count_call();
        let kernel = plan.kernel();
        tracing::debug!(
            problem = %kernel.problem, %shape, schedule = %kernel.schedule, status = %plan.status(),
            "dispatch"
        );
        // SAFETY: the caller's promise about the addresses is the one that the launch asks for, sizes and strides were
        // checked, and what a score program reads lives until the launch returns.
        unsafe { self.device().launch_shape(plan.module(), shape, &resolved.args, stream)? };
        Ok(Some(dispatch))
    }

    /// The same with the tables of a score program. They are large: other calls do not carry them along.
    ///
    /// # Safety
    /// As [`Engine::forward_ragged`].
    #[inline(never)]
    unsafe fn launch_ragged_program(
        &self,
        call: &Ragged<'_>,
        mut resolved: RaggedCall,
        stream: Stream,
    ) -> Result<Option<Dispatch>> {
        let table = side_table(call, &resolved)?;
        let args = table.as_ref().map(SideTable::args);
        resolved.args.side = args.as_ref().map_or(0, |args| std::ptr::from_ref(args) as u64);
        // SAFETY: the caller's promise is this function's own; the tables live until the launch returns.
        unsafe { self.launch_ragged(&resolved, stream) }
    }

    /// Kernel and bounds of a call; none when there is nothing to compute.
    fn dispatch_ragged(&self, resolved: &RaggedCall, haste: impl Fn() -> bool) -> Result<Option<Dispatch>> {
        if resolved.is_empty() {
            return Ok(None);
        }
        let demands = Constraints::NONE
            .with_if(Constraint::Unaligned, !resolved.aligned)
            .with_if(Constraint::Strided, ragged_unaddressable(&resolved.problem, &resolved.args).is_some());
        // By a usual sequence: with bounds of 128k a kernel for sequences of 2k would be another.
        let plan = self.plan_for(&resolved.problem, &resolved.sizes(), demands, haste)?;
        Ok(Some(Dispatch::new(plan, resolved.shape)))
    }
}

/// Checks a call and says what it asks for.
fn resolve(call: &Ragged<'_>) -> Result<RaggedCall> {
    let resolved = ragged_call(&call.batch, call.mask, call.scale)?.with_dropout(&call.dropout)?;
    let resolved = resolved.with_query_scale(call.q_scale)?;
    let resolved = call.o_scale.map_or(Ok(resolved), |at| resolved.with_output_scale(at))?;
    let program = call.program.map(|p| p.admitting(|name| call.side.scalar(name))).filter(|p| !p.is_plain());
    Ok(program.map_or(resolved, |program| resolved.with_program(program)))
}

/// The same call over rows that are padded at an address, with the scale of its own head dim.
fn padded<'a>(call: &Ragged<'a>, resolved: &RaggedCall, base: u64) -> Result<(Ragged<'a>, Room)> {
    let (batch, room) = padding::packed(&call.batch, base)?;
    Ok((Ragged { batch, scale: Some(resolved.args.scale), ..*call }, room))
}

/// What the score program of a call reads, checked against the bounds.
fn side_table(call: &Ragged<'_>, resolved: &RaggedCall) -> Result<Option<SideTable>> {
    let Some(program) = resolved.problem.program else { return Ok(None) };
    let table = SideTable::new(&program, &resolved.shape, &call.side);
    Ok(Some(table.map_err(flashtune_codegen::Error::from)?))
}
