//! One worker process, from its start to its end.

use super::WorkerCommand;
use super::protocol::{Reply, Request, frame, read_frame, read_greeting};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a new process may take to say what it is.
const GREETING: Duration = Duration::from_secs(20);
/// How long a process that closed its socket may take to end by itself, which tells more than being killed does.
const GRACE: Duration = Duration::from_millis(300);
/// Launches of one question: a check has some tens. Whoever announces more never comes to an answer.
const MOST_LAUNCHES: usize = 10_000;
/// The end of what it printed, for the reason.
const LAST_WORDS: usize = 600;

/// How long the worker may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// While a candidate has the device.
    pub launch: Duration,
    /// Between two messages at any other time.
    pub host: Duration,
}

/// Why there is no reply. The process is gone.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Loss {
    /// It ended by itself, or by a signal: in words.
    Died(String),
    /// Somebody killed it (SIGKILL) who was not this one: in words.
    Killed(String),
    /// A candidate had the device for too long.
    Hung(Duration),
}

/// How a process ended, and whether before it was killed from here.
#[derive(Debug, Clone, Copy)]
struct End {
    status: ExitStatus,
    unasked: bool,
}

const SIGKILL: i32 = 9;

/// A running worker. Dropped, it is killed.
pub(crate) struct Process {
    socket: UnixStream,
    /// Tells the keeper to end the process: with grace, or when dropped, at once.
    end: Option<Sender<()>>,
    keeper: Option<JoinHandle<Option<End>>>,
    printed: Arc<Mutex<Vec<u8>>>,
    /// The longest time that a candidate had the device during the last request.
    pub longest_launch: Duration,
    id: u32,
}

