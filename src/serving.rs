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

    /// [`Engine::counters`] as the text that Prometheus scrapes.
    pub fn prometheus(&self) -> String {
        self.counters().prometheus(&self.device().fingerprint().to_string())
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
