//! What the library and the command are made of, as CycloneDX 1.5: each package with its version, licence and hash, and
//! which depends on which. The same lock file gives the same bytes.

use super::metadata::{Metadata, Package};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The packages that are shipped.
pub(crate) const SHIPPED: [&str; 2] = ["flashtune-cli", "flashtune-c"];

/// What is compiled into them, for a target.
pub(crate) struct Parts {
    metadata: Metadata,
}

impl Parts {
    /// Asks cargo.
    pub(crate) fn of(root: &Path, target: &str) -> Result<Self> {
        Ok(Self { metadata: Metadata::read(root, &["--locked", "--filter-platform", target])? })
    }

    /// All packages, the workspace's own among them.
    pub(crate) fn packages(&self) -> Result<Vec<&Package>> {
        self.metadata.compiled(&SHIPPED)
    }

    /// The bill of materials.
    pub(crate) fn bill(&self, root: &Path) -> Result<String> {
        let lock = std::fs::read_to_string(root.join("Cargo.lock")).context("cannot read Cargo.lock")?;
        Ok(serde_json::to_string_pretty(&self.value(&hashes(&lock))?)? + "\n")
    }

    fn value(&self, hashes: &BTreeMap<(String, String), String>) -> Result<Value> {
        let packages = self.packages()?;
        let ids = self.metadata.by_id();
        let mut dependencies = Vec::new();
        for package in &packages {
            let on: BTreeSet<String> =
                self.metadata.dependencies(&package.id)?.iter().filter_map(|id| ids.get(id)).map(|p| url(p)).collect();
            dependencies.push(json!({ "ref": url(package), "dependsOn": on }));
        }
        let whole =
            json!({ "ref": "flashtune", "dependsOn": SHIPPED.map(|name| self.metadata.find(name).map(url).ok()) });
        dependencies.insert(0, whole);
        let components: Vec<_> = packages.iter().map(|package| component(package, hashes)).collect();
        let version = env!("CARGO_PKG_VERSION");
        Ok(json!({
            "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "version": 1,
            "metadata": { "component": {
                "type": "application", "bom-ref": "flashtune", "name": "flashtune", "version": version,
                "licenses": [{ "expression": "MIT" }],
            } },
            "components": components,
            "dependencies": dependencies,
        }))
    }
}

/// The package URL.
fn url(package: &Package) -> String {
    format!("pkg:cargo/{}@{}", package.name, package.version.replace('+', "%2B"))
}

fn component(package: &Package, hashes: &BTreeMap<(String, String), String>) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": url(package),
        "name": package.name,
        "version": package.version,
        "purl": url(package),
    });
    if let Some(licence) = &package.license {
        // Older manifests write a slash for OR.
        component["licenses"] = json!([{ "expression": licence.replace('/', " OR ") }]);
    }
    if let Some(hash) = hashes.get(&(package.name.clone(), package.version.clone())) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": hash }]);
    }
    component
}

/// The SHA-256 of each package's archive, by name and version.
fn hashes(lock: &str) -> BTreeMap<(String, String), String> {
    let mut hashes = BTreeMap::new();
    for entry in lock.split("[[package]]").skip(1) {
        let field = |name: &str| {
            let value = entry.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""));
            value.and_then(|value| value.strip_suffix('"')).map(str::to_owned)
        };
        if let (Some(name), Some(version), Some(hash)) = (field("name"), field("version"), field("checksum")) {
            hashes.insert((name, version), hash);
        }
    }
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_read_from_the_lock_file() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0+b\"\nsource = \"r\"\n\
                    checksum = \"00ff\"\ndependencies = [\n \"c\",\n]\n\n\
                    [[package]]\nname = \"c\"\nversion = \"0.1.0\"\n";
        let found = hashes(lock);
        assert_eq!(found, BTreeMap::from([(("a".to_owned(), "1.0.0+b".to_owned()), "00ff".to_owned())]));
    }

    #[test]
    fn every_part_is_named_once_and_has_its_hash() {
        let root = super::super::root();
        let parts = Parts::of(&root, "x86_64-unknown-linux-gnu").unwrap();
        let text = parts.bill(&root).unwrap();
        let bill: Value = serde_json::from_str(&text).unwrap();
        let of = |value: &Value, field: &str| value[field].as_str().unwrap().to_owned();
        let components = bill["components"].as_array().unwrap();
        let names: BTreeSet<_> = components.iter().map(|c| of(c, "bom-ref")).collect();
        assert_eq!(names.len(), components.len());
        let own = components.iter().filter(|c| c.get("hashes").is_none()).map(|c| of(c, "name"));
        assert!(own.clone().all(|name| name.starts_with("flashtune")), "{:?}", own.collect::<Vec<_>>());
        for wanted in ["cudarc", "sled", "flashtune-templates", "clap"] {
            assert!(components.iter().any(|c| c["name"] == wanted), "{wanted}");
        }
        // What tests alone need is not shipped.
        assert!(!components.iter().any(|c| ["proptest", "shuttle", "xtask"].contains(&&*of(c, "name"))));
        for edge in bill["dependencies"].as_array().unwrap() {
            for on in edge["dependsOn"].as_array().unwrap() {
                assert!(names.contains(on.as_str().unwrap()), "{edge}");
            }
        }
        assert_eq!(parts.bill(&root).unwrap(), text);
    }
}
