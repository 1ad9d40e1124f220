//! The C compiler of the tests: it remembers, and optimises little.
//!
//! The Rust tests compile some 700 kernels for the host, which took 580 of their 1750 seconds of processor time. Many
//! are some other test's as well, and the same source and options give the same bytes; `-Og` takes a quarter of the
//! time of `-O3` (`-O1` four tenths: 396 s of tests/it for 361). Ragged kernels, which are the longest and of which
//! tests ask where things lie, are not optimised and not inlined, in a tenth of the time; dense ones, which tests time
//! and tune, would then run ten times as long as they compile. The tests of Python, which took 300 s of two cores, have
//! it too; where ragged kernels run for long `KERNELS_OPTIMISED=little` has them by -O1. What the optimiser makes of
//! kernels is seen by the quick check on the host's widest instruction set, which asks for it by `KERNELS_OPTIMISED=1`,
//! and by the test of the wheel, which has the compiler itself.

use anyhow::{Context, Result};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What cargo starts test programs with: an environment whose `CC` is this compiler. Build scripts do not see it, so
/// that nothing is built anew. Nothing where there is no compiler that it could stand for.
pub(crate) fn runner(target: &Path) -> Result<Option<(String, String)>> {
    let Some(cc) = remembering(target)? else { return Ok(None) };
    let rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())).arg("-vV").output();
    let rustc = rustc.context("cannot start rustc")?.stdout;
    let host = String::from_utf8_lossy(&rustc).lines().find_map(|l| l.strip_prefix("host: ").map(str::to_owned));
    let host = host.context("rustc -vV names no host")?.to_uppercase().replace('-', "_");
    let (cc, before) = (cc.display().to_string(), before());
    // Cargo parts the words at blanks.
    let parts = [&cc, &before].iter().any(|word| word.contains(char::is_whitespace));
    Ok((!parts).then(|| (format!("CARGO_TARGET_{host}_RUNNER"), format!("env {BEFORE}={before} CC={cc}"))))
}

/// What `CC` was before tests got theirs; empty where it was not set.
const BEFORE: &str = "CC_BEFORE_TESTS";

/// The `CC` that everything is built with.
fn before() -> String {
    [BEFORE, "CC"].iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default()
}

/// Gives a cargo that a test starts the `CC` that everything was built with: with the other one build scripts run
/// again, and what follows from them is 80 s of crates. Tests of other packages do the same for theirs.
pub(crate) fn as_built(cargo: &mut Command) {
    match std::env::var_os(BEFORE) {
        Some(cc) if cc.is_empty() => drop(cargo.env_remove("CC")),
        Some(cc) => drop(cargo.env("CC", cc)),
        None => {}
    }
}

/// Writes the program into the target folder. It is called as the compiler is, whose name and version are part of what
/// is kept.
pub(crate) fn remembering(target: &Path) -> Result<Option<PathBuf>> {
    let cc = Some(before()).filter(|cc| !cc.is_empty()).unwrap_or_else(|| "cc".into());
    let version = Command::new(&cc).arg("--version").output().map(|out| out.stdout);
    // Arguments of a compiler would be part of the name as well.
    let (Ok(version), Some(name)) = (version, Path::new(&cc).file_name()) else { return Ok(None) };
    let folder = target.join("tmp/cc");
    if Path::new(&cc).starts_with(&folder) {
        anyhow::bail!("CC is {cc}, which stands for the compiler in tests: unset it, or set it to the compiler");
    }
    let memory = folder.join("kernels");
    std::fs::create_dir_all(&memory).with_context(|| format!("cannot make {}", memory.display()))?;
    let version = String::from_utf8_lossy(&version).lines().next().unwrap_or_default().replace('\'', "");
    let program = folder.join(name);
    let unfinished = folder.join("unfinished");
    std::fs::write(&unfinished, script(&cc, &version, &memory))?;
    std::fs::set_permissions(&unfinished, std::fs::Permissions::from_mode(0o755))?;
    std::fs::rename(unfinished, &program)?;
    Ok(Some(program))
}

/// Kernels are compiled as `kernel.c` to `kernel.so` in a folder of their own; all else goes to the compiler.
fn script(cc: &str, version: &str, memory: &Path) -> String {
    format!(
        "#!/bin/sh\n[ -f kernel.c ] || exec {cc} \"$@\"\n\
         if [ \"$KERNELS_OPTIMISED\" != 1 ]; then\n\
         read -r name < kernel.c\n\
         level=-Og\n\
         case $KERNELS_OPTIMISED$name in\n\
         little*) level=-O1 ;;\n\
         *.cpu_ragged.*) level='-O0 -Dalways_inline=unused' ;;\n\
         esac\n\
         for word; do shift; [ \"$word\" = -O3 ] && set -- \"$@\" $level || set -- \"$@\" \"$word\"; done\n\
         fi\n\
         kept='{}'/$( {{ echo '{cc}' '{version}' \"$*\"; cat kernel.c; }} | sha256sum | cut -c 1-64)\n\
         [ -f \"$kept\" ] && exec cp \"$kept\" kernel.so\n\
         {cc} \"$@\" || exit\ncp kernel.so \"$kept.$$\" && mv \"$kept.$$\" \"$kept\"\nexit 0\n",
        memory.display(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compiles `int f;` in a folder of its own, and gives what the compiler was asked and the bytes.
    fn compile(program: &Path, optimised: &str, text: &str) -> (String, Vec<u8>) {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("kernel.c"), text).unwrap();
        let mut command = Command::new(program);
        command.args(["-O3", "-shared", "-o", "kernel.so", "kernel.c"]).env("KERNELS_OPTIMISED", optimised);
        assert!(command.current_dir(place.path()).status().unwrap().success());
        let read = |name: &str| std::fs::read(place.path().join(name)).unwrap_or_default();
        (String::from_utf8(read("asked")).unwrap(), read("kernel.so"))
    }

    #[test]
    fn the_same_kernel_is_compiled_once_and_optimised_where_that_is_asked() {
        let folder = tempfile::tempdir().unwrap();
        // A compiler that writes down what it is asked.
        let cc = folder.path().join("real");
        std::fs::write(&cc, "#!/bin/sh\necho \"$@\" > asked\ncp kernel.c kernel.so\n").unwrap();
        std::fs::set_permissions(&cc, std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = folder.path().join("cc");
        std::fs::write(&program, script(cc.to_str().unwrap(), "1", folder.path())).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let asked = |level: &str| format!("{level} -shared -o kernel.so kernel.c\n");
        assert_eq!(compile(&program, "", "int f;"), (asked("-Og"), b"int f;".to_vec()));
        assert_eq!(compile(&program, "", "int f;"), (String::new(), b"int f;".to_vec()));
        assert_eq!(compile(&program, "1", "int f;"), (asked("-O3"), b"int f;".to_vec()));
        assert_eq!(compile(&program, "", "int g;"), (asked("-Og"), b"int g;".to_vec()));
        let ragged = "/* forward.cpu_ragged.avx2 */\nint f;";
        assert_eq!(compile(&program, "", ragged), (asked("-O0 -Dalways_inline=unused"), ragged.into()));
        assert_eq!(compile(&program, "little", ragged), (asked("-O1"), ragged.into()));
        assert_eq!(compile(&program, "1", ragged), (asked("-O3"), ragged.into()));
    }
}
