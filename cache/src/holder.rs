//! Who holds a claim: what is noted in its file, for those who wait.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Most characters of a command that are noted and shown.
const LONGEST_COMMAND: usize = 160;

/// The process that holds a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// The host that it runs on.
    pub host: String,
    /// Among which processes its number means it: containers of one host may have namespaces of their own.
    pid_namespace: String,
    /// Its command.
    pub command: String,
    /// When it took the claim, in seconds since the Unix epoch.
    pub since: u64,
}

/// What is the same for every claim of this process.
struct Own {
    host: String,
    pid_namespace: String,
    command: String,
}

fn own() -> &'static Own {
    static OWN: OnceLock<Own> = OnceLock::new();
    OWN.get_or_init(|| {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let words: Vec<_> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
        Own {
            host: host.trim().to_owned(),
            pid_namespace: namespace.to_string_lossy().into_owned(),
            command: words.join(" ").chars().take(LONGEST_COMMAND).collect(),
        }
    })
}

impl Holder {
    /// This process, from now on.
    pub(crate) fn this() -> Self {
        let Own { host, pid_namespace, command } = own();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Self {
            pid: std::process::id(),
            host: host.clone(),
            pid_namespace: pid_namespace.clone(),
            command: command.clone(),
            since,
        }
    }

    /// What a claim's file says. None of a file that is just being written.
    pub(crate) fn parse(note: &[u8]) -> Option<Self> {
        let Self { pid, host, pid_namespace, command, since } = serde_json::from_slice(note).ok()?;
        // What is shown on a terminal steers none.
        let plain = |text: String| text.chars().filter(|c| !c.is_control()).take(LONGEST_COMMAND).collect::<String>();
        Some(Self { pid, host: plain(host), pid_namespace, command: plain(command), since })
    }

    pub(crate) fn note(&self) -> String {
        serde_json::to_string(self).map_or(String::new(), |note| note + "\n")
    }

    /// Whether it is this process.
    pub fn is_this(&self) -> bool {
        self.is_here() && self.pid == std::process::id()
    }

    /// Whether this process sees it under its number.
    pub fn is_here(&self) -> bool {
        self.host == own().host && self.pid_namespace == own().pid_namespace
    }

    /// Whether it was stopped (SIGSTOP, Ctrl-Z, a debugger) and does nothing. Not known of other hosts.
    pub fn is_stopped(&self) -> bool {
        if !self.is_here() {
            return false;
        }
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        // The name before the state is in parentheses, and may have some of its own.
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['T', 't']))
    }

    /// How long it has had the claim.
    pub fn held(&self) -> Duration {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        now.saturating_sub(Duration::from_secs(self.since))
    }

    /// What whoever waits for it can do.
    pub fn remedy(&self) -> String {
        let pid = self.pid;
        match (self.is_here(), self.is_stopped()) {
            (true, true) => {
                format!("it is stopped: `kill -CONT {pid}` lets it go on, `kill {pid}; kill -CONT {pid}` ends it")
            }
            (true, false) => format!("`kill {pid}` ends it, and what it has learnt is kept"),
            (false, _) => format!("end it on {}, and what it has learnt is kept", self.host),
        }
    }
}

/// `process 4711 on node-3 (flashtune tune), since 40 s`
impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, host, command, .. } = self;
        let held = self.held().as_secs();
        write!(f, "process {pid} on {host} ({command}), which has had it for {held} s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, Signal, kill_process};
    use std::process::Command;
    use std::time::Instant;

    #[test]
    fn a_note_is_read_back_and_cannot_steer_a_terminal() {
        let this = Holder::this();
        assert_eq!(Holder::parse(this.note().as_bytes()), Some(this.clone()));
        assert!(this.is_this() && this.is_here() && !this.is_stopped());
        let hostile = Holder { command: "\u{1b}[2Jflashtune\nx".to_owned(), ..this.clone() };
        assert_eq!(Holder::parse(hostile.note().as_bytes()).unwrap().command, "[2Jflashtunex");
        for torn in ["", "4711", &this.note()[..20]] {
            assert_eq!(Holder::parse(torn.as_bytes()), None);
        }
        let elsewhere = Holder { host: "node-3".to_owned(), ..this };
        assert!(!elsewhere.is_here() && !elsewhere.is_stopped() && elsewhere.remedy().contains("on node-3"));
    }

    #[test]
    fn a_stopped_process_is_seen_to_be_stopped() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let holder = Holder { pid: child.id(), ..Holder::this() };
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        let until = |stopped: bool| {
            let start = Instant::now();
            while holder.is_stopped() != stopped {
                assert!(start.elapsed() < Duration::from_secs(20), "stopped: {}", !stopped);
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        until(false);
        kill_process(pid, Signal::STOP).unwrap();
        until(true);
        assert!(holder.remedy().contains("kill -CONT"), "{}", holder.remedy());
        kill_process(pid, Signal::CONT).unwrap();
        until(false);
        assert!(!holder.remedy().contains("-CONT"), "{}", holder.remedy());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
