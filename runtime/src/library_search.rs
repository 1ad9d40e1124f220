//! Where a library of the CUDA toolkit may be: a list of folders to look into, best first.
//!
//! The wheels (`nvidia-cuda-nvrtc`, `nvidia-cublas`) hold no development link and are on no loader path, so the usual
//! lookup by name does not find them; neither does it tell two installed versions apart.

use std::cmp::Reverse;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// What the search reads of its surroundings.
pub(crate) struct Surroundings<'a> {
    /// Environment variables.
    pub(crate) var: &'a dyn Fn(&str) -> Option<OsString>,
    /// The working directory.
    pub(crate) folder: PathBuf,
    /// Root of the file system.
    pub(crate) root: PathBuf,
}

impl Surroundings<'_> {
    /// Those of this process.
    pub(crate) fn of_process() -> Surroundings<'static> {
        Surroundings {
            var: &|name| std::env::var_os(name).filter(|v| !v.is_empty()),
            folder: std::env::current_dir().unwrap_or_default(),
            root: PathBuf::from("/"),
        }
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        (self.var)(name).map(PathBuf::from)
    }

    fn paths(&self, name: &str) -> Vec<PathBuf> {
        (self.var)(name).map(|v| std::env::split_paths(&v).filter(|p| p.is_absolute()).collect()).unwrap_or_default()
    }

    /// The library that the user named by an environment variable, if one was: then nothing else is looked at.
    pub(crate) fn named(&self, variable: &str, library: &str) -> Option<Vec<PathBuf>> {
        let named = self.path(variable)?;
        Some(if named.is_dir() { libraries(&named, library) } else { vec![named] })
    }

    /// Every file of a library (`libnvrtc.so`) that is found, best first.
    pub(crate) fn search(&self, library: &str) -> Vec<PathBuf> {
        let mut seen = std::collections::HashSet::new();
        self.folders()
            .iter()
            .flat_map(|folder| libraries(folder, library))
            // The same file through several links is tried once.
            .filter(|file| seen.insert(fs::canonicalize(file).unwrap_or_else(|_| file.clone())))
            .collect()
    }

    /// Toolkits, then the loader's path, then Python environments.
    fn folders(&self) -> Vec<PathBuf> {
        let mut out = Vec::new();
        let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(|name| self.path(name));
        for home in homes.chain(self.toolkits()) {
            out.extend(["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"].map(|l| home.join(l)));
        }
        out.extend(self.paths("LD_LIBRARY_PATH"));
        out.extend(self.loader_folders());
        for packages in self.site_packages() {
            let nvidia = packages.join("nvidia");
            // `cu13` and its successors; `cuda_nvrtc` is the layout of the CUDA 12 wheels.
            let mut cu = children(&nvidia, |name| name.starts_with("cu") && name[2..].parse::<u32>().is_ok());
            cu.sort_by_key(|p| Reverse(version(&name_of(p)[2..])));
            out.extend(cu.into_iter().map(|p| p.join("lib")));
            out.extend(["cuda_nvrtc", "cublas"].map(|wheel| nvidia.join(wheel).join("lib")));
        }
        out
    }

    /// `/usr/local/cuda` (the administrator's choice), then `/usr/local/cuda-X.Y`, newest first.
    fn toolkits(&self) -> Vec<PathBuf> {
        let mut found = children(&self.root.join("usr/local"), |name| name == "cuda" || name.starts_with("cuda-"));
        found.sort_by_key(|p| {
            let name = name_of(p);
            (name != "cuda", Reverse(version(name.strip_prefix("cuda-").unwrap_or_default())))
        });
        found
    }

    /// The loader's own folders: those of `/etc/ld.so.conf.d` and the fixed ones.
    fn loader_folders(&self) -> Vec<PathBuf> {
        let mut out = Vec::new();
        let mut configs = children(&self.root.join("etc/ld.so.conf.d"), |name| name.ends_with(".conf"));
        configs.sort();
        for config in configs {
            let text = fs::read_to_string(config).unwrap_or_default();
            let lines = text.lines().map(str::trim).filter_map(|l| l.strip_prefix('/'));
            out.extend(lines.map(|l| self.root.join(l)));
        }
        let fixed = ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "lib64", "lib"];
        out.extend(fixed.map(|f| self.root.join(f)));
        out
    }

    /// Folders with Python packages: of the active environment, of projects around the working directory, of the user,
    /// of the interpreter on `PATH`, of the system.
    fn site_packages(&self) -> Vec<PathBuf> {
        let mut prefixes: Vec<PathBuf> =
            ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(|n| self.path(n)).collect();
        for folder in self.folder.ancestors() {
            prefixes.extend([".venv", ".toolchain", "venv"].map(|name| folder.join(name)));
        }
        if let Some(home) = self.path("HOME") {
            prefixes.push(home.join(".local"));
            prefixes.extend(newest_first(children(&home.join(".pyenv/versions"), |_| true)));
        }
        for folder in self.paths("PATH") {
            // A link to the interpreter lies in the environment; what it points to, in the installation.
            let python = folder.join("python3");
            prefixes.extend(fs::canonicalize(&python).ok().and_then(|p| Some(p.parent()?.parent()?.to_owned())));
            prefixes.extend(python.exists().then(|| folder.parent().map(Path::to_owned)).flatten());
        }
        for opt in children(&self.root.join("opt"), |_| true) {
            prefixes.extend([opt.join(".venv"), opt.join("venv"), opt]);
        }
        prefixes.extend([self.root.join("usr/local"), self.root.join("usr")]);

        let mut out = Vec::new();
        for prefix in prefixes {
            for python in newest_first(children(&prefix.join("lib"), |name| name.starts_with("python3"))) {
                out.extend(["site-packages", "dist-packages"].map(|p| python.join(p)));
            }
            // What `pip install --target` makes.
            out.push(prefix);
        }
        out
    }
}

