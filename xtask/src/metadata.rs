//! What cargo knows of the packages: `cargo metadata`, as far as it is read here.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The packages of a workspace, with what they depend on where that was asked for.
#[derive(Deserialize)]
pub(crate) struct Metadata {
    /// All packages.
    pub packages: Vec<Package>,
    /// Which package depends on which; none with `--no-deps`.
    pub resolve: Option<Resolve>,
}

/// A package's manifest.
#[derive(Deserialize)]
pub(crate) struct Package {
    pub id: String,
    pub name: String,
    pub version: String,
    pub rust_version: Option<String>,
    pub description: Option<String>,
    pub license: Option<String>,
    pub readme: Option<String>,
    /// The registry; none for packages of the workspace.
    pub source: Option<String>,
    #[serde(default)]
    pub keywords: Vec<String>,
    #[serde(default)]
    pub categories: Vec<String>,
    pub manifest_path: PathBuf,
    pub dependencies: Vec<Dependency>,
    #[serde(default)]
    pub metadata: serde_json::Value,
}

/// What a manifest asks for.
#[derive(Deserialize)]
pub(crate) struct Dependency {
    pub name: String,
    pub req: String,
    /// `dev`, `build`, or none.
    pub kind: Option<String>,
    pub path: Option<PathBuf>,
}

/// The graph of packages.
#[derive(Deserialize)]
pub(crate) struct Resolve {
    pub nodes: Vec<Node>,
}

/// A package of the graph.
#[derive(Deserialize)]
pub(crate) struct Node {
    pub id: String,
    pub deps: Vec<Edge>,
}

/// A package that another depends on.
#[derive(Deserialize)]
pub(crate) struct Edge {
    pub pkg: String,
    pub dep_kinds: Vec<Kind>,
}

/// A way in which it does.
#[derive(Deserialize)]
pub(crate) struct Kind {
    pub kind: Option<String>,
}

impl Metadata {
    /// Asks cargo in a folder.
    pub(crate) fn read(folder: &Path, args: &[&str]) -> Result<Self> {
        let mut cargo = super::cargo();
        cargo.current_dir(folder).args(["metadata", "--format-version", "1"]).args(args);
        serde_json::from_str(&output(cargo)?).context("cannot read what cargo metadata says")
    }

    /// A package by name.
    pub(crate) fn find(&self, name: &str) -> Result<&Package> {
        let own = |package: &&Package| package.name == name;
        self.packages.iter().find(own).with_context(|| format!("the workspace has no package {name}"))
    }

    /// What is compiled for some packages, they themselves among it, in the order of names: all that they and their
    /// build scripts depend on, and nothing of tests alone.
    pub(crate) fn compiled(&self, roots: &[&str]) -> Result<Vec<&Package>> {
        let mut open: Vec<&str> = roots.iter().map(|name| Ok(&*self.find(name)?.id)).collect::<Result<_>>()?;
        let mut seen = BTreeSet::new();
        while let Some(id) = open.pop() {
            if seen.insert(id) {
                open.extend(self.dependencies(id)?);
            }
        }
        let mut packages: Vec<_> = self.packages.iter().filter(|package| seen.contains(&*package.id)).collect();
        packages.sort_by_key(|package| (&package.name, &package.version));
        Ok(packages)
    }

    /// The packages that one is compiled with.
    pub(crate) fn dependencies(&self, id: &str) -> Result<Vec<&str>> {
        let resolve = self.resolve.as_ref().context("cargo metadata was asked for no dependencies")?;
        let node = resolve.nodes.iter().find(|node| node.id == id);
        let compiled = |edge: &&Edge| edge.dep_kinds.iter().any(|kind| kind.kind.as_deref() != Some("dev"));
        Ok(node.into_iter().flat_map(|node| &node.deps).filter(compiled).map(|edge| &*edge.pkg).collect())
    }

    /// Manifests by identifier.
    pub(crate) fn by_id(&self) -> BTreeMap<&str, &Package> {
        self.packages.iter().map(|package| (&*package.id, package)).collect()
    }
}

/// What a command prints; what it says of an error otherwise.
pub(crate) fn output(mut command: Command) -> Result<String> {
    let out = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !out.status.success() {
        bail!("{command:?} ended with {}:\n{}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}