impl Process {
    /// Starts a worker and hears its greeting.
    ///
    /// # Errors
    /// Why it could not be started, or is no worker of this version.
    pub(crate) fn start(command: &WorkerCommand) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let printed = Arc::new(Mutex::new(Vec::new()));
        let (end, ended) = channel();
        let (started, starts) = channel();
        let (command, prints) = (command.clone(), printed.clone());
        let keeper = std::thread::Builder::new()
            .name("flashtune-worker".into())
            .spawn(move || keep(&command, theirs.into(), &prints, &started, &ended))?;
        let mut process =
            Self { socket, end: Some(end), keeper: Some(keeper), printed, longest_launch: Duration::ZERO, id: 0 };
        process.id = starts.recv().unwrap_or_else(|_| Err(io::Error::other("its thread ended")))?;
        process.socket.set_read_timeout(Some(GREETING))?;
        read_greeting(&mut process.socket).map_err(|e| {
            let (_, words) = process.finish(e.kind() != io::ErrorKind::WouldBlock);
            io::Error::new(e.kind(), if words.is_empty() { e.to_string() } else { format!("{e}: {words}") })
        })?;
        Ok(process)
    }

    /// The number of the process.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// One request and its reply. After an error the process is gone, and later requests fail at once.
    pub(crate) fn ask(&mut self, request: &Request, limits: Limits) -> Result<Reply, Loss> {
        self.longest_launch = Duration::ZERO;
        let sent = frame(request).and_then(|bytes| self.send(&bytes));
        if let Err(e) = sent {
            return Err(self.lost(&e));
        }
        let mut launched: Option<Instant> = None;
        for _ in 0..2 * MOST_LAUNCHES {
            match self.receive(if launched.is_some() { limits.launch } else { limits.host }) {
                Ok(Reply::Launched) => launched = Some(Instant::now()),
                Ok(Reply::Returned) => {
                    let taken = launched.take().map_or(Duration::ZERO, |since| since.elapsed());
                    self.longest_launch = self.longest_launch.max(taken);
                }
                Ok(reply) => return Ok(reply),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && launched.is_some() => {
                    self.finish(false);
                    return Err(Loss::Hung(limits.launch));
                }
                Err(e) => return Err(self.lost(&e)),
            }
        }
        self.finish(false);
        Err(Loss::Died(format!("it announced {MOST_LAUNCHES} launches for one question and was stopped")))
    }

    /// A handle that means this process even when its number is another's by then; none where the system has none.
    pub(crate) fn handle(&self) -> Option<OwnedFd> {
        let id = i32::try_from(self.id).ok().and_then(Pid::from_raw)?;
        pidfd_open(id, PidfdFlags::empty()).ok()
    }

    /// One request that is done by the worker itself, whole within a limit: to be silent for longer is to hang. Time in
    /// which it was made to stand still does not count.
    pub(crate) fn ask_within(
        &mut self,
        request: &Request,
        limit: Duration,
        stood_still: impl Fn() -> Duration,
    ) -> Result<Reply, Loss> {
        let start = Instant::now();
        let mut asked = frame(request).and_then(|bytes| self.send(&bytes));
        while asked.is_ok() {
            let left = (limit + stood_still()).saturating_sub(start.elapsed());
            if left.is_zero() {
                self.finish(false);
                return Err(Loss::Hung(limit));
            }
            match self.speaks_within(left) {
                Ok(true) => break,
                Ok(false) => {}
                Err(e) => asked = Err(e),
            }
        }
        let silent = |e: &io::Error| e.kind() == io::ErrorKind::WouldBlock;
        asked.and_then(|()| self.receive(limit)).map_err(|e| match silent(&e) {
            true => {
                self.finish(false);
                Loss::Hung(limit)
            }
            false => self.lost(&e),
        })
    }

    /// Whether there is something to read, or its end, before the limit; nothing is taken.
    fn speaks_within(&self, limit: Duration) -> io::Result<bool> {
        self.socket.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
        match recv(self.socket.as_fd(), &mut [0u8; 1], RecvFlags::PEEK) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Writes without the signal that a closed socket would send to a host that did not ask for it.
    fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match send(self.socket.as_fd(), bytes, SendFlags::NOSIGNAL) {
                Ok(n) => bytes = &bytes[n..],
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn receive(&mut self, limit: Duration) -> io::Result<Reply> {
        // A limit of zero would mean none.
        self.socket.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
        read_frame(&mut self.socket)
    }

    /// What became of a process whose socket failed.
    fn lost(&mut self, error: &io::Error) -> Loss {
        let silent = error.kind() == io::ErrorKind::WouldBlock;
        let (end, words) = self.finish(!silent);
        let fate = match end {
            _ if silent => "it stopped answering".to_owned(),
            Some(end) => fate(end.status),
            None => error.to_string(),
        };
        let how = if words.is_empty() { fate } else { format!("{fate}: {words}") };
        match end {
            Some(End { status, unasked: true }) if status.signal() == Some(SIGKILL) => Loss::Killed(how),
            _ => Loss::Died(how),
        }
    }

    /// Ends the process, after a moment in which it may end by itself, and says how it ended and what it printed last.
    fn finish(&mut self, grace: bool) -> (Option<End>, String) {
        if let Some(end) = self.end.take().filter(|_| grace) {
            let _ = end.send(());
        }
        let end = self.keeper.take().and_then(|keeper| keeper.join().ok().flatten());
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let printed = self.printed.lock().unwrap_or_else(|e| e.into_inner());
        (end, String::from_utf8_lossy(&printed).split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.finish(false);
    }
}

/// Starts the process, and ends it when told to. This thread lives as long as the process does, because the kernel's
/// "kill me when my parent dies" means the thread that started it.
fn keep(
    command: &WorkerCommand,
    stdin: OwnedFd,
    printed: &Arc<Mutex<Vec<u8>>>,
    started: &Sender<io::Result<u32>>,
    ended: &Receiver<()>,
) -> Option<End> {
    let spawned = Command::new(&command.program)
        .args(&command.arguments)
        .stdin(stdin)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        // A group of its own, so that a compiler that it runs ends with it.
        .process_group(0)
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(e) => {
            let _ = started.send(Err(e));
            return None;
        }
    };
    let listener = child.stderr.take().map(|stderr| listen(stderr, printed.clone()));
    let _ = started.send(Ok(child.id()));
    let grace = ended.recv().is_ok();
    let deadline = Instant::now() + GRACE;
    while grace && Instant::now() < deadline && matches!(child.try_wait(), Ok(None)) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let unasked = matches!(child.try_wait(), Ok(Some(_)));
    let status = end(&mut child);
    // Whoever inherited its stderr is dead by now.
    listener.map(JoinHandle::join);
    Some(End { status: status?, unasked })
}

/// Kills what is left of the process and of its group.
fn end(child: &mut Child) -> Option<ExitStatus> {
    // Not waited for yet, or just now: while members of the group live, its number is not given to others.
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.kill();
    child.wait().ok()
}

/// Keeps the end of what the process prints, and passes it on to the log.
fn listen(mut stderr: impl Read + Send + 'static, printed: Arc<Mutex<Vec<u8>>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut chunk = [0; 4096];
        while let Ok(n @ 1..) = stderr.read(&mut chunk) {
            tracing::debug!("worker: {}", String::from_utf8_lossy(&chunk[..n]).trim_end());
            let mut printed = printed.lock().unwrap_or_else(|e| e.into_inner());
            printed.extend_from_slice(&chunk[..n]);
            let spare = printed.len().saturating_sub(LAST_WORDS);
            printed.drain(..spare);
        }
    })
}

