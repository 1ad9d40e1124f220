//! `cargo xtask crates`: every package could be published as it stands. What a package's files include lies in the
//! package, what it depends on comes before it, its manifest says what the registry and its docs ask for, and nothing
//! that hosts compile asks for a newer Rust than the workspace promises.
//!
//! That no newer item of the standard library is used is clippy's to say (`incompatible_msrv`, by `rust-version`).

use super::licences;
use super::metadata::{Dependency, Metadata, Package, output};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What is published, each behind what it depends on. All others are this tree's alone.
const PUBLISHED: [&str; 8] = [
    "flashtune-templates",
    "flashtune-codegen",
    "flashtune-report",
    "flashtune-cache",
    "flashtune-runtime",
    "flashtune-tuner",
    "flashtune",
    "flashtune-cli",
];
/// The package of the other workspace, behind all of those.
const CANDLE: &str = "flashtune-candle";
/// The registry takes no larger package, compressed.
const LARGEST: u64 = 10 << 20;

/// Published packages that others compile against; the last is the command.
pub(crate) fn libraries() -> impl Iterator<Item = &'static str> {
    PUBLISHED.into_iter().filter(|name| *name != "flashtune-cli")
}

/// Looks at all packages, and packs them.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut faults = Vec::new();
    let main = Metadata::read(root, &["--locked"])?;
    let candle = Metadata::read(&root.join("bindings/candle"), &["--no-deps"])?;
    let all: Vec<&Package> =
        PUBLISHED.iter().map(|name| main.find(name)).chain([candle.find(CANDLE)]).collect::<Result<_>>()?;
    for (place, package) in all.iter().enumerate() {
        faults.extend(of_manifest(package, all[0]));
        faults.extend(of_order(package, &all[..place]));
        let files = packed(package)?;
        faults.extend(of_files(package, &files)?);
    }
    faults.extend(of_rust(&main)?);
    faults.extend(licences::check(&main, &PUBLISHED)?);
    pack(root)?;
    for package in &main.packages {
        let file =
            super::package::target_folder(root).join(format!("package/{}-{}.crate", package.name, package.version));
        if PUBLISHED.contains(&package.name.as_str()) {
            let bytes = file.metadata().with_context(|| format!("cargo has not made {}", file.display()))?.len();
            if bytes > LARGEST {
                faults.push(format!("{}: {bytes} bytes, the registry takes {LARGEST}; see `include`", package.name));
            }
        }
    }
    if !faults.is_empty() {
        bail!("packages that cannot be published:\n  {}", faults.join("\n  "));
    }
    Ok(())
}

/// What the registry refuses, what its docs need, and what differs from the first package.
fn of_manifest(package: &Package, first: &Package) -> Vec<String> {
    let word = |word: &String| {
        let mut letters = word.chars();
        let starts = letters.next().is_some_and(|c| c.is_ascii_alphanumeric());
        starts && word.len() <= 20 && letters.all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '+'))
    };
    let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.trim().is_empty());
    let targets = package.metadata.pointer("/docs/rs/targets").and_then(|targets| targets.as_array());
    let has = |name: &str| package.manifest_path.with_file_name(name).is_file();
    [
        (said(&package.description), "no description"),
        (said(&package.license) && has("LICENSE"), "no licence, or no file LICENSE beside the manifest"),
        (package.readme.as_deref().is_some_and(has), "no README.md"),
        (package.rust_version.is_some() && package.rust_version == first.rust_version, "not the others' rust-version"),
        (package.version == first.version, "not the others' version"),
        ((1..=5).contains(&package.keywords.len()) && package.keywords.iter().all(word), "not 1 to 5 keywords"),
        ((1..=5).contains(&package.categories.len()), "not 1 to 5 categories"),
        (targets.is_some_and(|targets| !targets.is_empty()), "no package.metadata.docs.rs.targets"),
    ]
    .into_iter()
    .filter(|(holds, _)| !holds)
    .map(|(_, fault)| format!("{}: {fault}", package.name))
    .collect()
}

