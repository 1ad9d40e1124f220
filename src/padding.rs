//! Rows that kernels on tensor cores cannot take: of head dims that are no whole 16-byte vectors, or that start off the
//! 16-byte grid. One launch copies them into scratch memory before the call's own, another one brings the output back.
//!
//! Forward and backward passes over dense tensors, and packs. A store of slots or pages is left where it lies, since a
//! call would copy all of it: the plain kernels take its rows.

use crate::engine::Dispatch;
use crate::{Engine, Result};
use flashtune_codegen::{Constraints, DType, Problem, padded_head_dim};
use flashtune_runtime::dispatch::Plan;
use flashtune_runtime::ragged::{Index, QueryRows, RaggedBatch, StoreRows};
use flashtune_runtime::{BackwardCall, Buffer, ForwardCall, RowCopies, Stream, TensorView};
use std::fmt;
use std::sync::Arc;

/// Tensors in scratch memory start at multiples of this.
const GRID: u64 = 256;

/// What a call copies beside its kernel, and where to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Padding {
    /// Head dims of the call: of Q and K, and of V.
    pub from: [u32; 2],
    /// Those of the kernel.
    pub to: [u32; 2],
    /// Scratch memory, in bytes.
    pub scratch_bytes: u64,
    /// Bytes that the copies read and write.
    pub moved_bytes: u64,
    /// Launches beside the kernel's own: before it, behind it, or both.
    pub launches: u32,
}

impl fmt::Display for Padding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, scratch_bytes, moved_bytes, launches } = self;
        let mib = |bytes: &u64| *bytes as f64 / (1 << 20) as f64;
        match from == to {
            true => write!(f, "rows start off the 16-byte grid")?,
            false => write!(f, "rows of {} and {} elements are padded to {} and {}", from[0], from[1], to[0], to[1])?,
        }
        write!(
            f,
            ": pad/cuda copies them by way of {:.1} MiB of scratch memory ({:.1} MiB read and written, {} more)",
            mib(scratch_bytes),
            mib(moved_bytes),
            if *launches == 1 { "one launch" } else { "two launches" }
        )
    }
}

/// Rows in scratch memory, and the copies into it and out of it.
#[derive(Default)]
pub(crate) struct Room {
    base: u64,
    bytes: u64,
    before: RowCopies,
    after: RowCopies,
}

/// What is done with a tensor.
#[derive(Clone, Copy, PartialEq)]
enum Use {
    Read,
    Written,
    /// Written in part: what the kernel leaves alone must stay as it is.
    Updated,
}

impl Room {
    fn at(base: u64) -> Self {
        Self { base, ..Self::default() }
    }

    /// The tensor itself, where kernels take its rows; else its place in scratch memory.
    fn place(&mut self, name: &'static str, tensor: &TensorView, used: Use) -> Result<TensorView> {
        let dim = padded_head_dim(tensor.shape[3] as u32).into();
        if dim == tensor.shape[3] && is_on_grid(tensor) {
            return Ok(*tensor);
        }
        let [batch, heads, rows, _] = tensor.shape;
        let to = TensorView::bhsd(self.base + self.bytes, tensor.dtype, [batch, heads, rows, dim]);
        self.bytes += to.extent_bytes().unwrap_or(u64::MAX / 16).next_multiple_of(GRID);
        if used != Use::Written {
            self.before.push(name, tensor, &to)?;
        }
        if used != Use::Read {
            self.after.push(name, &to, tensor)?;
        }
        Ok(to)
    }

    fn account(&self, problem: &Problem) -> Padding {
        let padded = problem.padded();
        Padding {
            from: [problem.head_dim_qk, problem.head_dim_v],
            to: [padded.head_dim_qk, padded.head_dim_v],
            scratch_bytes: self.bytes,
            moved_bytes: self.before.bytes() + self.after.bytes(),
            launches: u32::from(!self.before.is_empty()) + u32::from(!self.after.is_empty()),
        }
    }
}

/// Whether every row starts at a multiple of 16 bytes.
fn is_on_grid(t: &TensorView) -> bool {
    let whole = |i: usize| t.shape[i] <= 1 || t.strides[i].wrapping_mul(t.dtype.bytes() as i64) % 16 == 0;
    t.is_empty() || t.address.is_multiple_of(16) && (0..3).all(whole)
}

/// A tensor by its sizes, its address and its strides as arguments have them.
fn rows(dtype: DType, shape: [u32; 4], address: u64, [batch, head, row]: [i64; 3]) -> TensorView {
    TensorView { address, dtype, shape: shape.map(u64::from), strides: [batch, head, row, 1] }
}

