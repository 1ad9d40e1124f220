//! What `flashtune debug` keeps of a kernel.

use crate::common::{Place, fails};
use flashtune_runtime::compile::Nvrtc;
use std::fs::{read, read_to_string, write};

const CAUSAL: [&str; 6] = ["--dtype", "f32", "--head-dim", "64", "--mask", "causal"];

/// The files that are said to be there, which are all that there are.
fn kept(place: &Place, args: &[&str]) -> Vec<String> {
    let folder = place.path("kept");
    let told = place.json(&[&["debug", folder.to_str().unwrap()], args].concat());
    let mut files: Vec<String> =
        told["files"].as_array().unwrap().iter().map(|f| f.as_str().unwrap().to_owned()).collect();
    let mut there: Vec<String> =
        folder.read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    there.sort();
    assert_eq!(files, there);
    there
}

#[test]
fn a_cpu_kernel_comes_with_source_and_library() {
    let place = Place::new();
    let files = kept(&place, &CAUSAL);
    assert!(["README.txt", "kernel.c", "kernel.so"].iter().all(|f| files.iter().any(|x| x == f)), "{files:?}");
    assert!(read(place.path("kept/kernel.so")).unwrap().starts_with(b"\x7fELF"));
    let about = read_to_string(place.path("kept/README.txt")).unwrap();
    assert!(about.contains("forward/cpu") && about.contains("flashtune check --family forward/cpu"), "{about}");
    // Nothing that lies there is written over.
    fails(place.flashtune(&["debug"]).arg(place.path("kept")).args(CAUSAL), 2, &["is not empty", "not there yet"]);
    fails(
        place.flashtune(&["debug", "--lineinfo"]).arg(place.path("lines")).args(CAUSAL),
        2,
        &["--lineinfo", "--arch"],
    );
}

#[test]
fn a_cuda_kernel_comes_with_lines_and_the_compilers_log() {
    if Nvrtc::find().is_err() {
        assert!(std::env::var_os("CI").is_none(), "NVRTC is installed in CI");
        return;
    }
    let place = Place::new();
    let files = kept(&place, &[&CAUSAL[..], &["--arch", "sm_90a", "--lineinfo"]].concat());
    for file in ["README.txt", "compiler.log", "kernel.cu", "kernel.cubin", "kernel.ptx"] {
        assert!(files.iter().any(|x| x == file), "{file}: {files:?}");
    }
    assert!(read(place.path("kept/kernel.cubin")).unwrap().starts_with(b"\x7fELF"));
    assert!(read_to_string(place.path("kept/compiler.log")).unwrap().contains("registers"));
    let ptx = read_to_string(place.path("kept/kernel.ptx")).unwrap();
    let source = place.path("kept/kernel.cu").canonicalize().unwrap();
    assert!(ptx.contains(".loc") && ptx.contains(source.to_str().unwrap()), "no lines of {}", source.display());
}

#[test]
fn a_kernel_that_does_not_compile_is_kept_with_the_log() {
    if Nvrtc::find().is_err() {
        assert!(std::env::var_os("CI").is_none(), "NVRTC is installed in CI");
        return;
    }
    let (place, templates) = (Place::new(), crate::common::ROOT.to_owned() + "/templates");
    let changed = place.path("templates");
    std::fs::create_dir_all(changed.join("forward")).unwrap();
    let naive = read_to_string(format!("{templates}/forward/naive.cu")).unwrap();
    write(changed.join("forward/naive.cu"), naive.replace("const Tile tile", "const Tail tile")).unwrap();
    let folder = place.path("kept");
    let mut command = place.flashtune(&["debug", folder.to_str().unwrap(), "--arch", "sm_90a"]);
    command.args(CAUSAL).args(["--precision", "exact"]).arg("--templates").arg(changed);
    fails(&mut command, 1, &["Tail"]);
    let log = read_to_string(folder.join("compiler.log")).unwrap();
    assert!(log.contains("identifier \"Tail\" is undefined"), "{log}");
    assert!(read_to_string(folder.join("kernel.cu")).unwrap().contains("const Tail tile"));
    assert!(read_to_string(folder.join("README.txt")).unwrap().contains("does not compile"));
}
