//! Where a launch has its mask metadata from: none needed, scratch memory of this launch, or a `BlockMask` that keeps
//! it.

use super::context::{self, Context};
use super::driver::Driver;
use super::kept_metadata::{CudaFindings, Finding, Geometry, Look, On};
use super::scratch::Scratch;
use crate::{Error, Findings, Result};
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use std::sync::Arc;

/// Mask metadata of one launch.
pub(super) enum MaskMetadata<'a> {
    /// The mask is known by arithmetic.
    Nothing,
    /// To be found for this launch alone, in memory that is given back behind it, in the stream's order.
    Once(Scratch),
    /// Found before.
    Kept { address: CUdeviceptr, findings: &'a CudaFindings, on: On },
    /// To be found for this launch and those that follow.
    Wanted { finding: Finding<'a>, findings: &'a CudaFindings, on: On },
}

/// What there is to do behind the launch itself.
pub(super) struct Behind<'a> {
    _once: Option<Scratch>,
    kept: Option<(&'a CudaFindings, On)>,
}

impl<'a> MaskMetadata<'a> {
    /// Where a launch on a stream finds a geometry, or has it found. The context is current.
    pub(super) fn of(
        driver: &Driver,
        context: &Arc<Context>,
        geometry: Geometry,
        findings: Option<&'a dyn Findings>,
        stream: CUstream,
    ) -> Result<Self> {
        let bytes = geometry.bytes;
        let captured = findings.is_some() && context::is_capturing(stream);
        // To ask a stream that is captured for its identifier ends the capture. Without identifiers nobody could tell
        // who has to wait.
        let id = if captured { Some(0) } else { findings.and_then(|_| driver.id_of(stream)) };
        if let (Some(findings), Some(id)) = (findings, id) {
            let own = findings.as_any().downcast_ref::<CudaFindings>().filter(|f| f.context.is(context));
            let findings = own.ok_or_else(|| Error::Device {
                call: "launch",
                device: context.name.clone(),
                message: "the block mask was made by another device".to_owned(),
                remedy: "make a block mask for each device",
            })?;
            let on = On { stream, id, captured };
            match findings.look(geometry, on)? {
                Look::There(address) => return Ok(MaskMetadata::Kept { address, findings, on }),
                Look::Wanted(finding) => return Ok(MaskMetadata::Wanted { finding, findings, on }),
                Look::Captured => {
                    tracing::debug!(
                        "a captured launch finds its mask in every replay: no call came before the capture"
                    );
                }
            }
        }
        Ok(MaskMetadata::Once(Scratch::new(context, context.pool()?, bytes, stream)?))
    }

    /// Where it lies.
    pub(super) fn address(&self) -> CUdeviceptr {
        match self {
            MaskMetadata::Nothing => 0,
            MaskMetadata::Once(scratch) => scratch.address,
            MaskMetadata::Kept { address, .. } => *address,
            MaskMetadata::Wanted { finding, .. } => finding.address,
        }
    }

    /// Whether kernels before the launch are to find it.
    pub(super) fn is_wanted(&self) -> bool {
        matches!(self, MaskMetadata::Once(_) | MaskMetadata::Wanted { .. })
    }

    /// To be called when those have been enqueued.
    pub(super) fn done(self) -> Result<Behind<'a>> {
        let (_once, kept) = match self {
            MaskMetadata::Nothing => (None, None),
            MaskMetadata::Once(scratch) => (Some(scratch), None),
            MaskMetadata::Kept { findings, on, .. } => (None, Some((findings, on))),
            MaskMetadata::Wanted { finding, findings, on } => {
                finding.done()?;
                (None, Some((findings, on)))
            }
        };
        Ok(Behind { _once, kept })
    }
}

impl Behind<'_> {
    /// To be called when the launch has been enqueued.
    pub(super) fn launched(self) -> Result<()> {
        self.kept.map_or(Ok(()), |(findings, on)| findings.used(on))
    }
}