/// What a package depends on is published before it, in the version that is here.
fn of_order(package: &Package, before: &[&Package]) -> Vec<String> {
    let own = package.dependencies.iter().filter(|d| d.path.is_some());
    let fault = |d: &Dependency| {
        let found = before.iter().find(|other| other.name == d.name);
        let fault = match found {
            // Dependencies of tests without a version are left out of a package.
            _ if d.kind.as_deref() == Some("dev") && d.req == "*" => return None,
            None => "which is not published before it",
            Some(found) if d.req != format!("^{}", found.version) => "without the version that is here",
            Some(_) => return None,
        };
        Some(format!("{}: depends on {} ({}), {fault}", package.name, d.name, d.req))
    };
    own.filter_map(fault).collect()
}

/// The files of a package, as cargo packs them.
fn packed(package: &Package) -> Result<BTreeSet<PathBuf>> {
    let mut cargo = super::cargo();
    cargo.args(["package", "--list", "--allow-dirty", "--package", &package.name, "--manifest-path"]);
    cargo.arg(&package.manifest_path);
    Ok(output(cargo)?.lines().map(PathBuf::from).collect())
}

/// Each file that a source includes is in the package.
fn of_files(package: &Package, files: &BTreeSet<PathBuf>) -> Result<Vec<String>> {
    let folder = package.manifest_path.parent().context("a manifest lies in a folder")?;
    let mut faults = Vec::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|e| e == "rs")) {
        let path = folder.join(file);
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        for named in included(&text) {
            let target = super::tidy::normal(&file.parent().unwrap_or(Path::new("")).join(named));
            if !files.contains(&target) {
                faults.push(format!("{}: {} includes {named}, which it lacks", package.name, file.display()));
            }
        }
    }
    Ok(faults)
}

/// What is named by `include_str!`, `include_bytes!`, `include!` and `#[path]`, relative to the file.
fn included(text: &str) -> Vec<&str> {
    const WAYS: [&str; 4] = ["include_str!(\"", "include_bytes!(\"", "include!(\"", "#[path = \""];
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let named = |line| WAYS.iter().filter_map(move |way| str::split(line, way).nth(1)?.split('"').next());
    code.flat_map(named).collect()
}

/// Packages that hosts compile and that ask for a newer Rust.
fn of_rust(metadata: &Metadata) -> Result<Vec<String>> {
    let ours = version(metadata.find(PUBLISHED[0])?.rust_version.as_deref().unwrap_or("0"));
    let mut faults = Vec::new();
    for package in metadata.compiled(&PUBLISHED)? {
        if let Some(theirs) = package.rust_version.as_deref().filter(|theirs| version(theirs) > ours) {
            faults.push(format!("{} {} asks for Rust {theirs}", package.name, package.version));
        }
    }
    Ok(faults)
}

/// Major, minor and patch.
fn version(text: &str) -> [u32; 3] {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or(0));
    [(); 3].map(|()| parts.next().unwrap_or(0))
}

/// Makes the packages, without compiling them and without asking a registry.
fn pack(root: &Path) -> Result<()> {
    let mut cargo = super::cargo();
    cargo.current_dir(root).args(["package", "--no-verify", "--allow-dirty", "--exclude-lockfile"]);
    for name in PUBLISHED {
        cargo.args(["--package", name]);
    }
    output(cargo).map(drop)
}

/// Compiles the published packages with the Rust that their manifests name, in a folder of its own.
pub(crate) fn compile_with_oldest(root: &Path) -> Result<()> {
    let metadata = Metadata::read(root, &["--no-deps"])?;
    let rust = metadata.find(PUBLISHED[0])?.rust_version.clone().context("no rust-version")?;
    let toolchain = format!("{rust}.0");
    let mut cargo = std::process::Command::new("rustup");
    cargo.current_dir(root).args(["run", &toolchain, "cargo", "check", "--locked"]);
    // The cargo that runs this program has told it of itself and of its compiler.
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
        cargo.env_remove(name);
    }
    for name in PUBLISHED {
        cargo.args(["--package", name]);
    }
    cargo.env("CARGO_TARGET_DIR", super::package::target_folder(root).join("msrv"));
    super::run(cargo).with_context(|| format!("`rustup toolchain install {toolchain}` where it is missing"))
}

