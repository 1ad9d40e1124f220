//! What a tuning job has learnt so far, so that one that was killed repeats nothing.
//!
//! An append-only file of frames, `length u32, first 8 bytes of the payload's BLAKE3, payload`, written by the one
//! process that has the job's claim. What was killed while it wrote leaves half a frame at the end, which is cut off when
//! the file is opened again. The file goes when the job is done.

use crate::dir::create_private;
use crate::encoding::{decode, encode};
use crate::{CacheDir, Key, Stage, regular};
use flashtune_codegen::Schedule;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// What is older was measured in another world.
const OLD: Duration = Duration::from_secs(24 * 3600);
/// Length and hash.
const FRAME: usize = 12;

/// One thing that was learnt about a schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Lesson {
    /// It was given up.
    Failed {
        /// Where.
        stage: Stage,
        /// Why.
        reason: String,
    },
    /// It gave the right answers on inputs of a size (0: small, 1: the job's own).
    Checked {
        /// Which size.
        size: u8,
        /// Largest absolute error.
        max_error: f64,
    },
    /// It was timed once.
    Timed {
        /// Microseconds.
        us: f64,
    },
}

/// The lessons of one job: those of processes before this one, and those that are being added.
#[derive(Debug, Default)]
pub struct Progress {
    file: Option<File>,
    path: PathBuf,
    failed: HashMap<Schedule, (Stage, String)>,
    checked: HashMap<(Schedule, u8), f64>,
    timed: HashMap<Schedule, VecDeque<f64>>,
    known: usize,
}

impl Progress {
    /// The lessons of a job, by a key that says all that decides what it does. Where nothing can be written the job runs
    /// without, and a killed one begins anew.
    pub fn open(dir: &CacheDir, job: &Key) -> Self {
        let folder = dir.base().join("jobs");
        remove_old(&folder);
        let path = folder.join(format!("{}.log", job.hex()));
        let bytes = regular::read(&path).unwrap_or_default();
        let mut progress = Self { path, ..Self::default() };
        let whole = progress.take_in(&bytes);
        let opened = create_private(&folder).map_err(std::io::Error::other).and_then(|()| {
            let mut file =
                regular::open_with(OpenOptions::new().create(true).truncate(false).write(true), &progress.path)?;
            file.set_len(whole as u64)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        });
        match opened {
            Ok(file) => progress.file = Some(file),
            Err(e) => {
                tracing::debug!(path = %progress.path.display(), error = %e, "the progress of the job is not kept");
            }
        }
        progress
    }

    /// How many lessons processes before this one left.
    pub fn known(&self) -> usize {
        self.known
    }

    /// Adds a lesson. It survives this process as soon as this returns.
    pub fn add(&mut self, schedule: &Schedule, lesson: &Lesson) {
        let Some(file) = &mut self.file else { return };
        let payload = encode(&(schedule, lesson));
        let mut frame = Vec::with_capacity(FRAME + payload.len());
        frame.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        frame.extend_from_slice(&blake3::hash(&payload).as_bytes()[..8]);
        frame.extend_from_slice(&payload);
        // Half a frame in the middle would hide all that follow.
        if let Err(e) = file.write_all(&frame) {
            tracing::debug!(path = %self.path.display(), error = %e, "the progress of the job is no longer kept");
            self.file = None;
        }
    }

    /// Where and why a schedule was given up.
    pub fn failed(&self, schedule: &Schedule) -> Option<&(Stage, String)> {
        self.failed.get(schedule)
    }

    /// The error of a check that was passed.
    pub fn checked(&self, schedule: &Schedule, size: u8) -> Option<f64> {
        self.checked.get(&(*schedule, size)).copied()
    }

    /// The next time of a schedule that need not be taken again.
    pub fn timed(&mut self, schedule: &Schedule) -> Option<f64> {
        self.timed.get_mut(schedule)?.pop_front()
    }

