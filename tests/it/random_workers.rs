//! Candidates that go wrong at random: in any of many ways, when they are loaded or in any of their launches. What it
//! costs is the candidate, and nobody else is blamed.
//!
//! `FLASHTUNE_WORKER_FAULTS` sets how many go wrong in all, `FLASHTUNE_SEED` how.

use crate::common::faults::count_of;
use crate::common::planted::{is_schedule, planted, schedules, worker};
use crate::common::{self, Place};
use flashtune::{DType, Mask, Problem, Shape};
use flashtune_cache::{CacheDir, Stage};
use flashtune_codegen::{CpuSchedule, Schedule, TemplateSet};
use flashtune_tuner::{Error, Event, Job, Observer, Search, tune};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Candidates of a job. The first, which is the default, and every fifth do nothing wrong.
const CANDIDATES: usize = 24;
/// Launches within which all checks of the smallest inputs are done, and those within which a fault may strike.
const CHECKED: u64 = 12;
const LAUNCHES: u64 = 24;

/// What may happen, how often of a hundred, and the code. The last ones may strike while others run, or where nobody
/// sees it.
const MENU: [(&str, u64, &str); 16] = [
    ("illegal address", 12, "*(volatile int *)8 = 1;"),
    ("illegal instruction", 8, "__builtin_trap();"),
    ("trap", 8, "raise(SIGTRAP);"),
    ("abort", 8, "abort();"),
    ("arithmetic", 8, "raise(SIGFPE);"),
    ("exit", 8, "_exit(7);"),
    ("exit as if all was well", 6, "_exit(0);"),
    ("killed", 8, "raise(SIGKILL);"),
    ("stack overflow", 6, "deep(1 << 30);"),
    // When it is loaded it has no inputs, and nothing may limit its memory yet.
    ("out of memory", 4, "if (!moment) abort(); for (;;) memset(malloc(1 << 26), 1, 4096);"),
    ("closes everything", 6, "for (int fd = 0; fd < 64; fd++) close(fd);"),
    ("endless loop", 1, "for (volatile int x = 0;; x = x + 1);"),
    ("stands still", 1, "raise(SIGSTOP);"),
    ("writes past the end", 6, "if (moment) memset(end_of(a), 1, 2000); else abort();"),
    (LATER, 6, "later(1 + own % 30);"),
    ("writes into an input", 4, "if (moment) ((float *)a->k)[own % 16] = 1e30f; else abort();"),
];

/// Its process is ended at another time than its own.
const LATER: &str = "alarm";

fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What a candidate of a job does, and in which launch; 0 is when it is loaded. As the kernel itself computes it.
fn plan(seed: u64, number: u64) -> Option<(&'static str, u64)> {
    if number.is_multiple_of(5) {
        return None;
    }
    let own = mixed(seed ^ mixed(number));
    let mut share = (own >> 8) % MENU.iter().map(|m| m.1).sum::<u64>();
    for (name, weight, _) in MENU {
        if share < weight {
            return Some((name, (own >> 32) % LAUNCHES));
        }
        share -= weight;
    }
    unreachable!("the shares sum up")
}

/// One kernel for all jobs, which reads what it does from a file.
fn template(all: &[CpuSchedule], file: &Path) -> TemplateSet {
    let mut head = "/* @{ header }@ */\n#if 0\n".to_owned();
    for (i, s) in all.iter().take(CANDIDATES).enumerate() {
        head += &format!("#elif {}\n#define NUMBER {i}\n", is_schedule(s));
    }
    let (mut strike, mut from) = (String::new(), 0);
    for (_, weight, code) in MENU {
        strike += &format!("    if (share >= {from} && share < {}) {{ {code} }}\n", from + weight);
        from += weight;
    }
    head += &format!(
        r#"#else
#error not one of the candidates
#endif
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>
const int schedule_number = NUMBER;
static uint64_t own, share, moment = -1, launches;
static uint64_t mixed(uint64_t x) {{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}}
static int deep(volatile int n) {{ volatile char frame[4096]; frame[n % 4096] = 1; return n ? deep(n - 1) + frame[9] : 0; }}
int (*const keep)(volatile int) = deep;
static void later(int ms) {{
    struct itimerval t = {{ {{ 0, 0 }}, {{ 0, ms * 1000 }} }};
    setitimer(ITIMER_REAL, &t, 0);
}}
typedef struct {{
    uint64_t q, k, v, o, lse, weights;
    int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];
    int32_t batch, heads, kv_heads, q_len;
}} Call;
static char *end_of(const Call *a) {{
    int64_t last = (a->batch - 1) * a->o_stride[0] + (a->heads - 1) * a->o_stride[1] + (a->q_len - 1) * a->o_stride[2];
    return (char *)a->o + 4 * (last + 16);
}}
static void strike(const void *call) {{
    const Call *a = call;
{strike}}}
__attribute__((constructor)) static void begin(void) {{
    FILE *f = fopen("{}", "r");
    unsigned long seed = 0;
    if (NUMBER % 5 == 0 || !f || fscanf(f, "%lu", &seed) != 1) return;
    fclose(f);
    own = mixed(seed ^ mixed(NUMBER));
    share = (own >> 8) % {from};
    moment = (own >> 32) % {LAUNCHES};
    if (moment == 0) {{
        strike(0);
    }}
}}
"#,
        file.display()
    );
    planted(&head, "if (tile == 0 && ++launches == moment) strike(a)")
}

