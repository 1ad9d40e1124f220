//! What a tuning job has learnt so far, so that one that was killed repeats nothing.
//!
//! An append-only file of frames, `length u32, first 8 bytes of the payload's BLAKE3, payload`, written by the one
//! process that has the job's claim. What was killed while it wrote leaves half a frame at the end, which is cut off
//! when the file is opened again. The file goes when the job is done.

use crate::encoding::{decode, encode};
use crate::folder::{Folder, id_of};
use crate::layout::{JOBS, is_job};
use crate::{CacheDir, Error, Key, Result, Stage, regular, trouble};
use flashtune_codegen::Schedule;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
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
    /// The folder of jobs, the file's name in it, and the file; none where nothing can be written.
    kept: Option<(Folder, String, File)>,
    failed: HashMap<Schedule, (Stage, String)>,
    checked: HashMap<(Schedule, u8), f64>,
    timed: HashMap<Schedule, VecDeque<f64>>,
    known: usize,
    added: usize,
}

impl Progress {
    /// The lessons of a job, by a key that says all that decides what it does. Where nothing can be written the job
    /// runs without, and a killed one begins anew.
    pub fn open(dir: &CacheDir, job: &Key) -> Self {
        let name = format!("{}.log", job.hex());
        let mut progress = Self::default();
        match dir.within_created(|base| base.open_or_create(JOBS)).and_then(|folder| progress.go_on(folder, name)) {
            Ok(()) => {}
            Err(e) if trouble::told_of_link(&e) => {}
            Err(e) => tracing::debug!(error = %e, "the progress of the job is not kept"),
        }
        progress
    }

    /// Takes in what was learnt before, and opens the file for more.
    fn go_on(&mut self, folder: Folder, name: String) -> Result<()> {
        remove_old(&folder);
        let before = match folder.read(&name) {
            Ok(file) => regular::read_all(&file).unwrap_or_default(),
            Err(e @ Error::Link { .. }) => return Err(e),
            Err(_) => Vec::new(),
        };
        let whole = self.take_in(&before);
        let (mut file, _) = folder.write(&name)?;
        file.set_len(whole as u64).and_then(|()| file.seek(SeekFrom::End(0))).map_err(|source| Error::Io {
            action: "write",
            path: folder.path().join(&name),
            source,
            remedy: "check the free space",
        })?;
        self.kept = Some((folder, name, file));
        Ok(())
    }

    /// How many lessons processes before this one left.
    pub fn known(&self) -> usize {
        self.known
    }

    /// How many lessons a process after this one would have.
    pub fn kept(&self) -> usize {
        if self.kept.is_some() { self.known + self.added } else { 0 }
    }

    /// Adds a lesson. It survives this process as soon as this returns.
    pub fn add(&mut self, schedule: &Schedule, lesson: &Lesson) {
        let Some((folder, name, file)) = &mut self.kept else { return };
        let payload = encode(&(schedule, lesson));
        let mut frame = Vec::with_capacity(FRAME + payload.len());
        frame.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        frame.extend_from_slice(&blake3::hash(&payload).as_bytes()[..8]);
        frame.extend_from_slice(&payload);
        // Half a frame in the middle would hide all that follow.
        if let Err(e) = file.write_all(&frame) {
            let path = folder.path().join(name);
            tracing::debug!(path = %path.display(), error = %e, "the progress of the job is no longer kept");
            self.kept = None;
        }
        self.added += 1;
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
        if let Some((folder, name, file)) = self.kept {
            let own = file.metadata().map(|m| id_of(&m));
            if let (Ok(own), Ok(Some(seen))) = (own, folder.look(&name))
                && seen.id == own
            {
                folder.remove_seen(&name, &seen);
            }
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
fn remove_old(folder: &Folder) {
    for (name, _) in folder.names().unwrap_or_default() {
        let Ok(Some(seen)) = folder.look(&name) else { continue };
        let age = seen.changed().and_then(|t| SystemTime::now().duration_since(t).ok());
        if is_job(&name) && age.is_some_and(|age| age > OLD) {
            folder.remove_seen(&name, &seen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::schedule;
    use std::path::PathBuf;

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

    fn path_of(progress: &Progress) -> PathBuf {
        let (folder, name, _) = progress.kept.as_ref().unwrap();
        folder.path().join(name)
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
            assert_eq!(first.kept(), ends.len());
            ends.push(first.kept.as_mut().unwrap().2.stream_position().unwrap() as usize);
        }
        let path = path_of(&first);
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
        let path = path_of(&one);
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
