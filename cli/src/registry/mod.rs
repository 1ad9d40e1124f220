//! `flashtune push` and `flashtune pull`: bundles in registries of container images.

mod artifact;
mod client;
mod credentials;
mod error;
mod name;

use crate::context::Context;
use crate::exit::usage;
use crate::files;
use anyhow::Result;
use artifact::BundlePart;
use client::Registry;
pub(crate) use error::Error;
use flashtune_cache::{self as cache, Bundle, Error as CacheError};
use name::Name;
use oci_client::manifest::OciDescriptor;
use serde::Serialize;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of `push`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Credentials are those of `docker login` and `podman login`, or FLASHTUNE_REGISTRY_USER and \
                        FLASHTUNE_REGISTRY_PASSWORD. Registries on localhost are spoken to without TLS.")]
pub(crate) struct PushArgs {
    /// Where to: oci://HOST/NAME:TAG
    name: String,
    /// The signed bundles, for one arch or several
    #[arg(required = true, value_name = "BUNDLE")]
    files: Vec<PathBuf>,
    /// Speak with the registry without TLS
    #[arg(long)]
    plain_http: bool,
}

/// Options of `pull`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Nothing is kept before all of it is verified: digests, root hashes, every entry, and the signature \
                  of a trusted key. Credentials are those of `docker login` and `podman login`, or \
                  FLASHTUNE_REGISTRY_USER and FLASHTUNE_REGISTRY_PASSWORD."
)]
pub(crate) struct PullArgs {
    /// Where from: oci://HOST/NAME:TAG or oci://HOST/NAME@sha256:DIGEST
    name: String,
    /// Write the bundles as files into this folder; otherwise what is for this device goes into the cache
    #[arg(long, value_name = "DIR", conflicts_with = "replace")]
    to: Option<PathBuf>,
    /// Replace records that the cache already has
    #[arg(long)]
    replace: bool,
    /// Speak with the registry without TLS
    #[arg(long)]
    plain_http: bool,
}

/// One bundle, as it is told of.
#[derive(Serialize)]
struct Told {
    file: String,
    root: String,
    signer: Option<String>,
    records: usize,
    artifacts: usize,
    skipped: Vec<String>,
}

impl Told {
    fn of(file: impl Into<String>, bundle: &Bundle) -> Self {
        Self {
            file: file.into(),
            root: bundle.root().hex(),
            signer: bundle.signer().map(|k| k.to_string()),
            records: bundle.record_count(),
            artifacts: bundle.artifact_count(),
            skipped: Vec::new(),
        }
    }
}

/// What was pushed or pulled.
#[derive(Serialize)]
struct Summary {
    /// The name for good, by the digest.
    reference: String,
    digest: String,
    bundles: Vec<Told>,
    /// Bundles that are for other devices.
    left_out: Vec<String>,
}

pub(crate) fn push(cx: &mut Context, args: PushArgs) -> Result<()> {
    let name = Name::parse_target(&args.name, args.plain_http)?;
    let allows_unsigned = cx.trust()?.allows_unsigned();
    let (mut parts, mut told, mut names) = (Vec::new(), Vec::new(), BTreeSet::new());
    for path in &args.files {
        let part = read(path)?;
        let file = path.display().to_string();
        if part.bundle.signer().is_none() && !allows_unsigned {
            return Err(Error::Unsigned { file }.into());
        }
        if !names.insert(part.name.clone()) {
            return Err(usage(format!("{file}: another of the bundles is called {} too; rename one", part.name)));
        }
        told.push(Told::of(file, &part.bundle));
        parts.push(part);
    }
    let auth = credentials::find(name.registry())?;
    let digest = Registry::new(name.clone(), auth)?.push(artifact::pack(parts)?)?;
    report(cx, "pushed", &Summary { reference: name.pinned(&digest), digest, bundles: told, left_out: Vec::new() })
}

/// A bundle file, whole.
fn read(path: &Path) -> Result<BundlePart> {
    let name = path.file_name().and_then(|n| n.to_str()).filter(|n| artifact::is_plain(n));
    let name = name.ok_or_else(|| {
        usage(format!(
            "{}: bundles are pushed under their files' names; give it one of letters, digits, `._-+` that ends with \
             .ftb",
            path.display()
        ))
    })?;
    // Mapped first: what is no file is refused there, and a pipe would be waited for.
    drop(Bundle::map(path)?);
    let bytes = std::fs::read(path).map_err(|e| usage(format!("cannot read {}: {e}", path.display())))?;
    if bytes.len() as u64 > artifact::MOST {
        let (reference, what) = (path.display().to_string(), "the bundle".to_owned());
        return Err(Error::TooLarge { reference, what, found: bytes.len().to_string(), limit: artifact::MOST }.into());
    }
    let bundle = Bundle::from_bytes(path.display().to_string(), bytes.clone())?;
    bundle.verify()?;
    Ok(BundlePart { name: name.to_owned(), bundle, bytes })
}

