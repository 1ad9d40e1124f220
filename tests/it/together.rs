//! Many processes that want the same: one compiles, one tunes, all have one result, and a dead one holds nobody up.

use crate::common::compiler::LoggedCompiler;
use crate::common::faults::count_of;
use crate::common::{self, Place, SMALL};
use flashtune::{DeviceSpec, Engine, Policy, Status};
use flashtune_cache::{Artifact, ArtifactFiles, Bundle, CacheDir, Claims, Key, Origin, Turn};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn json(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What a tuner that was not disturbed told; none when the machine was too busy for a result.
fn tuned(output: &Output) -> Option<serde_json::Value> {
    let noisy = !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("nothing was stored");
    if noisy { None } else { Some(json(output)) }
}

/// Plays a scene until the machine was quiet enough for it.
fn in_quiet(scene: impl Fn() -> Option<()>) {
    let _alone = common::alone();
    assert!((0..4).any(|_| scene().is_some()), "the machine is too busy to tune");
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn sixty_four_processes_compile_a_kernel_once() {
    in_quiet(|| {
        let place = Place::new();
        let compiler = LoggedCompiler::new(&place, 0.3);
        let explain = [&["explain"], SMALL].concat();
        let all: Vec<Child> = (0..64).map(|_| compiler.start(&place, &explain)).collect();
        let plans: BTreeSet<String> = all
            .into_iter()
            .map(|c| json(&c.wait_with_output().unwrap())[0]["schedule"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!((plans.len(), compiler.compiled().len()), (1, 1), "{:?}", compiler.compiled());
        Some(())
    });
}

/// Where one of many processes finds what they share.
const SHARED: &str = "TOGETHER_SHARED";

/// Another kernel for each number, as far as keys and contents go.
fn kernel(artifact: &Artifact, number: u64) -> Artifact {
    let mut kernel = artifact.clone();
    kernel.recipe.options.push(format!("-DNUMBER={number}"));
    kernel.bytes.extend(number.to_le_bytes());
    kernel
}

/// One of the processes of the next test: needs all kernels, in the same order as the others.
#[test]
#[ignore = "the next test starts it"]
fn a_process_that_needs_many_kernels() {
    let shared = PathBuf::from(std::env::var_os(SHARED).expect("it is started by the test below"));
    let bundle = Bundle::map(&shared.join("one.ftb")).unwrap();
    let record = bundle.records().next().unwrap().unwrap().0;
    let artifact = bundle.artifact(&record.artifact).unwrap().unwrap();
    let files = ArtifactFiles::new(&CacheDir::at(shared.join("cache")));
    let made = std::fs::OpenOptions::new().append(true).create(true).open(shared.join("made")).unwrap();
    for number in 0..count_of("FLASHTUNE_STRESS_KERNELS", MANY_KERNELS) {
        let wanted = kernel(&artifact, number);
        let make = || {
            writeln!(&made, "{number}").unwrap();
            Ok::<_, Infallible>(wanted.clone())
        };
        let (got, origin) = files.get_or_make(&wanted.recipe.key(), make).unwrap();
        assert!(got == wanted && !matches!(origin, Origin::Unkept(_)), "{number}: {origin:?}");
    }
}

const MANY_KERNELS: u64 = 1000;

/// `FLASHTUNE_STRESS_KERNELS` says how many.
#[test]
fn sixty_four_processes_make_each_of_many_kernels_once() {
    in_quiet(|| {
        let place = Place::new();
        let arch = common::host_arch().to_string();
        let one = place.path("one.ftb");
        place.json(&[&["build"], SMALL, &["--arch", &arch, "--out", one.to_str().unwrap()]].concat());
        let shared = one.parent().unwrap();
        let processes: Vec<Child> = (0..64)
            .map(|_| {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.args(["together::a_process_that_needs_many_kernels", "--exact", "--ignored"]);
                command.env(SHARED, shared).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        for process in processes {
            let output = process.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
        let made = std::fs::read_to_string(shared.join("made")).unwrap();
        let mut made: Vec<u64> = made.lines().map(|l| l.parse().unwrap()).collect();
        made.sort_unstable();
        assert!(made.into_iter().eq(0..count_of("FLASHTUNE_STRESS_KERNELS", MANY_KERNELS)), "each once");
        Some(())
    });
}

#[test]
fn sixty_four_processes_tune_a_problem_once() {
    in_quiet(|| {
        let place = Place::new();
        let compiler = LoggedCompiler::new(&place, 0.0);
        let tune = [&["tune"], SMALL, &["--trials", "3", "--budget-s", "6"]].concat();
        let all: Vec<Child> = (0..64).map(|_| compiler.start(&place, &tune)).collect();
        let reports: Option<Vec<_>> =
            all.into_iter().map(|c| tuned(&c.wait_with_output().unwrap()).map(|r| r["tuned"][0].clone())).collect();
        let reports = reports?;
        assert_eq!(reports.iter().filter(|r| r["cached"] == false).count(), 1);
        assert!(reports.iter().all(|r| r["record"] == reports[0]["record"]), "one result");
        let compiled = compiler.compiled();
        let distinct: BTreeSet<_> = compiled.iter().collect();
        assert!(compiled.len() <= 3 && distinct.len() == compiled.len(), "{compiled:?}");
        // Nobody left anything behind.
        let left = |folder: &str| std::fs::read_dir(place.cache().join("v7").join(folder)).map_or(0, |d| d.count());
        assert_eq!((left("claims"), left("jobs")), (0, 0));
        Some(())
    });
}

/// Within this time somebody else has what a dead process held.
const NOTICED: Duration = Duration::from_secs(1);

/// Which claim one of the processes of the next test holds.
const NUMBER: &str = "TOGETHER_NUMBER";

fn numbered(number: u64) -> Key {
    Key::of(&number.to_le_bytes())
}

/// One of the processes of the next test: holds a claim until it is killed.
#[test]
#[ignore = "the next test starts it"]
fn a_process_that_holds_a_claim() {
    let shared = PathBuf::from(std::env::var_os(SHARED).expect("it is started by the test below"));
    let number = count_of(NUMBER, 0);
    let claims = Claims::new(&CacheDir::at(shared.join("cache")));
    let _claim = claims.take(&numbered(number)).expect("nobody else has it yet");
    std::fs::write(shared.join(format!("held-{number}")), "").unwrap();
    std::thread::sleep(Duration::from_secs(120));
}

#[test]
fn a_dead_holder_of_a_claim_is_noticed_within_a_second() {
    const HOLDERS: u64 = 12;
    let _alone = common::alone();
    let place = Place::new();
    let shared = place.path("shared");
    std::fs::create_dir(&shared).unwrap();
    let claims = Claims::new(&CacheDir::at(shared.join("cache")));
    let hold = |number: u64| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["together::a_process_that_holds_a_claim", "--exact", "--ignored"]);
        command.env(SHARED, &shared).env(NUMBER, number.to_string()).stdout(Stdio::null()).spawn().unwrap()
    };
    let mut holders: Vec<Child> = (0..HOLDERS).map(hold).collect();
    until("the claims", || (0..HOLDERS).all(|n| shared.join(format!("held-{n}")).exists()));
    let waited = std::thread::scope(|scope| {
        let wait = |number| {
            let claims = &claims;
            scope.spawn(move || match claims.wait::<()>(&numbered(number), Duration::from_secs(60), || None) {
                Turn::Mine(_claim) => Instant::now(),
                other => panic!("{number}: {other:?}"),
            })
        };
        let waiters: Vec<_> = (0..HOLDERS).map(wait).collect();
        // Until they look as rarely as they ever do. Then each holder dies at another moment between two looks.
        std::thread::sleep(Duration::from_millis(1500));
        let killed: Vec<Instant> = holders
            .iter_mut()
            .map(|holder| {
                std::thread::sleep(Duration::from_millis(23));
                let now = Instant::now();
                holder.kill().unwrap();
                now
            })
            .collect();
        let mine = waiters.into_iter().map(|w| w.join().unwrap());
        killed.into_iter().zip(mine).map(|(killed, mine)| mine - killed).max().expect("some")
    });
    holders.iter_mut().for_each(|h| drop(h.wait()));
    println!("a dead holder was noticed within {waited:?}");
    assert!(waited < NOTICED, "{waited:?}");
}

#[test]
fn the_next_one_goes_on_where_a_killed_tuner_was() {
    in_quiet(|| {
        let place = Place::new();
        let compiler = LoggedCompiler::new(&place, 0.2);
        let tune = [&["tune"], SMALL, &["--trials", "8", "--budget-s", "20"]].concat();
        let mut first = compiler.start(&place, &tune);
        until("the first compilations", || compiler.compiled().len() >= 3);
        let second = compiler.start(&place, &tune);
        std::thread::sleep(Duration::from_millis(500));
        assert!(first.try_wait().unwrap().is_none(), "it was to be killed in the midst of its work");
        let killed = Instant::now();
        first.kill().unwrap();
        first.wait().unwrap();
        let before = compiler.compiled().len();
        // Whoever holds a claim writes its number into it.
        let next = format!("{{\"pid\":{},", second.id());
        let claims = place.cache().join("v7/claims");
        let has_it = |path: PathBuf| std::fs::read_to_string(path).is_ok_and(|holder| holder.starts_with(&next));
        until("the second one's claim", || {
            std::fs::read_dir(&claims).is_ok_and(|dir| dir.flatten().any(|entry| has_it(entry.path())))
        });
        let noticed = killed.elapsed();
        assert!(noticed < NOTICED, "{noticed:?}");
        until("the second one's turn", || compiler.compiled().len() > before || killed.elapsed().as_secs() > 20);
        let waited = killed.elapsed();
        let report = tuned(&second.wait_with_output().unwrap())?;
        assert_eq!(report["tuned"][0]["cached"], false);
        // A process on two busy cores needs some time to start a compiler; a dead holder costs a glance.
        assert!(waited < Duration::from_secs(3), "{waited:?}");
        let compiled = compiler.compiled();
        let distinct: BTreeSet<_> = compiled.iter().collect();
        // What was being compiled on each core when it was killed.
        let cores = std::thread::available_parallelism().unwrap().get();
        assert!(compiled.len() <= distinct.len() + cores, "{compiled:?}");
        Some(())
    });
}

#[test]
fn a_tuner_that_is_killed_again_and_again_comes_to_an_end_and_to_one_result() {
    in_quiet(|| {
        let place = Place::new();
        let compiler = LoggedCompiler::new(&place, 0.0);
        let tune = [&["tune"], SMALL, &["--trials", "6", "--budget-s", "20"]].concat();
        let mut kills = 0;
        // Each gets a little further than the one before.
        let report = loop {
            let mut process = compiler.start(&place, &tune);
            let start = Instant::now();
            // The whole of it takes half a second on a calm machine.
            let life = Duration::from_millis(100 + 100 * kills);
            while start.elapsed() < life && process.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
            if process.try_wait().unwrap().is_some() {
                break tuned(&process.wait_with_output().unwrap())?;
            }
            process.kill().unwrap();
            process.wait().unwrap();
            kills += 1;
            assert!(kills < 40, "it gets nowhere");
        };
        assert!(kills > 1 && report["tuned"][0]["median_us"].as_f64().unwrap() > 0.0, "{kills}: {report}");
        assert_eq!(place.json(&["list"]).as_array().unwrap().len(), 1);
        let again = tuned(&compiler.start(&place, &tune).wait_with_output().unwrap())?;
        assert_eq!(again["tuned"][0]["cached"], true);
        Some(())
    });
}

#[test]
fn a_call_may_take_the_default_while_another_process_tunes() {
    in_quiet(|| {
        let place = Place::new();
        // Longer than this process takes to compile a kernel on a busy machine.
        let compiler = LoggedCompiler::new(&place, 3.0);
        let tune = [&["tune"], SMALL, &["--trials", "2", "--budget-s", "6"]].concat();
        let mut tuning = compiler.start(&place, &tune);
        until("the first compilation", || !compiler.compiled().is_empty());
        let engine = Engine::builder()
            .device(DeviceSpec::Cpu)
            .cache_dir(place.cache())
            .policy(Policy::Tune)
            .default_meanwhile()
            .tune_in_this_process()
            .build()
            .unwrap();
        let (problem, shape) = common::counted::small(128);
        let status = || engine.plan(&problem, &shape).unwrap().status();
        let start = Instant::now();
        assert_eq!(status(), Status::Default);
        assert!(tuning.try_wait().unwrap().is_none(), "the other was done before the question: {:?}", start.elapsed());
        let others = tuned(&tuning.wait_with_output().unwrap())?;
        until("the other's result", || status() == Status::Tuned);
        // It is the other's, and not one of this process. As text, since reading a number as JSON may round it.
        let record = serde_json::to_string(engine.plan(&problem, &shape).unwrap().record().unwrap()).unwrap();
        let record: serde_json::Value = serde_json::from_str(&record).unwrap();
        assert_eq!(record, others["tuned"][0]["record"]);
        Some(())
    });
}

#[test]
fn tuners_of_different_problems_share_a_cache_and_a_device() {
    in_quiet(|| {
        let place = Place::new();
        let compiler = LoggedCompiler::new(&place, 0.0);
        let tune = |dim| {
            let args = ["tune", "--dtype", "f32", "--head-dim", dim, "--heads", "2", "--q-len", "64"];
            compiler.start(&place, &[&args[..], &["--trials", "2", "--budget-s", "6"]].concat())
        };
        let all: Vec<Child> = ["16", "24", "32", "40"].map(tune).into();
        for process in all {
            let report = tuned(&process.wait_with_output().unwrap())?;
            assert_eq!(report["tuned"][0]["cached"], false, "{report}");
        }
        assert_eq!(place.json(&["list"]).as_array().unwrap().len(), 4);
        Some(())
    });
}