#[cfg(test)]
mod tests {
    use super::super::metadata::{Edge, Kind, Node, Resolve};
    use super::*;

    fn package(name: &str) -> Package {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("cache/Cargo.toml");
        Package {
            id: name.into(),
            name: name.into(),
            version: "0.1.0".into(),
            rust_version: Some("1.88".into()),
            description: Some("what it is".into()),
            license: Some("MIT".into()),
            readme: Some("README.md".into()),
            source: None,
            keywords: vec!["cuda".into()],
            categories: vec!["science".into()],
            manifest_path: manifest,
            dependencies: Vec::new(),
            metadata: serde_json::json!({ "docs": { "rs": { "targets": ["x86_64-unknown-linux-gnu"] } } }),
        }
    }

    #[test]
    fn what_a_manifest_lacks_is_named() {
        assert_eq!(of_manifest(&package("a"), &package("b")), [""; 0]);
        let faulty = Package {
            description: Some(" ".into()),
            license: None,
            readme: None,
            rust_version: Some("1.90".into()),
            version: "0.2.0".into(),
            keywords: vec!["a word".into()],
            categories: Vec::new(),
            metadata: serde_json::Value::Null,
            ..package("a")
        };
        assert_eq!(of_manifest(&faulty, &package("b")).len(), 8);
    }

    #[test]
    fn dependencies_come_first_and_say_their_version() {
        let on = |req: &str, kind: Option<&str>| Package {
            dependencies: vec![Dependency {
                name: "b".into(),
                req: req.into(),
                kind: kind.map(str::to_owned),
                path: Some("b".into()),
            }],
            ..package("a")
        };
        let before = package("b");
        assert_eq!(of_order(&on("^0.1.0", None), &[&before]), [""; 0]);
        assert_eq!(of_order(&on("*", Some("dev")), &[]), [""; 0]);
        assert_eq!(of_order(&on("*", None), &[&before]), ["a: depends on b (*), without the version that is here"]);
        assert_eq!(of_order(&on("^0.1.0", None), &[]), ["a: depends on b (^0.1.0), which is not published before it"]);
    }

    #[test]
    fn files_from_outside_a_package_are_found() {
        let text = "const A: &str = include_str!(\"../a.c\");\n// include_str!(\"no.c\")\n\
                    #[path = \"b/c.rs\"]\nmod c;\ninclude!(concat!(\"d\"));\n";
        assert_eq!(included(text), ["../a.c", "b/c.rs"]);
        let tmp = tempfile::tempdir().unwrap();
        std::fs::create_dir(tmp.path().join("src")).unwrap();
        std::fs::write(tmp.path().join("src/lib.rs"), "include_str!(\"a.txt\"); \ninclude_str!(\"../../b.txt\");")
            .unwrap();
        let files = BTreeSet::from(["src/lib.rs".into(), "src/a.txt".into(), "b.txt".into()]);
        let package = Package { manifest_path: tmp.path().join("Cargo.toml"), ..package("a") };
        assert_eq!(of_files(&package, &files).unwrap(), ["a: src/lib.rs includes ../../b.txt, which it lacks"]);
    }

    #[test]
    fn newer_rust_is_found_where_hosts_compile_it() {
        let kinds = |kind: Option<&str>| vec![Kind { kind: kind.map(str::to_owned) }];
        let edge = |pkg: &str, kind| Edge { pkg: pkg.into(), dep_kinds: kinds(kind) };
        let last = PUBLISHED[PUBLISHED.len() - 1];
        let metadata = |kind| {
            let newer = Package { rust_version: Some("1.88.1".into()), ..package("newer") };
            let packages = PUBLISHED.iter().map(|name| package(name)).chain([newer]).collect();
            let node = Node { id: last.into(), deps: vec![edge("newer", kind)] };
            Metadata { packages, resolve: Some(Resolve { nodes: vec![node] }) }
        };
        assert_eq!(of_rust(&metadata(Some("dev"))).unwrap(), [""; 0]);
        for kind in [None, Some("build")] {
            assert_eq!(of_rust(&metadata(kind)).unwrap(), ["newer 0.1.0 asks for Rust 1.88.1"]);
        }
    }
}
