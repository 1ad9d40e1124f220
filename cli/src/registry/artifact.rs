//! What lies in a registry: an image whose layers hold one bundle each.
//!
//! Each layer is a tar with one file, and the configuration names the layers' contents as that of every image does. So
//! whatever mounts images (an image volume of Kubernetes, `podman --mount type=image`) has the bundles as files, and
//! `artifactType` says to registries what it is. Annotations say what is inside without a download. They are hints:
//! what is believed is the bundle's own root hash and signature. The same bundles give the same digest.

use super::error::{Error, Result};
use super::name::Name;
use flashtune_cache::Bundle;
use oci_client::manifest::{IMAGE_CONFIG_MEDIA_TYPE, IMAGE_LAYER_MEDIA_TYPE, OCI_IMAGE_MEDIA_TYPE};
use oci_client::manifest::{OciDescriptor, OciImageManifest};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

/// What the artifact is.
pub(crate) const ARTIFACT_TYPE: &str = "application/vnd.flashtune.bundle.v1";
/// Annotations of layers and, of all layers together, of the manifest.
pub(crate) const ARCH: &str = "dev.flashtune.arch";
const TEMPLATES: &str = "dev.flashtune.templates";
const ABI: &str = "dev.flashtune.abi";
const FORMAT: &str = "dev.flashtune.bundle-format";
/// Annotations of layers alone.
pub(crate) const ROOT: &str = "dev.flashtune.root";
const SIGNER: &str = "dev.flashtune.signer";
const TITLE: &str = "org.opencontainers.image.title";
const CREATED: &str = "org.opencontainers.image.created";
/// Most bytes of a bundle: they are held in memory until all of them are verified.
pub(crate) const MOST: u64 = 2 << 30;
/// Most bytes of a manifest, as the distribution specification asks of registries.
pub(crate) const MOST_OF_MANIFEST: u64 = 4 << 20;
/// A tar's header and its end.
const AROUND: u64 = 4096;

/// The name of a content.
pub(crate) fn digest(bytes: &[u8]) -> String {
    let hex = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect::<String>();
    format!("sha256:{hex}")
}

/// A bundle that is to be pushed.
pub(crate) struct BundlePart {
    /// Its file's name.
    pub name: String,
    pub bundle: Bundle,
    pub bytes: Vec<u8>,
}

/// What is uploaded.
pub(crate) struct Artifact {
    pub layers: Vec<Vec<u8>>,
    pub config: Vec<u8>,
    pub manifest: Vec<u8>,
}

/// Puts bundles together.
pub(crate) fn pack(mut parts: Vec<BundlePart>) -> anyhow::Result<Artifact> {
    parts.sort_by(|a, b| a.name.cmp(&b.name));
    let (mut layers, mut descriptors, mut whole) = (Vec::new(), Vec::new(), BTreeMap::new());
    let created = parts.iter().map(|p| p.bundle.manifest().created).max().unwrap_or(0);
    for part in parts {
        let layer = tar(&part.name, &part.bytes)?;
        let annotations = annotations(&part);
        for key in [ARCH, TEMPLATES, ABI, FORMAT] {
            whole.entry(key).or_insert_with(BTreeSet::new).extend(annotations[key].split(',').map(str::to_owned));
        }
        descriptors.push(descriptor(IMAGE_LAYER_MEDIA_TYPE, &layer, Some(annotations)));
        layers.push(layer);
    }
    let created = std::time::UNIX_EPOCH + std::time::Duration::from_secs(created);
    let created = humantime::format_rfc3339_seconds(created).to_string();
    // Runtimes look at the architecture before they mount an image: that of the machine that pushes.
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let config = serde_json::to_vec(&json!({
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": {},
        // Of a layer that is not compressed both digests are one.
        "rootfs": { "type": "layers", "diff_ids": descriptors.iter().map(|d| d.digest.clone()).collect::<Vec<_>>() },
        "history": descriptors.iter().map(|_| json!({ "created_by": "flashtune push" })).collect::<Vec<_>>(),
    }))?;
    let joined = whole.into_iter().map(|(key, all)| (key.to_owned(), Vec::from_iter(all).join(",")));
    let manifest = OciImageManifest {
        schema_version: 2,
        media_type: Some(OCI_IMAGE_MEDIA_TYPE.to_owned()),
        config: descriptor(IMAGE_CONFIG_MEDIA_TYPE, &config, None),
        layers: descriptors,
        subject: None,
        artifact_type: Some(ARTIFACT_TYPE.to_owned()),
        annotations: Some(joined.chain([(CREATED.to_owned(), created)]).collect()),
    };
    Ok(Artifact { layers, config, manifest: serde_json::to_vec(&manifest)? })
}

