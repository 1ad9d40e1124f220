//! The job from end to end.
use crate::{Job, Observer, Outcome, Result};
use flashtune_cache::{ArtifactFiles, Store};
use flashtune_codegen::TemplateSet;
use flashtune_runtime::Device;
use std::sync::Arc;

/// Tunes one problem on one device, stores and publishes the record.
pub fn tune(
    _device: &Arc<dyn Device>,
    _templates: &TemplateSet,
    _store: &Store,
    _artifacts: &ArtifactFiles,
    _job: &Job,
    _observer: &dyn Observer,
) -> Result<Outcome> {
    todo!()
}
