//! A guide: what the crate does, and how a host uses it.
//!
//! # What it does
//!
//! Attention is `softmax(scale * Q K^T + mask) V`, in one kernel that never writes the scores to memory. Such a kernel
//! is fast where it is made for its problem (dtype, head dims, mask, whatever else happens to a score) and for the
//! device. flashtune renders one from templates for the problem at hand, compiles it when it is first needed, keeps it,
//! and measures on the device which of its many schedules is the fastest, if it is told to. A call finds its kernel by
//! the problem and the class of its sizes:
//!
//! ```text
//! call -> Problem + Shape -> records: cache, bundles -> a tuned kernel, or the default -> launch on the host's stream
//! ```
//!
//! # A first call
//!
//! An [`Engine`] is a device, the layers of stored results and a policy; one serves all threads of a host. Tensors in
//! host memory are the simplest:
//!
//! ```no_run
#![doc = include_str!("../examples/host.rs")]
//! ```
//!
//! The first call of a problem compiles, for some seconds on a GPU: a quick schedule answers meanwhile
//! ([`Builder::quick_first`]). What was compiled is found again by the next process. [`Plan::explain`] says which
//! kernel ran, where it came from, and why no other did.
//!
//! # Tensors on a device
//!
//! [`Engine::forward`] takes addresses with shapes and strides, launches on the host's stream, and returns at once. It
//! is `unsafe`, since nothing can check that an address is valid:
//!
//! ```no_run
//! use flashtune::{DType, Dispatch, Engine, Forward, Mask, Result, Stream, TensorView};
//!
//! /// `[batch, heads, rows, head dim]`, each with its rows behind one another.
//! unsafe fn attend(engine: &Engine, [q, k, v, o]: [u64; 4], stream: Stream) -> Result<Option<Dispatch>> {
//!     let view = |address, heads| TensorView::bhsd(address, DType::Bf16, [2, heads, 1024, 128]);
//!     let call = Forward { mask: Mask::Causal, ..Forward::new(view(q, 16), view(k, 4), view(v, 4), view(o, 16)) };
//!     // SAFETY: the caller's promise about the addresses is the one that the engine asks for.
//!     unsafe { engine.forward(&call, stream) }
//! }
//! ```
//!
//! Head dims are from 1 to 256, of V apart; heads of Q are a multiple of those of K and V; strides are any with a
//! contiguous last dim. [`device::read_slice`] and [`device::write_slice`] make views of cudarc's slices, and
//! [`device::CudaDevice::of_context`] takes the context that a host has. [`Engine::prepare`] does all that comes before
//! a launch, so that the call itself may be captured in a CUDA graph. Sequences of different lengths beside a packed or
//! paged KV cache are [`Engine::forward_ragged`]'s, the rows that such a cache gains are [`Engine::append`]'s, and
//! operands in `e4m3` with their scales are made by [`Engine::quantise`].
//!
//! # A score program
//!
//! What a mask leaves out and what happens to a score is said in a small typed language, which is compiled into the
//! kernel. What a program declares is brought by each call, so one kernel serves all values:
//!
//! ```
//! use flashtune::Program;
//!
//! # fn main() -> flashtune::Result<()> {
//! let program = Program::parse(
//!     "docs: i32[batch, *] nondecreasing;
//!      cap: float in 0..50;
//!      mask = docs[b, q] == docs[b, kv] and kv <= q;
//!      score = cap * tanh(score / cap);",
//! )?;
//! assert_eq!(program.declarations().len(), 2);
//!
//! // What cannot be taken is said with its place.
//! let error = Program::parse("mask = kv <= left;").unwrap_err();
//! assert!(error.to_string().contains("left"));
//! # Ok(())
//! # }
//! ```
//!
//! [`HostForward::program`] takes it with data from host memory, [`Forward::with_program`] with addresses
//! ([`SideInputs`]). The usual masks and changes are there by name ([`score::BUILTINS`]). A mask that many calls share
//! is prepared once: [`Engine::create_block_mask`].
//!
//! # Tuning, and shipping what was tuned
//!
//! Without a record the default schedule of the problem's family serves; measuring finds out which is the fastest.
//! `flashtune tune` or [`Engine::tune`] measures on the device, and the record is found by every later process with
//! the same cache folder. A bundle is a file of records and kernels for other machines, signed by a key that they
//! trust:
//!
//! ```no_run
//! use flashtune::bundle::{ExportFilter, SecretKey, export, sign_bundle};
//! use flashtune::{DType, Engine, Mask, Policy, Problem, Shape, Trust};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // On a machine like those that serve, with a compiler.
//! let problem = Problem::forward(DType::Bf16, 128, Mask::Causal.kind())?;
//! let shape = Shape { batch: 1, heads: 32, kv_heads: 8, q_len: 4096, kv_len: 4096, mask: Mask::Causal };
//! let tuner = Engine::builder().worker(flashtune::tuning::WorkerCommand::flashtune("flashtune")).build()?;
//! println!("{}", tuner.tune(&problem, &shape)?.record.schedule);
//! export(tuner.layers(), &ExportFilter::default(), "kernels.ftb".as_ref(), 0)?;
//! let key = SecretKey::generate()?;
//! sign_bundle("kernels.ftb".as_ref(), &key)?;
//!
//! // Where it serves: no compiler runs, and what nobody trusted signed is refused.
//! let trust = Trust::default().trust(key.public());
//! let server = Engine::builder().policy(Policy::Sealed).bundle("kernels.ftb").trust(trust).build()?;
//! # Ok(())
//! # }
//! ```
//!
//! Candidates run in processes of the `flashtune` command ([`Builder::worker`]), so that one that faults ends none of
//! the host's. Under [`Policy::Tune`] calls that meet no record tune by themselves.
//!
//! # Serving
//!
//! A server loads every kernel before its first request and closes the set. From there on no call compiles, reads a
//! file or takes a lock:
//!
//! ```no_run
//! use flashtune::{Engine, OnMiss, read_manifest};
//!
//! # fn main() -> flashtune::Result<()> {
//! # let engine = Engine::builder().build()?;
//! // Lines of problems with sizes: `flashtune tune --model config.json --dry-run --manifest FILE` writes a model's.
//! for (entry, why) in engine.preload(&read_manifest("shapes.jsonl".as_ref())?) {
//!     eprintln!("{entry} cannot be had: {why}");
//! }
//! let seal = engine.seal(OnMiss::Nearest)?;
//! println!("{} classes of sizes; processes with the digest {} run the same kernels", seal.classes, seal.digest);
//! println!("{}", engine.prometheus());
//! engine.write_untuned("untuned.jsonl".as_ref())?; // for `flashtune tune --from untuned.jsonl`
//! # Ok(())
//! # }
//! ```
//!
//! # Gradients
//!
//! [`Engine::backward`] takes what a forward pass read and wrote, its log-sum-exp with it, and the loss's gradient by
//! O, and writes those of Q, K and V, and of the float tensors and scalars that a score program reads
//! ([`Backward::with_gradients`]). The same bytes come in every run. A forward pass whose gradients are asked for has
//! its log-sum-exp written ([`Forward::lse`]) and computes f32 exactly ([`Forward::precision`]); rows that attend
//! mostly to one key keep their digits where it also writes what O loses by rounding ([`Forward::residual`]).
//!
//! # Errors
//!
//! An [`Error`] names the field, its limit and the remedy, and nothing has been launched when a call returns one. No
//! missing library is a panic.
//!
//! ```
//! use flashtune::{DType, Error, Mask, Problem};
//!
//! let error = Error::from(Problem::forward(DType::Bf16, 512, Mask::Causal.kind()).unwrap_err());
//! assert!(error.to_string().contains("head_dim"), "{error}");
//! ```
//!
//! [`Error::Runtime`] is of devices, compilers, tensors and the policy: [`RuntimeError::Sealed`] says that nothing
//! stored serves and no compiler may run, [`RuntimeError::Tensor`] which tensor does not fit,
//! [`RuntimeError::Missing`] which library is not there and how to get it. [`Error::Tuner`] says why a tuning has no
//! result. Where nothing is wrong and a kernel is not the expected one, [`Engine::explain`] and [`Engine::counters`]
//! tell.

#[cfg(doc)]
use crate::*;
