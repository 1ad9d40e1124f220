//! Candidates that fault, and processes that are killed: what it costs is the candidate.

use crate::common::planted::{self, planted, worker};
use crate::common::{self, Place, ROOT};
use flashtune::{DType, DeviceSpec, Engine, Mask, Problem, Shape};
use flashtune_cache::{CacheDir, Stage, Trial, TrialResult};
use flashtune_codegen::{CpuSchedule, Family, Schedule, TemplateSet};
use flashtune_tuner::{Event, Job, Observer, Outcome, Runner, Search, WorkerCommand, tune};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Name, stage at which it must be found, a word of the reason, and the code: with `AT_LOAD` it is a function of its
/// own, else a statement of every tile.
const MENU: [(&str, Stage, &str, &str); 17] = [
    ("illegal address", Stage::Check, "SIGSEGV", "*(volatile int *)8 = 1;"),
    ("illegal instruction", Stage::Check, "SIGILL", "__builtin_trap();"),
    ("trap", Stage::Check, "SIGTRAP", "raise(SIGTRAP);"),
    ("abort", Stage::Check, "SIGABRT", "abort();"),
    ("arithmetic", Stage::Check, "SIGFPE", "raise(SIGFPE);"),
    ("exit", Stage::Check, "code 7", "_exit(7);"),
    ("endless loop", Stage::Check, "did not come back", "for (volatile int x = 0;; x = x + 1);"),
    ("waits forever", Stage::Check, "did not come back", "for (;;) pause();"),
    ("stack overflow", Stage::Check, "SIG", "deep(1 << 30);"),
    ("out of memory", Stage::Check, "SIGSEGV", "for (;;) memset(malloc(1 << 26), 1, 4096);"),
    ("writes past the end", Stage::Check, "", "memset((char *)a->o + 4 * a->o_stride[0] * a->batch, 1, 200000);"),
    ("writes before the start", Stage::Check, "", "memset((char *)a->o - 70000, 1, 70000);"),
    // The part of the grid that goes first is one sequence of the job's.
    (
        "loops when large",
        Stage::Check,
        "on a part of the grid: it did not come back within",
        "while (a->q_len == FULL);",
    ),
    (
        "strays when large",
        Stage::Check,
        "on a part of the grid: wrong answer",
        "if (a->q_len == FULL) *(int *)((float *)a->o + a->o_stride[0]) = 1;",
    ),
    ("loops on the whole grid", Stage::Check, "it did not come back within", "while (a->batch == BATCH);"),
    (
        "breaks when it is timed",
        Stage::Measure,
        "SIGSEGV",
        "if (a->q_len == FULL && tile == 0 && *(int *)a->o != -1) *(volatile int *)8 = 1;",
    ),
    (
        "constructor",
        Stage::Load,
        "SIGSEGV",
        "AT_LOAD __attribute__((constructor)) void f(void) { *(volatile int *)8 = 1; }",
    ),
];

const FULL: u32 = 700;
const BATCH: u32 = 16;
/// Few, so that a launch takes less than 50 ms on a busy machine, too: a candidate has 20 times the best, and a second
/// at least.
const KEYS: u32 = 16;

fn job() -> Job {
    let problem = Problem::forward(DType::F32, 16, Mask::Full.kind()).unwrap();
    let shape = Shape { batch: BATCH, heads: 1, kv_heads: 1, q_len: FULL, kv_len: KEYS, mask: Mask::Full };
    Job { max_trials: 1000, ..Job::new(problem, shape) }
}

fn schedules() -> Vec<CpuSchedule> {
    planted::schedules(&job())
}