/// How a process ended, in words.
fn fate(status: ExitStatus) -> String {
    let signal = |n| match n {
        4 => "an illegal instruction (SIGILL)",
        5 => "a trap (SIGTRAP)",
        6 => "abort (SIGABRT)",
        7 => "a bus error (SIGBUS)",
        8 => "an arithmetic fault (SIGFPE)",
        SIGKILL => "being killed (SIGKILL)",
        11 => "an illegal address (SIGSEGV)",
        _ => "a signal",
    };
    match (status.signal(), status.code()) {
        (Some(n), _) => format!("{} ended its process", signal(n)),
        (None, Some(code)) => format!("its process ended with code {code}"),
        (None, None) => format!("its process ended: {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::greeting;
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A shell script as a worker. Its standard input is the socket, as every worker's.
    fn script(folder: &std::path::Path, body: &str) -> Process {
        let program = folder.join("liar");
        std::fs::write(&program, format!("#!/bin/sh\necho '{}' >&0\n{body}\n", greeting().trim_end())).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Process::start(&WorkerCommand { program, arguments: Vec::new() }).unwrap()
    }

    /// Its standing still is not held against it, and its silence is.
    #[test]
    fn a_worker_that_is_made_to_stand_still_has_its_time_afterwards() {
        let tmp = tempfile::tempdir().unwrap();
        let ms = Duration::from_millis;
        // The reply's number: it is done.
        let mut process = script(tmp.path(), "sleep 0.5; printf '\\1\\0\\0\\0\\4' >&0; sleep 9");
        let start = Instant::now();
        let stood_still = || ms(600).min(start.elapsed());
        let reply = process.ask_within(&Request::Read, ms(200), stood_still);
        assert!(matches!(reply, Ok(Reply::Done)), "{reply:?}");
        assert_eq!(process.ask_within(&Request::Read, ms(200), Duration::default).err(), Some(Loss::Hung(ms(200))));
    }

    #[test]
    fn a_worker_that_lies_costs_its_process() {
        let tmp = tempfile::tempdir().unwrap();
        let limits = Limits { launch: Duration::from_secs(1), host: Duration::from_secs(2) };
        // Frames: a length, and a reply's number. 0 is a launch.
        let menu = [
            ("while printf '\\1\\0\\0\\0\\0' >&0; do :; done", "announced 10000 launches"),
            ("printf '\\1\\0\\0\\0\\377' >&0; sleep 9", "ended"),
            ("printf '\\377\\377\\377\\377' >&0; sleep 9", "ended"),
            ("printf '\\100\\0\\0\\0too short' >&0; exit 3", "code 3"),
        ];
        for (body, word) in menu {
            let mut process = script(tmp.path(), body);
            match process.ask(&Request::Read, limits) {
                Err(Loss::Died(how)) => assert!(how.contains(word), "{body}: {how}"),
                other => panic!("{body}: {other:?}"),
            }
            assert!(matches!(process.ask(&Request::Read, limits), Err(Loss::Died(_))), "{body}: it is gone");
        }
        // What ended by somebody else's hand, and what this one ended.
        for (body, killed) in [("kill -9 $$", true), ("exec 0<&-; sleep 9", false), ("kill -11 $$", false)] {
            let loss = script(tmp.path(), body).ask(&Request::Read, limits);
            let expected =
                if killed { matches!(loss, Err(Loss::Killed(_))) } else { matches!(loss, Err(Loss::Died(_))) };
            assert!(expected, "{body}: {loss:?}");
        }
        // Silence while it is said to launch is a hang.
        let mut process = script(tmp.path(), "printf '\\1\\0\\0\\0\\0' >&0; sleep 9");
        assert!(matches!(process.ask(&Request::Read, limits), Err(Loss::Hung(_))));
    }
}