/// A forward call over rows that are padded at an address.
pub(crate) fn forward(call: &ForwardCall, base: u64) -> Result<(ForwardCall, Room)> {
    let ForwardCall { problem, shape: s, mut args, .. } = *call;
    let [qk, v] = [problem.head_dim_qk, problem.head_dim_v];
    let mut room = Room::at(base);
    let mut place = |name, address: &mut u64, stride: &mut [i64; 3], shape, used| -> Result<()> {
        let at = room.place(name, &rows(problem.dtype, shape, *address, *stride), used)?;
        (*address, *stride) = (at.address, outer(&at));
        Ok(())
    };
    place("q", &mut args.q, &mut args.q_stride, [s.batch, s.heads, s.q_len, qk], Use::Read)?;
    place("k", &mut args.k, &mut args.k_stride, [s.batch, s.kv_heads, s.kv_len, qk], Use::Read)?;
    place("v", &mut args.v, &mut args.v_stride, [s.batch, s.kv_heads, s.kv_len, v], Use::Read)?;
    place("o", &mut args.o, &mut args.o_stride, [s.batch, s.heads, s.q_len, v], Use::Written)?;
    Ok((ForwardCall { problem: problem.padded(), args, aligned: true, ..*call }, room))
}

/// A backward call over rows that are padded at an address.
pub(crate) fn backward(call: &BackwardCall, base: u64) -> Result<(BackwardCall, Room)> {
    let BackwardCall { problem, shape: s, mut args, .. } = *call;
    let [qk, v] = [problem.head_dim_qk, problem.head_dim_v];
    let mut room = Room::at(base);
    let mut place = |name, address: &mut u64, stride: &mut [i64; 3], shape, used| -> Result<()> {
        let at = room.place(name, &rows(problem.dtype, shape, *address, *stride), used)?;
        (*address, *stride) = (at.address, outer(&at));
        Ok(())
    };
    let [q_rows, o_rows] = [qk, v].map(|dim| [s.batch, s.heads, s.q_len, dim]);
    let [k_rows, v_rows] = [qk, v].map(|dim| [s.batch, s.kv_heads, s.kv_len, dim]);
    place("dout", &mut args.dout, &mut args.dout_stride, o_rows, Use::Read)?;
    place("q", &mut args.q, &mut args.q_stride, q_rows, Use::Read)?;
    place("k", &mut args.k, &mut args.k_stride, k_rows, Use::Read)?;
    place("v", &mut args.v, &mut args.v_stride, v_rows, Use::Read)?;
    place("o", &mut args.o, &mut args.o_stride, o_rows, Use::Read)?;
    place("dq", &mut args.dq, &mut args.dq_stride, q_rows, Use::Written)?;
    place("dk", &mut args.dk, &mut args.dk_stride, k_rows, Use::Written)?;
    place("dv", &mut args.dv, &mut args.dv_stride, v_rows, Use::Written)?;
    Ok((BackwardCall { problem: problem.padded(), args, aligned: true, ..*call }, room))
}

/// Packed sequences over rows that are padded at an address.
pub(crate) fn packed(batch: &RaggedBatch, base: u64) -> Result<(RaggedBatch, Room)> {
    let mut padded = *batch;
    let (dtype, heads) = (batch.queries.dtype, batch.queries.heads);
    let (sequences, q_rows, used) = match batch.queries.rows {
        QueryRows::Uniform if batch.queries.used.is_none() => (batch.bounds.batch, batch.bounds.max_q, Use::Written),
        QueryRows::Uniform => (batch.bounds.batch, batch.bounds.max_q, Use::Updated),
        // Rows may lie between sequences, and behind the last one.
        QueryRows::Packed { .. } => (1, batch.bounds.total_q, Use::Updated),
    };
    let mut room = Room::at(base);
    let of_q = |address, strides: [i64; 3], dim| TensorView {
        address,
        dtype,
        shape: [sequences, heads, q_rows, dim],
        strides: [strides[0], strides[1], strides[2], 1],
    };
    let store = &mut padded.store;
    let (kv_heads, tokens) = (store.kv_heads, store.page_tokens);
    let q = room.place("q", &of_q(batch.queries.address, batch.queries.strides, batch.queries.head_dim), Use::Read)?;
    let mut keys = |name, at: &mut StoreRows, dim| -> Result<()> {
        let [page, token, head] = at.strides;
        let view = TensorView {
            address: at.address,
            dtype,
            shape: [1, kv_heads, tokens, dim],
            strides: [page, head, token, 1],
        };
        let to = room.place(name, &view, Use::Read)?;
        (at.address, at.strides) = (to.address, [to.strides[0], to.strides[2], to.strides[1]]);
        Ok(())
    };
    keys("k", &mut store.k, batch.queries.head_dim)?;
    keys("v", &mut store.v, batch.store.head_dim_v)?;
    let o = room.place("o", &of_q(batch.output.address, batch.output.strides, batch.store.head_dim_v), used)?;
    let outer = |t: &TensorView| [t.strides[0], t.strides[1], t.strides[2]];
    (padded.queries.address, padded.queries.strides, padded.queries.head_dim) = (q.address, outer(&q), q.shape[3]);
    (padded.output.address, padded.output.strides, padded.store.head_dim_v) = (o.address, outer(&o), o.shape[3]);
    Ok((padded, room))
}