/// A template whose code depends on the schedule alone: the menu in order, after the default and one more that are
/// right; all others do not compile.
fn template(menu: &[(&str, Stage, &str, &str)]) -> TemplateSet {
    let mut text = "/* @{ header }@ */\n#if 0\n".to_owned();
    for (i, s) in schedules().iter().take(menu.len() + 2).enumerate() {
        let code = i.checked_sub(2).map_or("", |i| menu[i].3);
        let (at_load, in_tile) = code.strip_prefix("AT_LOAD").map_or(("", code), |code| (code, ""));
        text += &format!(
            "#elif {}\n#define NUMBER {i}\n#define AT_LOAD {at_load}\n#define FAULT {in_tile}\n",
            planted::is_schedule(s)
        );
    }
    text += &format!(
        "#else\n#error not in the menu\n#endif\n#define FULL {FULL}\n#define BATCH {BATCH}\n#include <signal.h>\n\
         #include <stdlib.h>\n#include <string.h>\n#include <sys/stat.h>\n#include <unistd.h>\n\
         const int schedule_number = NUMBER;\nAT_LOAD\n\
         static int deep(volatile int n) {{ volatile char frame[4096]; frame[n % 4096] = 1; \
         return n ? deep(n - 1) + frame[9] : 0; }}\n\
         int (*const keep)(volatile int) = deep;\n"
    );
    planted(&text, "FAULT")
}

/// The outcome once the machine is quiet enough for one: that there is none when it is not is another test's matter.
fn in_quiet(mut tuning: impl FnMut() -> flashtune_tuner::Result<Outcome>) -> Outcome {
    let _alone = common::alone();
    for _ in 0..4 {
        match tuning() {
            Err(flashtune_tuner::Error::Noise { .. }) => {}
            other => return other.unwrap(),
        }
    }
    panic!("the machine is too busy to tune");
}

/// How long after the event before it each failure came, and whose it was.
#[derive(Default)]
struct Gaps(Mutex<(Option<Instant>, Vec<Gap>)>);

type Gap = (Schedule, Duration);

impl Observer for Gaps {
    fn event(&self, event: &Event<'_>) {
        // Of a failure itself, just before it is told.
        if matches!(event, Event::Learnt { .. }) {
            return;
        }
        let mut gaps = self.0.lock().unwrap();
        let now = Instant::now();
        let before = gaps.0.replace(now);
        if let (Event::Failed { schedule, stage: Stage::Load | Stage::Check, .. }, Some(before)) = (event, before) {
            gaps.1.push((**schedule, now - before));
        }
    }
}

fn failure(trials: &[Trial], schedule: CpuSchedule) -> (Stage, &str) {
    match &trials.iter().find(|t| t.schedule == Schedule::Cpu(schedule)).expect("it was tried").result {
        TrialResult::Failed { stage, reason } => (*stage, reason),
        TrialResult::Timed { .. } => panic!("{schedule} was timed"),
    }
}

/// The most that a fault may cost.
const MOST: Duration = Duration::from_secs(3);

/// What a fault costs that cost too much among the others, tried once more as the only one: a moment in which other
/// programs have all the cores is not the tuner's fault, and is not there each time.
fn cost_alone(runner: &mut Runner, dir: &CacheDir, menu: &[(&str, Stage, &str, &str)], number: usize) -> Duration {
    let all = schedules();
    let search = Search::Only(only(&[all[0], all[1], all[number]]));
    let job = Job { budget: Duration::from_secs(300), force: true, search, ..job() };
    let met = Gaps::default();
    in_quiet(|| {
        *met.0.lock().unwrap() = Default::default();
        tune(runner, &template(menu), dir, &job, &met)
    });
    let costs = met.0.into_inner().unwrap().1;
    println!("{} again, alone: {costs:?}", menu[number - 2].0);
    costs.iter().map(|(_, cost)| *cost).max().expect("it fails each time")
}

/// Whether two schedules have the same code: the number of threads is not in it.
fn is_code_of(one: Schedule, other: &CpuSchedule) -> bool {
    matches!(one, Schedule::Cpu(one) if CpuSchedule { threads: other.threads, ..one } == *other)
}

