//! What `flashtune tune` tells while it runs: winners, the time left, what an interrupt keeps, whom it waits for.

use crate::common::compiler::LoggedCompiler;
use crate::common::{self, Place, SMALL};
use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// A tuner whose output goes to files, as it does without a terminal.
struct Tuner {
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

impl Tuner {
    fn start(place: &Place, compiler: &LoggedCompiler, name: &str, args: &[&str]) -> Self {
        let [out, err] = ["out", "err"].map(|end| place.path(&format!("{name}.{end}")));
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("flashtune"));
        command.args(["--device", "cpu", "--cache"]).arg(place.cache()).arg("tune").args(args);
        command.env("CC", compiler.program()).env_remove("FLASHTUNE_TEMPLATES").env_remove("FLASHTUNE_LOG");
        command.stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
        // Whoever runs the tests behind `&` has them, and what they start, ignore SIGINT.
        // SAFETY: a system call, which is safe after a fork.
        unsafe {
            command.pre_exec(|| match libc::signal(libc::SIGINT, libc::SIG_DFL) {
                libc::SIG_ERR => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        Self { child: command.spawn().unwrap(), out, err }
    }

    fn told(&self) -> String {
        std::fs::read_to_string(&self.err).unwrap()
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&str) -> bool) {
        let start = Instant::now();
        while !done(&self.told()) {
            assert!(start.elapsed() < Duration::from_secs(60), "no {what}: {}", self.told());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// What it told and printed; none when the machine was too busy for a result.
    fn end(mut self) -> Option<(ExitStatus, String, String)> {
        let status = self.child.wait().unwrap();
        let (told, printed) = (self.told(), std::fs::read_to_string(&self.out).unwrap());
        (!told.contains("nothing was stored")).then_some((status, told, printed))
    }
}

impl Drop for Tuner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn in_quiet(scene: impl Fn() -> Option<()>) {
    let _alone = common::alone();
    assert!((0..4).any(|_| scene().is_some()), "the machine is too busy to tune");
}

#[test]
fn an_interrupted_tune_says_what_it_keeps_and_is_taken_over() {
    in_quiet(|| {
        let place = Place::new();
        let compiler = LoggedCompiler::new(&place, 0.3);
        let args = ["--dtype", "f32", "--head-dim", "16,24", "--heads", "2", "--q-len", "64", "--trials", "6"];
        let args = [&args[..], &["--budget-s", "24"]].concat();
        // The other case is at work until the signal comes, however late that is.
        compiler.hold("problem   forward-f32-d24-");
        let mut first = Tuner::start(&place, &compiler, "first", &args);
        first.until("winner", |told| told.contains("[1/2] ") || told.contains("nothing was stored"));
        if first.told().contains("nothing was stored") {
            return None;
        }
        first.signal("-INT");
        let status = first.child.wait().unwrap();
        compiler.release();
        let told = first.told();
        // Ended by the signal itself, which a shell tells as 130.
        assert_eq!((status.code(), status.signal()), (None, Some(2)), "{told}");
        let winner = told.lines().find(|line| line.starts_with("[1/2] ")).unwrap();
        assert!(winner.contains("-d16-") && winner.contains(" us, ") && winner.contains("default"), "{winner}");
        let last = told.lines().last().unwrap();
        let kept = format!("interrupted: 1 of 2 cases are kept in {}", place.cache().display());
        assert!(last.starts_with(&kept) && last.contains("the same command goes on"), "{told}");

        let (status, told, printed) = Tuner::start(&place, &compiler, "second", &args).end()?;
        assert!(status.success(), "{told}");
        let line = |start: &str| told.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
        assert!(line("[1/2] ").contains("-d16-") && line("[1/2] ").ends_with("(kept from before)"), "{told}");
        assert!(line("[2/2] ").contains("-d24-") && line("[2/2] ").contains(" timed in "), "{told}");
        for step in ["export tuned.ftb", "sign tuned.ftb", "--head-dim 16,24", " --force"] {
            assert!(printed[printed.find("next:").unwrap()..].contains(step), "{step}: {printed}");
        }
        Some(())
    });
}

#[test]
fn a_stopped_tuner_is_named_and_holds_up_nobody_elses_problem() {
    in_quiet(|| {
        let place = Place::new();
        let compiler = LoggedCompiler::new(&place, 0.2);
        let same = [SMALL, &["--trials", "6", "--budget-s", "20"]].concat();
        let mut stopped = Tuner::start(&place, &compiler, "stopped", &same);
        stopped.until("compilation", |_| compiler.compiled().len() >= 2);
        stopped.signal("-STOP");
        let pid = format!("process {}", stopped.child.id());

        let other = ["--dtype", "f32", "--head-dim", "24", "--heads", "2", "--q-len", "64", "--trials", "2"];
        let start = Instant::now();
        let other = Tuner::start(&place, &compiler, "other", &[&other[..], &["--budget-s", "6"]].concat());
        let (status, told, _) = other.end()?;
        assert!(status.success(), "{told}");
        let waits = told.lines().find(|line| line.contains(" waits: the device is used by ")).unwrap();
        assert!(waits.contains(&pid) && waits.contains("kill -CONT") && waits.contains("flashtune"), "{told}");
        assert!(told.contains(&format!("not waiting any longer for {pid}")), "{told}");
        assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());

        let (status, told, _) =
            Tuner::start(&place, &compiler, "same", &[&same[..], &["--patience-s", "1"]].concat()).end()?;
        assert_eq!(status.code(), Some(1), "{told}");
        let error = told.lines().last().unwrap();
        assert!(error.contains(&format!("the same is being tuned by {pid}")) && error.contains("patience"), "{told}");
        Some(())
    });
}