/// The files of a library in a folder, newest first; the unversioned development link last.
fn libraries(folder: &Path, library: &str) -> Vec<PathBuf> {
    // The number behind the name: none for the link, nothing at all for another library.
    let number = |name: &str| match name.strip_prefix(library)? {
        "" => Some(Vec::new()),
        rest => rest.strip_prefix('.').map(version).filter(|v| !v.is_empty()),
    };
    let mut found = children(folder, |name| number(name).is_some());
    found.sort_by_key(|p| Reverse(number(&name_of(p))));
    found
}

/// Entries of a folder whose name passes; none when it cannot be read.
fn children(folder: &Path, accept: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| accept(&name_of(p))).collect()
}

fn newest_first(mut folders: Vec<PathBuf>) -> Vec<PathBuf> {
    folders.sort_by_key(|p| Reverse(version(name_of(p).trim_start_matches("python"))));
    folders
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// `13.0.88` as numbers, to be compared; empty when it is no version.
fn version(text: &str) -> Vec<u32> {
    text.split('.').map(|n| n.parse::<u32>()).collect::<Result<_, _>>().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const ENV: &str = "FLASHTUNE_NVRTC";
    const NVRTC: &str = "libnvrtc.so";

    /// A file system in a temporary folder.
    struct World {
        dir: tempfile::TempDir,
        vars: HashMap<&'static str, OsString>,
    }

    impl World {
        fn new(files: &[&str]) -> Self {
            let world = Self { dir: tempfile::tempdir().unwrap(), vars: HashMap::new() };
            for file in files {
                let path = world.dir.path().join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
            world
        }

        fn set(mut self, name: &'static str, path: &str) -> Self {
            self.vars.insert(name, self.dir.path().join(path).into());
            self
        }

        /// What is found from the folder `work/sub`, relative to the root.
        fn found(&self, named: bool) -> Option<Vec<String>> {
            let var = |name: &str| self.vars.get(name).cloned();
            let s = Surroundings { var: &var, folder: self.dir.path().join("work/sub"), root: self.dir.path().into() };
            let files = if named { s.named(ENV, NVRTC)? } else { s.search(NVRTC) };
            let relative = |p: PathBuf| p.strip_prefix(self.dir.path()).unwrap().to_string_lossy().into_owned();
            Some(files.into_iter().map(relative).collect())
        }
    }

    #[test]
    fn a_named_library_or_folder_is_the_only_candidate() {
        let files = ["x/libnvrtc.so.12", "x/libnvrtc.so.13", "x/libnvrtc-builtins.so.13.0", "usr/lib/libnvrtc.so.13"];
        let world = World::new(&files).set(ENV, "x");
        assert_eq!(world.found(true).unwrap(), ["x/libnvrtc.so.13", "x/libnvrtc.so.12"]);
        let world = World::new(&files).set(ENV, "x/libnvrtc.so.12");
        assert_eq!(world.found(true).unwrap(), ["x/libnvrtc.so.12"]);
        let world = World::new(&files).set(ENV, "nowhere");
        assert_eq!(world.found(true).unwrap(), ["nowhere"]);
        assert!(World::new(&files).found(true).is_none());
    }

    #[test]
    fn toolkits_come_before_the_loader_and_python() {
        let world = World::new(&[
            "home/cuda/lib64/libnvrtc.so.13",
            "usr/local/cuda-12.9/lib64/libnvrtc.so.12",
            "usr/local/cuda-13.0/lib64/libnvrtc.so.13",
            "usr/local/cuda-13.10/lib64/libnvrtc.so.13",
            "ld/libnvrtc.so",
            "usr/lib/x86_64-linux-gnu/libnvrtc.so.11.2",
            "venv/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "work/.toolchain/nvidia/cu13/lib/libnvrtc.so.13",
        ])
        .set("CUDA_HOME", "home/cuda")
        .set("LD_LIBRARY_PATH", "ld")
        .set("VIRTUAL_ENV", "venv");
        assert_eq!(
            world.found(false).unwrap(),
            [
                "home/cuda/lib64/libnvrtc.so.13",
                "usr/local/cuda-13.10/lib64/libnvrtc.so.13",
                "usr/local/cuda-13.0/lib64/libnvrtc.so.13",
                "usr/local/cuda-12.9/lib64/libnvrtc.so.12",
                "ld/libnvrtc.so",
                "usr/lib/x86_64-linux-gnu/libnvrtc.so.11.2",
                "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
                "venv/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
                "work/.toolchain/nvidia/cu13/lib/libnvrtc.so.13",
            ]
        );
    }

    #[test]
    fn the_environment_of_the_interpreter_on_path_is_searched_through_links() {
        let world = World::new(&[
            "py/bin/python3",
            "py/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "opt/app/.venv/lib/python3.10/site-packages/nvidia/cu14/lib/libnvrtc.so.14",
            "opt/app/.venv/lib/python3.10/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
        ])
        .set("PATH", "bin");
        fs::create_dir(world.dir.path().join("bin")).unwrap();
        std::os::unix::fs::symlink(world.dir.path().join("py/bin/python3"), world.dir.path().join("bin/python3"))
            .unwrap();
        assert_eq!(
            world.found(false).unwrap(),
            [
                "py/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
                "opt/app/.venv/lib/python3.10/site-packages/nvidia/cu14/lib/libnvrtc.so.14",
                "opt/app/.venv/lib/python3.10/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            ]
        );
    }

    #[test]
    fn the_loaders_configuration_is_read() {
        let world = World::new(&["etc/ld.so.conf.d/cuda.conf", "toolkit/lib/libnvrtc.so.13"]);
        fs::write(world.dir.path().join("etc/ld.so.conf.d/cuda.conf"), "# comment\n/toolkit/lib\n").unwrap();
        assert_eq!(world.found(false).unwrap(), ["toolkit/lib/libnvrtc.so.13"]);
    }

    #[test]
    fn other_libraries_are_found_beside_it_and_not_taken_for_it() {
        let world = World::new(&[
            "cuda/lib64/libcublas.so",
            "cuda/lib64/libcublas.so.13",
            "cuda/lib64/libcublasLt.so.13",
            "cuda/lib64/libnvrtc.so.13",
            "venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublas.so.12",
        ])
        .set("CUDA_HOME", "cuda")
        .set("VIRTUAL_ENV", "venv");
        let var = |name: &str| world.vars.get(name).cloned();
        let s = Surroundings { var: &var, folder: world.dir.path().join("work"), root: world.dir.path().into() };
        let names: Vec<_> = s.search("libcublas.so").iter().map(|p| name_of(p)).collect();
        assert_eq!(names, ["libcublas.so.13", "libcublas.so", "libcublas.so.12"]);
    }
}