#[test]
fn every_fault_costs_its_candidate_and_nothing_else() {
    let place = Place::new();
    let dir = CacheDir::at(place.cache());
    let mut runner = worker();
    let all = schedules();
    let mut gaps = Vec::new();
    // As many as the smallest space has room for, in as many jobs as that takes.
    for menu in MENU.chunks(all.len().min(MENU.len() + 2) - 2) {
        let job = Job { budget: Duration::from_secs(300), force: true, ..job() };
        let met = Gaps::default();
        let outcome = in_quiet(|| tune(&mut runner, &template(menu), &dir, &job, &met));
        // The two that are right were measured, and one of them won.
        let right = |s: Schedule| all[..2].iter().any(|r| is_code_of(s, r));
        assert!(right(outcome.record.schedule), "{:?}", outcome.record);
        let timed = outcome.trials.iter().filter(|t| matches!(t.result, TrialResult::Timed { .. }));
        let timed: Vec<Schedule> = timed.map(|t| t.schedule).collect();
        assert!(timed.len() >= 2 && timed.iter().all(|s| right(*s)), "{timed:?}");
        for ((name, at, word, _), schedule) in menu.iter().zip(&all[2..]) {
            let (stage, reason) = failure(&outcome.trials, *schedule);
            assert!(stage == *at && reason.contains(word), "{name}: {stage}: {reason}");
            let named = ["SIG", "code", "come back", "written", "wrong answer"];
            assert!(named.iter().any(|n| reason.contains(n)), "{name}: {reason}");
        }
        for (schedule, cost) in met.0.into_inner().unwrap().1 {
            let number = all.iter().position(|s| is_code_of(schedule, s)).expect("one of the menu");
            gaps.push((
                menu[number - 2].0,
                if cost <= MOST { cost } else { cost_alone(&mut runner, &dir, menu, number) },
            ));
        }
    }
    let costs: Vec<Duration> = gaps.iter().map(|(_, cost)| *cost).collect();
    let mean = costs.iter().sum::<Duration>() / costs.len() as u32;
    // A hang costs its limit of a second and a new process, twice, at whatever size it shows.
    println!("{} failures, {mean:?} each, at most {:?}", costs.len(), costs.iter().max());
    // One shows only in the race, whose failures are told together.
    assert!(costs.len() + 1 >= MENU.len() && costs.iter().all(|cost| *cost <= MOST), "{gaps:?}");
}

/// A host that is busy elsewhere for a second looks like a candidate that hangs.
#[test]
fn one_that_is_slow_only_once_is_not_blamed_and_one_that_hangs_again_is() {
    let place = Place::new();
    let dir = CacheDir::at(place.cache());
    let mut runner = worker();
    let all = schedules();
    // Whoever makes the file is the one that waits; the second waits each time.
    let file = place.path("slow");
    let once = format!("if (mkdir(\"{}\", 0700) == 0) sleep(2);", file.display());
    let menu = [
        ("slow once", Stage::Check, "", once.as_str()),
        ("slow each time", Stage::Check, "", "if (tile == 0) sleep(2);"),
    ];
    let job = Job { budget: Duration::from_secs(300), force: true, search: Search::Only(only(&all[..4])), ..job() };
    let gaps = Gaps::default();
    let outcome = in_quiet(|| {
        let _ = std::fs::remove_dir(&file);
        *gaps.0.lock().unwrap() = Default::default();
        tune(&mut runner, &template(&menu), &dir, &job, &gaps)
    });
    assert!(file.exists(), "it was never slow");
    let timed = outcome.trials.iter().filter(|t| matches!(t.result, TrialResult::Timed { .. }));
    assert!(timed.map(|t| t.schedule).any(|s| is_code_of(s, &all[2])), "{:?}", outcome.trials);
    let (stage, reason) = failure(&outcome.trials, all[3]);
    assert!(stage == Stage::Check && reason.contains("did not come back"), "{stage}: {reason}");
    // Asked twice, it costs two limits of a second and two processes.
    let gaps = gaps.0.into_inner().unwrap().1;
    let hung = gaps.first().map_or(Duration::ZERO, |(_, cost)| *cost);
    assert!(gaps.len() == 1 && hung > Duration::from_secs(2) && hung < Duration::from_secs(6), "{gaps:?}");
    println!("a hang that was asked about twice: {hung:?}");
}

