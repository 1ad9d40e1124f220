//! What a host may have looked at before a call: where tensors lie, and whether outputs overlap anything.

use crate::Result;
use crate::engine::{Engine, Forward};
use flashtune_codegen::score::ProgramError;
use flashtune_codegen::{DType, Dropout};
use flashtune_runtime::{Error as RuntimeError, SideInputs, TensorView, certainly_overlap};

/// A tensor of a call, with its name in errors.
type Named = (&'static str, TensorView);

/// What a call reads.
fn read(call: &Forward<'_>) -> [Named; 3] {
    [("q", call.q), ("k", call.k), ("v", call.v)]
}

/// What a call writes.
fn written(call: &Forward<'_>) -> [Option<Named>; 4] {
    let [batch, heads, q_len, _] = call.o.shape;
    let lse = call.lse.map(|at| ("lse", TensorView::rows(at, [batch, heads, q_len])));
    let sizes = [batch, heads, q_len, call.k.shape[2]];
    let weights = call.weights.map(|at| ("weights", TensorView::bhsd(at, DType::F32, sizes)));
    [Some(("o", call.o)), lse, weights, call.residual.map(|view| ("residual", view))]
}

impl Engine {
    /// Refuses tensors that are certainly not in the device's memory: on CUDA those that begin or end in memory of the
    /// host, of other devices, or in none; the CPU cannot tell. For hosts that do not know where their tensors are;
    /// [`Engine::forward`] takes their word.
    ///
    /// # Errors
    /// [`flashtune_runtime::Error::Tensor`] with the tensor's name.
    pub fn check_addresses(&self, call: &Forward<'_>) -> Result<()> {
        for (name, view) in read(call).into_iter().chain(written(call).into_iter().flatten()) {
            // Addresses of 0 and extents that overflow are told with the other errors of a tensor.
            if view.is_empty() || view.address == 0 {
                continue;
            }
            self.device().check_address(name, view.address, view.extent_bytes().unwrap_or(1))?;
        }
        self.check_dropout_addresses(&call.dropout)?;
        if let Some(at) = call.o_scale.filter(|at| *at != 0) {
            self.device().check_address("o_scale", at, 4)?;
        }
        if call.o.is_empty() { Ok(()) } else { self.check_side_addresses(&call.side) }
    }

    /// Refuses a call that writes where it reads, or writes two results to one place, as far as addresses tell
    /// ([`certainly_overlap`]). For hosts whose callers choose the memory; [`Engine::forward`] takes their word.
    ///
    /// # Errors
    /// [`flashtune_runtime::Error::Tensor`] with the name of the output, and of what it overlaps.
    pub fn check_overlaps(&self, call: &Forward<'_>) -> Result<()> {
        let written = written(call);
        for (i, (name, view)) in written.iter().enumerate().filter_map(|(i, output)| Some((i, output.as_ref()?))) {
            let mut others = read(call).into_iter().chain(written[..i].iter().flatten().copied());
            if let Some((other, at)) = others.find(|(_, other)| certainly_overlap(view, other)) {
                return Err(RuntimeError::Tensor {
                    tensor: name,
                    field: "address",
                    found: format!("{:#x}, where {other} lies (from {:#x} on)", view.address, at.address),
                    expected: "memory that nothing else in the call reads or writes".to_owned(),
                    remedy: "pass other memory, or a view that shares no element",
                }
                .into());
            }
        }
        Ok(())
    }

    /// [`Engine::check_addresses`] for a seed and an offset on the device.
    pub(crate) fn check_dropout_addresses(&self, dropout: &Dropout) -> Result<()> {
        for (name, at) in [("dropout.seed_at", dropout.seed_at), ("dropout.offset_at", dropout.offset_at)] {
            if dropout.p != 0.0 && at != 0 {
                self.device().check_address(name, at, 8)?;
            }
        }
        Ok(())
    }

    /// [`Engine::check_addresses`] for what a score program reads.
    ///
    /// # Errors
    /// The tensor, by name.
    pub fn check_side_addresses(&self, side: &SideInputs<'_>) -> Result<()> {
        for (name, view) in side.tensors {
            // What is wrong with its address is told by its own name.
            if let Err(e @ RuntimeError::Tensor { .. }) = self.device().check_address("side", view.address, 1) {
                let expected = "pass the tensors of a score program in memory of the engine's device";
                let e = ProgramError::new(format!("the tensor `{name}`: {e}"), expected);
                return Err(flashtune_codegen::Error::from(e).into());
            }
        }
        Ok(())
    }
}