fn descriptor(kind: &str, bytes: &[u8], annotations: Option<BTreeMap<String, String>>) -> OciDescriptor {
    OciDescriptor {
        media_type: kind.to_owned(),
        digest: digest(bytes),
        size: bytes.len() as i64,
        annotations,
        ..OciDescriptor::default()
    }
}

fn annotations(part: &BundlePart) -> BTreeMap<String, String> {
    let sets = &part.bundle.manifest().sets;
    let all = |of: &dyn Fn(&flashtune_cache::BundleSet) -> String| {
        Vec::from_iter(sets.iter().map(of).collect::<BTreeSet<_>>()).join(",")
    };
    let mut annotations = BTreeMap::from([
        (TITLE, part.name.clone()),
        (ARCH, all(&|s| s.arch.clone())),
        (TEMPLATES, all(&|s| format!("{}={}", s.family, s.templates))),
        (ABI, all(&|s| s.abi.to_string())),
        (FORMAT, flashtune_cache::BUNDLE_FORMAT.to_string()),
        (ROOT, part.bundle.root().hex()),
    ]);
    if let Some(signer) = part.bundle.signer() {
        annotations.insert(SIGNER, signer.to_string());
    }
    annotations.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// A tar with one file, the same for the same content.
fn tar(name: &str, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut header = tar::Header::new_ustar();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o444);
    header.set_mtime(0);
    header.set_entry_type(tar::EntryType::Regular);
    let mut out = tar::Builder::new(Vec::with_capacity(bytes.len() + AROUND as usize));
    out.append_data(&mut header, name, bytes)?;
    out.into_inner()
}

/// Whether a file may have this name: it comes from elsewhere and becomes one in a folder of the user's.
pub(crate) fn is_plain(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
    !name.starts_with(['.', '-']) && name.len() <= 100 && name.ends_with(".ftb") && name.chars().all(allowed)
}

/// The layers of a manifest, each with its digest and size looked at.
pub(crate) fn layers(name: &Name, manifest: &[u8]) -> Result<Vec<OciDescriptor>> {
    let foreign = |message: String| Error::Foreign { reference: name.text.clone(), message };
    let manifest: OciImageManifest =
        serde_json::from_slice(manifest).map_err(|e| foreign(format!("its manifest cannot be read ({e})")))?;
    if manifest.artifact_type.as_deref() != Some(ARTIFACT_TYPE) {
        let found = manifest.artifact_type.unwrap_or(manifest.config.media_type);
        return Err(foreign(format!("it is of the type `{found}`")));
    }
    if manifest.layers.is_empty() {
        return Err(foreign("it is empty".to_owned()));
    }
    for layer in &manifest.layers {
        let hex = layer.digest.strip_prefix("sha256:").unwrap_or_default();
        if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(foreign(format!("a layer has the digest `{}`", layer.digest)));
        }
        let size = u64::try_from(layer.size).map_err(|_| foreign(format!("a layer has {} bytes", layer.size)))?;
        if size > MOST + AROUND {
            let (what, found) = ("a layer".to_owned(), size.to_string());
            return Err(Error::TooLarge { reference: name.text.clone(), what, found, limit: MOST });
        }
    }
    Ok(manifest.layers)
}

