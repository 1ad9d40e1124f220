//! Kernels of the cpu with planted faults: a plain one in whose tiles other code runs first.

use super::host_arch;
use flashtune::DeviceSpec;
use flashtune_codegen::{CpuSchedule, Family, Schedule, ShapeBucket, TemplateSet};
use flashtune_tuner::{Job, Runner, WorkerCommand};

/// A correct kernel for f32 and head dim 16, whatever the schedule.
const PLAIN: &str = include_str!("../../../runtime/testdata/plain.c");

/// The default of the job, and others of its space whose code differs.
pub(crate) fn schedules(job: &Job) -> Vec<CpuSchedule> {
    let bucket = ShapeBucket::of(&job.shape);
    let cpu = |s: Schedule| match s {
        Schedule::Cpu(s) => s,
        other => panic!("{other} is no schedule of the cpu"),
    };
    let family = Family::ForwardCpu;
    let default = cpu(Schedule::default_for(family, &job.problem, host_arch(), &bucket).unwrap());
    let space = Schedule::space(family, &job.problem, host_arch()).into_iter().map(cpu);
    let blocks = |s: &CpuSchedule| (s.block_q, s.block_kv, s.unroll_q, s.unroll_kv);
    let others = space.filter(|s| s.threads == 0 && blocks(s) != blocks(&default));
    std::iter::once(default).chain(others).collect()
}

/// The condition, in a template for the preprocessor, that it is rendered for this schedule.
pub(crate) fn is_schedule(s: &CpuSchedule) -> String {
    format!(
        "@{{ block_q }}@ == {} && @{{ block_kv }}@ == {} && @{{ unroll_q }}@ == {} && @{{ unroll_kv }}@ == {}",
        s.block_q, s.block_kv, s.unroll_q, s.unroll_kv
    )
}

/// The kernel with `head` before it, and with a statement at the start of every tile.
pub(crate) fn planted(head: &str, fault: &str) -> TemplateSet {
    let tile = "float max = -INFINITY";
    assert!(PLAIN.contains(tile));
    // No maths library is linked to kernels.
    let plain = PLAIN.replace("expf(", "exp_of(").replace("logf(", "log_of(").replace(
        "#define LEFT",
        "static double exp_of(double x) { if (x < -80) return 0; double y = x / 1024, s = 1, t = 1;\n\
         for (int i = 1; i < 9; i++) s += t *= y / i; for (int i = 0; i < 10; i++) s *= s; return s; }\n\
         static double log_of(double x) { double y = 0; for (int i = 0; i < 60; i++) y += x * exp_of(-y) - 1; \
         return y; }\n\
         #define LEFT",
    );
    let text = head.to_owned() + &plain.replace(tile, &format!("{fault};\n    {tile}"));
    TemplateSet::from_files([(Family::ForwardCpu.template().to_owned(), text)].into()).unwrap()
}

/// A runner with the command as its worker.
pub(crate) fn worker() -> Runner {
    let command = WorkerCommand::flashtune(assert_cmd::cargo::cargo_bin("flashtune"));
    Runner::worker(command, DeviceSpec::Cpu).unwrap()
}