#[test]
fn whose_process_somebody_killed_twice_is_asked_again_and_not_blamed() {
    let place = Place::new();
    let all = schedules();
    let (first, second) = (place.path("first"), place.path("second"));
    let killed = format!(
        "if (mkdir(\"{}\", 0700) == 0 || mkdir(\"{}\", 0700) == 0) raise(SIGKILL);",
        first.display(),
        second.display()
    );
    let menu = [("killed twice", Stage::Check, "", killed.as_str())];
    let job = Job { budget: Duration::from_secs(300), force: true, search: Search::Only(only(&all[..3])), ..job() };
    let outcome = in_quiet(|| {
        let _ = (std::fs::remove_dir(&first), std::fs::remove_dir(&second));
        tune(&mut worker(), &template(&menu), &CacheDir::at(place.cache()), &job, &Gaps::default())
    });
    assert!(first.exists() && second.exists(), "it was not killed twice");
    let timed = outcome.trials.iter().filter(|t| matches!(t.result, TrialResult::Timed { .. }));
    assert!(timed.map(|t| t.schedule).any(|s| is_code_of(s, &all[2])), "{:?}", outcome.trials);
}

fn only(schedules: &[CpuSchedule]) -> Vec<Schedule> {
    schedules.iter().map(|s| Schedule::Cpu(*s)).collect()
}

/// Loses the device after so many checks: from then on a file is there.
struct Loses {
    file: std::path::PathBuf,
    seen: Mutex<(usize, usize)>,
}

impl Observer for Loses {
    fn event(&self, event: &Event<'_>) {
        let mut seen = self.seen.lock().unwrap();
        match event {
            Event::Checked { .. } => seen.0 += 1,
            Event::Failed { stage: Stage::Load | Stage::Check, .. } => seen.1 += 1,
            _ => {}
        }
        if seen.0 == 6 {
            std::fs::write(&self.file, "").unwrap();
        }
    }
}

#[test]
fn a_device_that_is_lost_ends_the_job_and_blames_nobody() {
    let place = Place::new();
    let dir = CacheDir::at(place.cache());
    let file = place.path("lost");
    // Every kernel ends its process once the device is lost.
    let fault = format!("if (access(\"{}\", F_OK) == 0) abort();", file.display());
    let text = format!("#include <stdlib.h>\n#include <unistd.h>\n{}", include_str!("../../templates/forward/cpu.c"));
    let body = "Scratch *scratch = memory;";
    assert!(text.contains(body));
    let text = text.replace(body, &format!("{fault} {body}"));
    let templates = TemplateSet::overlaid([(Family::ForwardCpu.template().to_owned(), text)].into()).unwrap();
    let mut runner = worker();
    let job = Job { budget: Duration::from_secs(300), max_trials: 8, ..job() };
    let loses = Loses { file: file.clone(), seen: Mutex::default() };
    let e = tune(&mut runner, &templates, &dir, &job, &loses).unwrap_err();
    let said = e.to_string();
    assert!(matches!(e, flashtune_tuner::Error::Lost { .. }), "{said}");
    assert!(said.contains("SIGABRT") && said.contains("no longer runs what it ran before"), "{said}");
    let seen = *loses.seen.lock().unwrap();
    assert!(seen.1 <= 4, "{seen:?}: not all candidates are burnt");
    // Once it is back, everybody is tried again.
    std::fs::remove_file(&file).unwrap();
    let outcome = tune(&mut runner, &templates, &dir, &job, &()).unwrap();
    let failed = outcome
        .trials
        .iter()
        .filter(|t| matches!(&t.result, TrialResult::Failed { stage, .. } if *stage != Stage::Prune));
    assert_eq!(failed.count(), 0, "{:?}", outcome.trials);
}

/// Processes whose parent is `parent`.
fn children(parent: u32) -> Vec<u32> {
    let stat = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    let pids = std::fs::read_dir("/proc").unwrap().filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| {
        // The name, in parentheses, may hold anything; the state and the parent follow it.
        let parent_of = stat(*pid).and_then(|s| s.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok());
        parent_of == Some(parent)
    })
    .collect()
}

fn kill(pid: u32) {
    Command::new("kill").args(["-9", &pid.to_string()]).stderr(Stdio::null()).status().unwrap();
}

#[test]
fn workers_killed_at_random_moments_do_not_end_the_job() {
    // What hides the result is that the machine is busy.
    let of_noise = |said: &str| said.contains("nothing was stored");
    let mut seeds = 1..=4;
    let report = seeds.find_map(|seed| match tuned_while_workers_are_killed(seed) {
        Err(said) if of_noise(&said) => None,
        other => Some(other.unwrap()),
    });
    let report = report.expect("the machine is too busy to tune");
    assert!(report["tuned"][0]["median_us"].as_f64().unwrap() > 0.0, "{report}");
}

