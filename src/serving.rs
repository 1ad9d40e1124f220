//! What a service does with an engine beside calling it: load everything before the first request, close the set of
//! kernels, and watch.

use crate::manifest::{ManifestEntry, append_untuned};
use crate::{Engine, Result};
use flashtune_runtime::dispatch::{Counters, OnMiss, Seal, Untuned};
use std::path::Path;

impl Engine {
    /// Makes the plans of these problems and sizes and loads their kernels, so that calls of their classes need no file
    /// and no compiler. What nothing stored serves is compiled or tuned, by policy. Gives those that cannot be had,
    /// with the reason.
    pub fn preload(&self, entries: &[ManifestEntry]) -> Vec<(ManifestEntry, crate::Error)> {
        let missing = |e: &ManifestEntry| self.plan(&e.problem, e.sizes()).err().map(|error| (*e, error));
        entries.iter().filter_map(missing).collect()
    }

    /// Closes the set of kernels: loads those of all records that may be used here, and from then on runs no compiler,
    /// tunes nothing and reads no file. Calls of known classes take no lock and allocate nothing; the others are
    /// answered as `on_miss` says. Calls with weights, with unaligned rows or with odd strides are served if such a
    /// call was made or prepared ([`Engine::prepare`]) before.
    ///
    /// Processes with equal [`Seal::digest`] run the same kernels: ranks compare it before they start, without which
    /// their results may differ in the last bits. Sealing again gives the same answer and changes nothing.
    ///
    /// # Errors
    /// [`flashtune_runtime::Error::Sealed`] when there is no kernel to serve with.
    pub fn seal(&self, on_miss: OnMiss) -> Result<Seal> {
        Ok(self.dispatcher().seal(on_miss)?)
    }

    /// What was sealed, if anything was.
    pub fn sealed(&self) -> Option<&Seal> {
        self.dispatcher().sealed()
    }

    /// What happened so far: calls by what they ran on, refusals, compilations, verification failures.
    pub fn counters(&self) -> Counters {
        self.dispatcher().counters()
    }

    /// [`Engine::counters`] as the text that Prometheus scrapes, with the build, the seal's digest, calls by problem
    /// and a histogram of compilations.
    pub fn prometheus(&self) -> String {
        self.dispatcher().metrics().prometheus(&[("device", &self.device().fingerprint().to_string())])
    }

    /// Writes [`Engine::prometheus`] to a file that is whole whenever somebody reads it: for hosts without HTTP, whose
    /// metrics node_exporter's textfile collector reads from a folder of `*.prom`. Each line has the label `process`
    /// with the file's name (`rank0` of `rank0.prom`), since a collector refuses two files with the same lines. To be
    /// called now and then, as often as the collector is scraped.
    ///
    /// # Errors
    /// [`crate::Error::MetricsFile`]; an older file stays then.
    pub fn write_metrics(&self, path: &Path) -> Result<()> {
        let device = self.device().fingerprint().to_string();
        let process = path.file_stem().unwrap_or_default().to_string_lossy();
        let text = self.dispatcher().metrics().prometheus(&[("device", &device), ("process", &process)]);
        // A name that no collector reads.
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}.tmp", std::process::id()));
        let written = std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, path));
        written.map_err(|source| {
            let _ = std::fs::remove_file(&beside);
            crate::Error::MetricsFile { path: path.to_owned(), source }
        })
    }

    /// The classes of calls that were met and that no record of their own serves, those with the most calls first.
    pub fn untuned(&self) -> Vec<Untuned> {
        self.dispatcher().untuned()
    }

    /// Appends [`Engine::untuned`] to a file that `flashtune tune --from` takes. Gives the number of classes.
    ///
    /// # Errors
    /// [`crate::Error::ManifestFile`] when the file cannot be written.
    pub fn write_untuned(&self, path: &Path) -> Result<usize> {
        let untuned = self.untuned();
        append_untuned(path, &untuned)?;
        Ok(untuned.len())
    }
}