/// Batch, head and row strides; 0 for a dimension that has no second element.
fn outer(t: &TensorView) -> [i64; 3] {
    std::array::from_fn(|i| if t.shape[i] > 1 { t.strides[i] } else { 0 })
}

impl Engine {
    /// Whether a call is one that pads its rows: its problem, and whether all rows are on the grid.
    pub(crate) fn pads(&self, problem: &Problem, aligned: bool) -> bool {
        let fast = problem.is_on_tensor_cores(self.device().arch()) && problem.dtype != DType::E4m3;
        // Copies know of no residual: such rows go to the plain kernels, where they lie.
        fast && !problem.residual && (!aligned || problem.padded() != *problem) && self.has_copies()
    }

    /// Whether rows can be copied: a sealed engine may have been sealed without the kernel for it, and then serves such
    /// calls by the plain kernels that it has.
    fn has_copies(&self) -> bool {
        self.dispatcher().sealed().is_none() || self.copies().is_ok()
    }

    fn copies(&self) -> Result<Arc<Plan>> {
        Ok(self.dispatcher().plan_in_haste(&Problem::pad(), &crate::append::ANY, Constraints::NONE, || false)?)
    }

    /// Whether a ragged call is one: packs of elements as the queries'.
    pub(crate) fn pads_pack(&self, batch: &RaggedBatch, problem: &Problem, aligned: bool) -> bool {
        let same = problem.kv.store().is_some_and(|store| store == Default::default());
        matches!(batch.index, Index::Packed { .. }) && same && self.pads(problem, aligned)
    }

    /// The problem that computes one on the engine's device: itself, or the one over padded rows.
    pub(crate) fn computed(&self, problem: &Problem) -> Problem {
        if problem.pads(self.device().arch()) && self.has_copies() { problem.padded() } else { *problem }
    }

    /// Runs a call over padded rows: `make` has it over rows at an address, `launch` launches that.
    ///
    /// # Safety
    /// The rows that the copies read and write are valid until the work on the stream is done.
    pub(crate) unsafe fn with_padding<T>(
        &self,
        problem: &Problem,
        stream: Stream,
        make: impl Fn(u64) -> Result<(T, Room)>,
        launch: impl FnOnce(T) -> Result<Option<Dispatch>>,
    ) -> Result<Option<Dispatch>> {
        let bytes = make(GRID)?.1.bytes;
        let scratch: Box<dyn Buffer> = self.device().stream_memory(bytes, stream)?;
        let (call, room) = make(scratch.address())?;
        // SAFETY: both sides are valid by this function's contract and as scratch memory, which lives until all
        // launches are in the stream.
        unsafe { self.copy_rows(&room.before, stream)? };
        let dispatch = launch(call)?;
        // SAFETY: as above.
        unsafe { self.copy_rows(&room.after, stream)? };
        drop(scratch);
        Ok(dispatch.map(|dispatch| dispatch.padded(room.account(problem))))
    }

    /// All of it but the launches.
    pub(crate) fn prepare_padding<T>(
        &self,
        problem: &Problem,
        made: (T, Room),
        prepare: impl FnOnce(T) -> Result<Option<Dispatch>>,
    ) -> Result<Option<Dispatch>> {
        let (call, room) = made;
        self.copies()?;
        Ok(prepare(call)?.map(|dispatch| dispatch.padded(room.account(problem))))
    }

    /// # Safety
    /// The rows on both sides are valid until the work on the stream is done.
    unsafe fn copy_rows(&self, copies: &RowCopies, stream: Stream) -> Result<()> {
        if copies.is_empty() {
            return Ok(());
        }
        let plan = self.copies()?;
        // SAFETY: by this function's contract; sizes were checked when the copies were added.
        unsafe { self.device().launch_shape(plan.module(), &copies.shape(), copies.args(), stream)? };
        Ok(())
    }
}
