//! The tuner's journal.
use crate::*;
use std::path::PathBuf;

/// The tuner's journal, exclusive.
pub struct Store {}

impl Store {
    /// Opens it.
    pub fn open(_dir: &CacheDir) -> Result<Self> {
        todo!()
    }
    /// Opens it, waiting at most `patience` for another tuner to finish.
    pub fn open_within(_dir: &CacheDir, _patience: std::time::Duration) -> Result<Self> {
        todo!()
    }
    /// Journals a trial.
    pub fn put_trial(&self, _key: &RecordKey, _trial: &Trial) -> Result<()> {
        todo!()
    }
    /// The trials of a record key.
    pub fn trials(&self, _key: &RecordKey) -> Result<Vec<Trial>> {
        todo!()
    }
    /// Stores a record; it is on disk when this returns.
    pub fn put_record(&self, _record: &Record) -> Result<()> {
        todo!()
    }
    /// The record of a key.
    pub fn record(&self, _key: &RecordKey) -> Result<Option<Record>> {
        todo!()
    }
    /// All records.
    pub fn records(&self) -> Result<Vec<Record>> {
        todo!()
    }
    /// Removes a record; whether there was one.
    pub fn remove_record(&self, _key: &RecordKey) -> Result<bool> {
        todo!()
    }
    /// Writes the snapshot that readers map.
    pub fn publish(&self, _files: &ArtifactFiles) -> Result<PathBuf> {
        todo!()
    }
}
