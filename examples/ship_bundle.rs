//! From a machine that tunes to one that serves: a record, a signed bundle, and an engine that takes kernels from
//! nowhere else.
//!
//!     cargo run --release --example ship_bundle

use flashtune::bundle::{ExportFilter, SecretKey, export, sign_bundle};
use flashtune::tuning::Job;
use flashtune::{DType, Engine, HostTensor, Layout, Mask, Policy, Problem, Shape, Trust};
use std::error::Error;
use std::time::Duration;

/// Tunes, ships and serves, in folders of its own.
pub fn main() -> Result<(), Box<dyn Error>> {
    let (build, serve) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let file = build.path().join("kernels.ftb");

    // Where there is time and a compiler. `flashtune tune`, `export` and `sign` do the same.
    let problem = Problem::forward(DType::F32, 32, Mask::Causal.kind())?;
    let shape = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 64, kv_len: 64, mask: Mask::Causal };
    let tuner = Engine::builder().cache_dir(build.path().join("cache")).tune_in_this_process().build()?;
    let job = Job { budget: Duration::from_secs(10), max_trials: 3, ..Job::new(problem, shape) };
    let outcome = tuner.tune_job(&job, &())?;
    println!("tuned: {}", outcome.record.schedule);
    let summary = export(tuner.layers(), &ExportFilter::default(), &file, 0)?;
    println!("exported {} records and {} kernels", summary.records, summary.artifacts);
    let key = SecretKey::generate()?;
    sign_bundle(&file, &key)?;

    // Where there is neither: the sealed policy runs no compiler, and the bundle must be signed by this key.
    let server = Engine::builder()
        .cache_dir(serve.path().join("cache"))
        .policy(Policy::Sealed)
        .bundle(&file)
        .trust(Trust::default().trust(key.public()))
        .build()?;
    let random = |seed| HostTensor::random(DType::F32, [1, 2, 64, 32], Layout::Bhsd, seed, Default::default());
    let out = server.forward_host(&random(1), &random(2), &random(3), Mask::Causal, None)?;
    print!("{}", out.plan.expect("there is something to compute").explain());
    Ok(())
}