/// The bundle of a layer whose digest fits: the file's name and its bytes.
pub(crate) fn unpack(name: &Name, layer: &OciDescriptor, bytes: &[u8]) -> Result<(String, Vec<u8>)> {
    let foreign = |message: &str| Error::Foreign {
        reference: name.text.clone(),
        message: format!("layer {}: {message}", layer.digest),
    };
    let mut archive = tar::Archive::new(bytes);
    let mut entries = archive.entries().map_err(|e| foreign(&e.to_string()))?;
    let mut entry = match entries.next() {
        Some(Ok(entry)) => entry,
        Some(Err(e)) => return Err(foreign(&format!("it is no tar ({e})"))),
        None => return Err(foreign("it is an empty tar")),
    };
    if entry.header().entry_type() != tar::EntryType::Regular {
        return Err(foreign("it holds something else than a file"));
    }
    let file = String::from_utf8(entry.path_bytes().into_owned()).ok().filter(|f| is_plain(f));
    let file = file.ok_or_else(|| foreign("its file has a name that no bundle has"))?;
    let mut bundle = Vec::new();
    entry.read_to_end(&mut bundle).map_err(|e| foreign(&e.to_string()))?;
    match entries.next() {
        None => Ok((file, bundle)),
        Some(_) => Err(foreign("it holds more than one file")),
    }
}

/// Whether the hint says that nothing of a layer is for an arch.
pub(crate) fn is_for_others(layer: &OciDescriptor, arch: &str) -> bool {
    let hint = layer.annotations.as_ref().and_then(|a| a.get(ARCH));
    hint.is_some_and(|all| all.split(',').all(|a| a != arch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_from_elsewhere_stay_in_their_folder() {
        for good in ["a.ftb", "llama-70b_h200.v1+x.ftb"] {
            assert!(is_plain(good), "{good}");
        }
        for bad in [
            "",
            ".ftb",
            "../a.ftb",
            "/a.ftb",
            "a/b.ftb",
            "a\\b.ftb",
            ".a.ftb",
            "-a.ftb",
            "a",
            "a.ftb\n",
            "a\u{202e}.ftb",
        ] {
            assert!(!is_plain(bad), "{bad}");
        }
    }

    #[test]
    fn a_layer_is_a_tar_of_one_file_and_nothing_else() {
        let name = Name::parse("oci://localhost:1/a:b", false).unwrap();
        let layer = OciDescriptor::default();
        let bytes = tar("a.ftb", b"content").unwrap();
        assert_eq!(bytes, tar("a.ftb", b"content").unwrap());
        assert_eq!(unpack(&name, &layer, &bytes).unwrap(), ("a.ftb".to_owned(), b"content".to_vec()));

        let refused = |bytes: &[u8], word: &str| {
            let e = unpack(&name, &layer, bytes).unwrap_err();
            assert!(matches!(&e, Error::Foreign { message, .. } if message.contains(word)), "{e}");
        };
        refused(b"", "empty");
        refused(&[7; 2048], "no tar");
        refused(&tar("a.txt", b"x").unwrap(), "name");
        let mut header = tar::Header::new_ustar();
        header.set_size(0);
        header.set_entry_type(tar::EntryType::Symlink);
        let mut link = tar::Builder::new(Vec::new());
        link.append_link(&mut header, "a.ftb", "/etc/passwd").unwrap();
        refused(&link.into_inner().unwrap(), "something else");
        let mut two = tar::Builder::new(Vec::new());
        for file in ["a.ftb", "b.ftb"] {
            let mut header = tar::Header::new_ustar();
            header.set_size(1);
            two.append_data(&mut header, file, &b"x"[..]).unwrap();
        }
        refused(&two.into_inner().unwrap(), "more than one");
    }
}