/// A bundle that came from a registry.
struct Pulled {
    file: String,
    bundle: Bundle,
    bytes: Vec<u8>,
}

pub(crate) fn pull(cx: &mut Context, args: PullArgs) -> Result<()> {
    let name = Name::parse(&args.name, args.plain_http)?;
    // What cannot be used is not looked for.
    let trust = cx.trust()?;
    let target = match &args.to {
        Some(_) => None,
        None => Some((cx.cache_dir()?, cx.needed()?, cx.device()?.fingerprint().arch.to_string())),
    };
    let registry = Registry::new(name.clone(), credentials::find(name.registry())?)?;
    let (manifest, digest) = registry.manifest()?;
    let mut layers = artifact::layers(&name, &manifest)?;
    let mut left_out = Vec::new();
    if let Some((_, _, arch)) = &target {
        let fitting = |l: &OciDescriptor| !artifact::is_for_others(l, arch);
        // When none fits, the first one's own account says why.
        if layers.iter().any(fitting) {
            let others = layers.iter().filter(|l| !fitting(l));
            left_out = others.map(|l| format!("layer {} is for other devices than {arch}", l.digest)).collect();
            layers.retain(fitting);
        } else {
            layers.truncate(1);
        }
    }
    let mut pulled = Vec::new();
    let mut names = BTreeSet::new();
    for layer in &layers {
        let one = verified(&name, layer, &registry.layer(layer)?, &trust)?;
        if !names.insert(one.file.clone()) {
            let message = format!("two of its bundles are called {}", one.file);
            return Err(Error::Foreign { reference: name.text.clone(), message }.into());
        }
        pulled.push(one);
    }
    let mut told = Vec::new();
    match (&args.to, &target) {
        (Some(folder), _) => {
            let made = std::fs::create_dir_all(folder);
            made.map_err(|e| usage(format!("cannot make the folder {}: {e}; name another", folder.display())))?;
            for Pulled { file, bundle, bytes } in &pulled {
                let path = folder.join(file);
                files::write(&path, bytes)?;
                told.push(Told::of(path.display().to_string(), bundle));
            }
        }
        (None, Some((dir, needed, _))) => {
            let mut misfit = None;
            for Pulled { file, bundle, .. } in &pulled {
                match cache::import_bundle(bundle, dir, needed, args.replace, &trust) {
                    Ok(cache::ExchangeSummary { records, artifacts, skipped }) => {
                        told.push(Told { records, artifacts, skipped, ..Told::of(file.clone(), bundle) });
                    }
                    Err(e @ CacheError::Mismatch { .. }) => {
                        left_out.push(e.to_string());
                        misfit = Some(e);
                    }
                    Err(e) => return Err(e.into()),
                }
            }
            if let (true, Some(e)) = (told.is_empty(), misfit) {
                return Err(e.into());
            }
        }
        (None, None) => unreachable!("a cache where no folder is named"),
    }
    report(cx, "pulled", &Summary { reference: name.pinned(&digest), digest, bundles: told, left_out })
}

/// The bundle of a layer, after every check that there is.
fn verified(name: &Name, layer: &OciDescriptor, bytes: &[u8], trust: &cache::Trust) -> Result<Pulled> {
    let (file, bytes) = artifact::unpack(name, layer, bytes)?;
    let bundle = Bundle::from_bytes(format!("{} ({file})", name.text), bytes.clone())?;
    let hint = layer.annotations.as_ref().and_then(|a| a.get(artifact::ROOT));
    let root = bundle.root().hex();
    if let Some(expected) = hint.filter(|hint| **hint != root) {
        let (what, expected) = (format!("the root hash of {file}"), expected.clone());
        return Err(Error::Tampered { reference: name.text.clone(), what, found: root, expected }.into());
    }
    trust.check(&bundle)?;
    // The root hash names the hashes of the entries; a signed bundle may come with other entries behind them.
    bundle.verify()?;
    Ok(Pulled { file, bundle, bytes })
}

fn report(cx: &mut Context, verb: &str, summary: &Summary) -> Result<()> {
    if cx.json() {
        return cx.print_json(summary);
    }
    for one in &summary.bundles {
        let Told { file, root, signer, records, artifacts, skipped } = one;
        let signer = signer.as_ref().map_or("unsigned".to_owned(), |key| format!("signed by {key}"));
        writeln!(cx.out, "{file}: {records} records and {artifacts} kernels, content {root}, {signer}")?;
        for reason in skipped {
            writeln!(cx.out, "left out: {reason}")?;
        }
    }
    for reason in &summary.left_out {
        writeln!(cx.out, "left out: {reason}")?;
    }
    writeln!(cx.out, "{verb} {}", summary.reference)?;
    Ok(())
}
