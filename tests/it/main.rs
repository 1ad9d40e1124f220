//! The end-to-end tests: one module for each subject, in one program, because each more program costs a link and leaves
//! cores idle at its end. `cargo test --test it worker::` runs one of them.
//!
//! Tests of one program run at the same time and share its process: a test that changes what belongs to the process
//! (its environment, its folder) does so in a process of its own.

mod common;
#[path = "../../codegen/tests/it/random.rs"]
mod random;

mod appends;
mod backward_tuning;
mod bad_input;
mod bench_schedules;
mod bench_serving;
mod bundles;
mod cache_command;
mod call_log;
mod command;
mod crash_points;
mod debug;
mod decoys;
mod dispatch;
mod dispatch_cuda;
mod e4m3_tuning;
mod engine_programs;
mod examples;
mod faults;
mod fleet;
mod golden;
mod gradients;
mod killed;
mod latency;
mod launches;
mod levels;
mod missing;
mod model;
mod mutants;
mod nonsense;
mod numerics;
mod nvrtc;
mod outlive;
mod outputs;
mod padded;
mod programs;
mod quick;
mod ragged;
mod ragged_tuning;
mod random_faults;
mod random_workers;
mod readme;
mod registry;
mod report;
mod score_cuda;
mod sealed;
mod self_test;
mod serving;
mod templates;
mod threads;
mod tile_map;
mod together;
mod told;
mod trust;
mod unaligned;
mod watching;
mod worker;

/// What is promised not to allocate is looked at in `dispatch`, `serving`, `ragged` and `appends`.
#[global_allocator]
static ALLOCATOR: common::counted::Counting = common::counted::Counting;