/// What a tuning printed whose workers were killed; else what it told.
fn tuned_while_workers_are_killed(seed: u64) -> Result<serde_json::Value, String> {
    let place = Place::new();
    let args = ["tune", "--dtype", "f32", "--head-dim", "16", "--heads", "2", "--q-len", "300", "--mask", "causal"];
    let mut tuning = Command::new(assert_cmd::cargo::cargo_bin("flashtune"))
        .args(["--device", "cpu", "--json", "--cache"])
        .arg(place.cache())
        .args(args)
        .args(["--trials", "8", "--budget-s", "25"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut random = 0x2545_f491_4f6c_dd1d_u64.wrapping_mul(seed);
    let mut killed = 0;
    // On a busy machine every compilation would outlast the next kill, for ever.
    while tuning.try_wait().unwrap().is_none() && killed < 12 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_millis(200 + (random >> 33) % 1000));
        let workers = children(tuning.id());
        if let Some(worker) = workers.get((random >> 40) as usize % workers.len().max(1)) {
            kill(*worker);
            killed += 1;
        }
    }
    let output = tuning.wait_with_output().unwrap();
    assert!(killed > 0, "it came to an end before");
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout).unwrap()),
        false => Err(format!("{killed} killed: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

#[test]
fn a_worker_dies_with_the_tuner_even_in_an_endless_loop() {
    let place = Place::new();
    let folder = place.path("loops");
    std::fs::create_dir_all(folder.join("forward")).unwrap();
    let template = std::fs::read_to_string(format!("{ROOT}/templates/forward/cpu.c")).unwrap();
    let (body, running) = ("Scratch *scratch = memory;", place.path("running"));
    assert!(template.contains(body));
    let text = template
        .replace("#include <stdint.h>", "#include <fcntl.h>\n#include <stdint.h>")
        .replace(body, &format!("creat({running:?}, 0600); for (volatile int x = 1; x;); {body}"));
    std::fs::write(folder.join("forward/cpu.c"), text).unwrap();
    let mut tuning = Command::new(assert_cmd::cargo::cargo_bin("flashtune"))
        .args(["--device", "cpu", "--templates"])
        .arg(&folder)
        .arg("--cache")
        .arg(place.cache())
        .args(["tune", "--dtype", "f32", "--head-dim", "16", "--q-len", "64", "--trials", "1"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !running.exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "the candidate does not run");
        std::thread::sleep(Duration::from_millis(5));
    }
    let workers = children(tuning.id());
    kill(tuning.id());
    tuning.wait().unwrap();
    let gone = |pid: &u32| match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['Z', 'X'])),
        Err(_) => true,
    };
    assert!(!workers.is_empty());
    let start = Instant::now();
    while !workers.iter().all(gone) {
        assert!(start.elapsed() < Duration::from_secs(3), "a worker outlives its tuner");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_program_that_is_no_worker_is_an_error_that_names_it() {
    let open = |program: &str| {
        let command = WorkerCommand { program: program.into(), arguments: vec!["worker".into()] };
        Runner::worker(command, DeviceSpec::Cpu).err().unwrap().to_string()
    };
    for (program, word) in
        [("/nonexistent/flashtune", "No such file"), ("true", "without a word"), ("ls", "cannot access")]
    {
        let e = open(program);
        assert!(e.contains(program) && e.contains(word) && e.contains("of this version"), "{e}");
    }
}

/// A script that takes the place of the C compiler.
fn script(place: &Place, body: &str) -> std::path::PathBuf {
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let text = format!("#!/bin/sh\n[ \"$1\" = --version ] && exec {cc} --version\n{body}\nexec {cc} \"$@\"\n");
    place.program("script-cc", &text)
}

#[test]
fn a_compiler_that_hangs_costs_one_candidate_and_some_seconds() {
    let hangs = || {
        let place = Place::new();
        let count = place.path("count");
        // The third compilation never ends.
        // Whoever makes the folder is the third; two that count at once would both be the fourth.
        let body =
            format!("echo >> {0}; [ $(wc -l < {0}) -ge 3 ] && mkdir {0}.d 2>/dev/null && sleep 600", count.display());
        let args = ["tune", "--dtype", "f32", "--head-dim", "16", "--q-len", "64", "--trials", "5", "--budget-s", "30"];
        let start = Instant::now();
        let output = place.flashtune(&args).arg("--json").env("CC", script(&place, &body)).output().unwrap();
        // Not the minute that a first compilation may take.
        assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());
        let told = String::from_utf8_lossy(&output.stderr);
        if told.contains("nothing was stored") {
            return None;
        }
        assert!(output.status.success(), "{told}");
        Some(serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap())
    };
    let report = (0..4).find_map(|_| hangs()).expect("the machine is too busy to tune");
    let trials = report["tuned"][0]["trials"].as_array().unwrap();
    let hung: Vec<_> =
        trials.iter().filter(|t| t["reason"].as_str().is_some_and(|r| r.contains("took more"))).collect();
    assert!(hung.len() == 1 && hung[0]["stage"] == "compile", "{trials:?}");
}