    /// The job is done: nobody will go on with it.
    pub fn finish(self) {
        if self.file.is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Takes in the frames; gives the length of those that are whole.
    fn take_in(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while let Some((length, schedule, lesson)) = frame_at(&bytes[at..]) {
            match lesson {
                Lesson::Failed { stage, reason } => drop(self.failed.insert(schedule, (stage, reason))),
                Lesson::Checked { size, max_error } => drop(self.checked.insert((schedule, size), max_error)),
                Lesson::Timed { us } => self.timed.entry(schedule).or_default().push_back(us),
            }
            self.known += 1;
            at += length;
        }
        at
    }
}

/// The frame at the start of the bytes, if it is whole and says what it said when it was written.
fn frame_at(bytes: &[u8]) -> Option<(usize, Schedule, Lesson)> {
    let length = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let payload = bytes.get(FRAME..FRAME.checked_add(length)?)?;
    if bytes[4..FRAME] != blake3::hash(payload).as_bytes()[..8] {
        return None;
    }
    let (schedule, lesson) = decode::<(Schedule, Lesson)>(payload).ok()?;
    Some((FRAME + length, schedule, lesson))
}

/// Removes what nobody went on with.
fn remove_old(folder: &std::path::Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let age = entry.metadata().and_then(|m| m.modified()).map(|t| SystemTime::now().duration_since(t));
        if matches!(age, Ok(Ok(age)) if age > OLD) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::schedule;

    fn lessons() -> Vec<(Schedule, Lesson)> {
        let failed = Lesson::Failed { stage: Stage::Compile, reason: "no".into() };
        let timed = |us| Lesson::Timed { us };
        vec![
            (schedule(1), failed),
            (schedule(2), Lesson::Checked { size: 0, max_error: 0.5 }),
            (schedule(2), timed(3.0)),
            (schedule(3), timed(9.0)),
            (schedule(2), timed(4.0)),
        ]
    }

    fn check(progress: &mut Progress, known: usize) {
        assert_eq!(progress.known(), known);
        assert_eq!(progress.failed(&schedule(1)).is_some(), known > 0);
        assert_eq!(progress.checked(&schedule(2), 0), (known > 1).then_some(0.5));
        assert_eq!(progress.checked(&schedule(2), 1), None);
        assert_eq!(progress.timed(&schedule(2)), (known > 2).then_some(3.0));
        assert_eq!(progress.timed(&schedule(2)), (known > 4).then_some(4.0), "in the order in which they were taken");
        assert_eq!(progress.timed(&schedule(2)), None);
    }

    #[test]
    fn wherever_the_writer_was_killed_the_whole_lessons_count_and_more_can_be_added() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, job) = (CacheDir::at(tmp.path()), Key::of(b"job"));
        let mut ends = vec![0];
        let mut first = Progress::open(&dir, &job);
        for (s, lesson) in lessons() {
            first.add(&s, &lesson);
            ends.push(first.file.as_mut().unwrap().stream_position().unwrap() as usize);
        }
        let path = first.path.clone();
        drop(first);
        let bytes = std::fs::read(&path).unwrap();
        for cut in 0..=bytes.len() {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let known = ends.iter().filter(|e| **e <= cut).count() - 1;
            check(&mut Progress::open(&dir, &job), known);
            // What is added after the cut is read next time.
            let mut again = Progress::open(&dir, &job);
            lessons()[known..].iter().for_each(|(s, lesson)| again.add(s, lesson));
            assert_eq!(std::fs::read(&path).unwrap(), bytes, "cut at {cut}");
        }
        // Any damage ends the list there, and says nothing wrong.
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x11;
            std::fs::write(&path, &bad).unwrap();
            let known = ends.iter().filter(|e| **e <= at).count() - 1;
            check(&mut Progress::open(&dir, &job), known);
        }
    }

    #[test]
    fn a_finished_job_leaves_nothing_and_other_jobs_know_nothing_of_it() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = CacheDir::at(tmp.path());
        let mut one = Progress::open(&dir, &Key::of(b"one"));
        one.add(&schedule(1), &Lesson::Timed { us: 1.0 });
        assert_eq!(Progress::open(&dir, &Key::of(b"two")).known(), 0);
        assert_eq!(Progress::open(&dir, &Key::of(b"one")).known(), 1);
        let path = one.path.clone();
        one.finish();
        assert!(!path.exists());
        // Without a folder to write in, there is no progress and no error.
        std::fs::write(tmp.path().join("file"), b"").unwrap();
        let mut nowhere = Progress::open(&CacheDir::at(tmp.path().join("file")), &Key::of(b"one"));
        nowhere.add(&schedule(1), &Lesson::Timed { us: 1.0 });
        assert_eq!(nowhere.known(), 0);
        nowhere.finish();
    }
}
