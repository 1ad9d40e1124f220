//! A tuning with limits and an observer ([`Engine::tune_job`](crate::Engine::tune_job)), and the processes that its
//! candidates run in ([`Builder::worker`](crate::Builder::worker)).

#[doc(inline)]
pub use flashtune_cache::{Record, Trial};
#[doc(inline)]
pub use flashtune_codegen::TemplateSet;
#[doc(inline)]
pub use flashtune_tuner::{Cause, Event, Job, Observer, Outcome, Phase, Search, WorkerCommand, serve};