#[test]
fn the_tuner_never_touches_the_driver_of_the_gpu() {
    let place = Place::new();
    let (source, log) = (place.path("cuda.c"), place.path("loaded"));
    // A driver without devices, that writes down who loads it.
    let code = format!(
        "#include <stdio.h>\n#include <unistd.h>\n\
         __attribute__((constructor)) static void loaded(void) {{ FILE *f = fopen(\"{}\", \"a\"); \
         fprintf(f, \"%d\\n\", getpid()); fclose(f); }}\n\
         int cuInit(unsigned f) {{ return 100; }}\n\
         int cuDriverGetVersion(int *v) {{ *v = 13000; return 0; }}\n\
         int cuGetErrorName(int e, const char **s) {{ *s = \"CUDA_ERROR_NO_DEVICE\"; return 0; }}\n\
         int cuGetErrorString(int e, const char **s) {{ *s = \"no device\"; return 0; }}\n",
        log.display()
    );
    std::fs::write(&source, code).unwrap();
    let folder = place.path("driver");
    std::fs::create_dir(&folder).unwrap();
    let library = folder.join("libcuda.so.1");
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let built = Command::new(cc).args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(built.success());
    std::os::unix::fs::symlink(&library, folder.join("libcuda.so")).unwrap();
    let tuning = Command::new(assert_cmd::cargo::cargo_bin("flashtune"))
        .args(["--device", "auto", "--json", "--cache"])
        .arg(place.cache())
        .args(["tune", "--dtype", "f32", "--head-dim", "16", "--q-len", "64", "--trials", "2", "--budget-s", "10"])
        .env("LD_LIBRARY_PATH", &folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let tuner = tuning.id().to_string();
    let output = tuning.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let loaded = std::fs::read_to_string(&log).expect("the worker looks for a GPU");
    assert!(!loaded.is_empty() && loaded.lines().all(|pid| pid != tuner), "{tuner} of {loaded}");
}

#[test]
fn tuning_in_the_hosts_own_process_is_chosen_or_warned_of() {
    let said = |chosen: bool| {
        let place = Place::new();
        let log = place.path("log");
        let file = std::fs::File::create(&log).unwrap();
        let subscriber = tracing_subscriber::fmt().with_writer(Mutex::new(file)).with_ansi(false).finish();
        let builder = Engine::builder().device(DeviceSpec::Cpu).cache_dir(place.cache());
        let engine = if chosen { builder.tune_in_this_process() } else { builder }.build().unwrap();
        let problem = Problem::forward(DType::F32, 16, Mask::Causal.kind()).unwrap();
        let shape = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 64, kv_len: 64, mask: Mask::Causal };
        let job = Job { max_trials: 1, ..Job::new(problem, shape) };
        // One schedule is its own best, however busy the machine is.
        tracing::subscriber::with_default(subscriber, || engine.tune_job(&job, &())).unwrap();
        std::fs::read_to_string(log).unwrap()
    };
    let warning = "in the host's own process, which a faulty candidate would end";
    let log = said(false);
    assert!(log.contains(warning) && log.contains("FLASHTUNE_WORKER"), "{log}");
    assert!(!said(true).contains(warning));
}
