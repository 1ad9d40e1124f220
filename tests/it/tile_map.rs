//! `flashtune explain --tile-map`, and score programs on the command line.

use crate::common::{Place, fails};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// The map of a mask, one line for every row of tiles.
fn map(place: &Place, args: &[&str]) -> Vec<String> {
    let map = place.json(&[&["explain", "--tile-map"], args].concat());
    map["rows"].as_array().unwrap().iter().map(|r| r.as_str().unwrap().to_owned()).collect()
}

#[test]
fn maps_show_what_is_skipped_and_what_needs_no_mask() {
    let place = Place::new();
    let square = ["--q-len", "40", "--tile", "10x10"];
    let of = |mask: &str| map(&place, &[&square[..], &["--mask", mask]].concat());
    assert_eq!(of("causal"), ["+...", "#+..", "##+.", "###+"]);
    assert_eq!(of("window:10,-"), ["####", "+###", ".+##", "..+#"]);
    assert_eq!(of("kv <= q"), of("causal"));
    assert_eq!(of("full"), ["####"; 4]);
    assert_eq!(of("kv < q and q < kv"), ["...."; 4]);
    let chunked = map(&place, &[&square[..], &["--mask", "block_local", "--set", "block=20"]].concat());
    assert_eq!(chunked, ["##..", "##..", "..##", "..##"]);
}

#[test]
fn tensors_come_from_a_file_and_the_map_goes_into_one() {
    let place = Place::new();
    let (file, svg) = (place.path("docs.safetensors"), place.path("map.svg"));
    let docs: Vec<u8> = (0..32i32).flat_map(|i| (i / 8).to_le_bytes()).collect();
    let tensor = || TensorView::new(Dtype::I32, vec![1, 32], &docs).unwrap();
    std::fs::write(&file, safetensors::serialize([("doc_q", tensor()), ("doc_kv", tensor())], None).unwrap()).unwrap();
    let (file, svg) = (file.to_str().unwrap(), svg.to_str().unwrap());
    let args = ["--mask", "document", "--tensors", file, "--q-len", "32", "--tile", "8x8", "--svg", svg];
    assert_eq!(map(&place, &args), ["#...", ".#..", "..#.", "...#"]);
    let image = std::fs::read_to_string(svg).unwrap();
    assert!(image.starts_with("<svg") && image.ends_with("</svg>\n"));
    // Runs of one kind are one rectangle: two or three of each row, the ground, the frame and the legend.
    assert_eq!(image.matches("<rect").count(), 2 + 3 + 3 + 2 + 5);
    let short = ["--mask", "document", "--tensors", file, "--q-len", "64"];
    fails(&mut place.flashtune(&[&["explain", "--tile-map"], &short[..]].concat()), 2, &["doc_kv", "length 32"]);
}

#[test]
fn bad_programs_are_bad_input() {
    let place = Place::new();
    let explain = |args: &[&str]| place.flashtune(&[&["explain"], args].concat());
    fails(&mut explain(&["--mask", "kv <= qq"]), 2, &["column 7", "did you mean `q`?"]);
    fails(&mut explain(&["--mask", "sideways"]), 2, &["full, causal"]);
    fails(&mut explain(&["--mask", "score < 1.0"]), 2, &["only a score may"]);
    fails(&mut explain(&["--score", "score + slope[h]"]), 2, &["slope: float[heads];"]);
    fails(&mut explain(&["--mask", "chunked", "--tile-map"]), 2, &["scalar `chunk` is missing"]);
    fails(&mut explain(&["--mask", "chunked", "--tile-map", "--set", "chunk=0"]), 2, &["holds 0", "from 1"]);
    fails(&mut explain(&["--mask", "causal", "--tile-map", "--tile", "0x8"]), 2, &["--tile 0x8"]);
    let arch =
        ["emit", "--arch", "sm_90a", "--family", "forward/sm90", "--head-dim", "256", "--score", "additive_bias"];
    fails(&mut place.flashtune(&arch), 2, &["side tensors", "forward/sm80"]);
}

#[test]
fn the_cpu_emits_explains_and_checks_programs() {
    let place = Place::new();
    let program = ["--mask", "kv // 8 == q // 8", "--score", "score * 0.5", "--head-dim", "16", "--dtype", "f32"];
    fn with<'a>(command: &[&'a str], program: &[&'a str]) -> Vec<&'a str> {
        [command, program, &["--device", "cpu"]].concat()
    }
    let source = place.json(&with(&["emit"], &program));
    let text = source["source"].as_str().unwrap();
    assert!(text.contains("kv // 8") && text.contains("score = score * 0.5;"));
    assert!(source["kernel"].as_str().unwrap().starts_with("forward-f32-d16-full-s"));
    // A mask that is a window is taken as one.
    let window =
        place.json(&with(&["emit"], &["--mask", "kv <= q and q - kv < 9", "--head-dim", "16", "--dtype", "f32"]));
    assert!(window["kernel"].as_str().unwrap().starts_with("forward-f32-d16-window."), "{window}");
    let explained = place.json(&with(&["explain", "--q-len", "64", "--heads", "2"], &program));
    assert!(explained.to_string().contains("forward/cpu"), "{explained}");
    let check = |more: &[&str]| {
        let kernels = ["--problem", "f32-d40v72", "--kernel", ".cpu."];
        let program = [&["check", "--device", "cpu", "--schedules", "0"], &kernels[..], &["--mask"]].concat();
        place.flashtune(&[&program[..], more].concat())
    };
    let checked = check(&["kv % 3 != 1", "--score", "score * 0.5"]).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    fails(&mut check(&["causal"]), 2, &["the sweep has it already"]);
    // What a program reads is made up.
    let checked = check(&["document_causal", "--score", "alibi"]).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}