/// Who was timed, who failed and how, and what each failure cost.
#[derive(Default)]
struct Seen {
    last: Option<Instant>,
    timed: HashMap<Schedule, u32>,
    failed: HashMap<Schedule, (Stage, String)>,
    costs: Vec<Duration>,
}

struct Watch(Mutex<Seen>);

impl Observer for Watch {
    fn event(&self, event: &Event<'_>) {
        let mut seen = self.0.lock().unwrap();
        let now = Instant::now();
        let before = seen.last.replace(now);
        match event {
            Event::Timed { schedule, .. } => *seen.timed.entry(**schedule).or_default() += 1,
            Event::Failed { schedule, stage, reason } => {
                seen.failed.insert(**schedule, (*stage, (*reason).to_owned()));
                seen.costs.extend(before.map(|before| now - before));
            }
            _ => {}
        }
    }
}

#[test]
fn whoever_goes_wrong_at_random_costs_itself_alone() {
    let (wanted, first) = (count_of("FLASHTUNE_WORKER_FAULTS", 20), count_of("FLASHTUNE_SEED", 1));
    let place = Place::new();
    let dir = CacheDir::at(place.cache());
    let problem = Problem::forward(DType::F32, 16, Mask::Full.kind()).unwrap();
    let shape = Shape { batch: 2, heads: 1, kv_heads: 1, q_len: 64, kv_len: 64, mask: Mask::Full };
    let job = Job { budget: Duration::from_secs(300), force: true, ..Job::new(problem, shape) };
    let all: Vec<CpuSchedule> = schedules(&job).into_iter().take(CANDIDATES).collect();
    let search = Search::Only(all.iter().map(|s| Schedule::Cpu(*s)).collect());
    let job = Job { search, ..job };
    let file = place.path("seed");
    let templates = template(&all, &file);
    let mut runner = worker();

    let _alone = common::alone();
    let (mut failures, mut jobs, mut undecided) = (0, 0, 0);
    let (mut costs, mut kinds) = (Vec::new(), BTreeMap::<&str, u32>::new());
    while failures < wanted {
        let seed = mixed(first.wrapping_mul(1_000_003) + jobs) >> 1;
        std::fs::write(&file, seed.to_string()).unwrap();
        jobs += 1;
        let watch = Watch(Mutex::default());
        match tune(&mut runner, &templates, &dir, &job, &watch) {
            Ok(_) => {}
            // The machine is busy: who came through the checks is known all the same.
            Err(Error::Noise { .. }) => undecided += 1,
            Err(e) => panic!("seed {seed}: {e}"),
        }
        let seen = watch.0.into_inner().unwrap();
        for (number, schedule) in all.iter().enumerate() {
            let schedule = Schedule::Cpu(*schedule);
            let failed = seen.failed.get(&schedule);
            let what = format!("seed {seed}, candidate {number}: {failed:?}");
            match plan(seed, number as u64) {
                None => assert!(failed.is_none() && seen.timed.contains_key(&schedule), "{what}, but it did nothing"),
                Some((name, moment)) => {
                    assert!(
                        failed.is_some() || moment > CHECKED || name == LATER,
                        "{what}: {name} in launch {moment}, timed {:?}",
                        seen.timed.get(&schedule)
                    );
                    let Some((stage, reason)) = failed else { continue };
                    assert!(matches!(stage, Stage::Load | Stage::Check | Stage::Measure), "{what}: {name}");
                    let words =
                        ["ended", "come back", "written", "wrong answer", "stopped answering", "launches", "error"];
                    assert!(words.iter().any(|w| reason.contains(w)), "{what}: {name} in launch {moment}");
                    *kinds.entry(name).or_default() += 1;
                    failures += 1;
                }
            }
        }
        costs.extend(seen.costs);
    }
    costs.sort();
    let mean = costs.iter().sum::<Duration>() / costs.len() as u32;
    let (p99, most) = (costs[costs.len() * 99 / 100], costs[costs.len() - 1]);
    println!(
        "{failures} went wrong in {jobs} jobs ({undecided} undecided): {mean:?} each, p99 {p99:?}, \
         at most {most:?}: {kinds:?}"
    );
    assert!(mean < Duration::from_secs(3) && most < Duration::from_secs(10), "{mean:?}, at most {most:?}");
}
