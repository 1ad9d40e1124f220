//! The classification of tiles is never wrong, and for the built-in masks it is exact.

use crate::random::{DECLARATIONS, Generator};
use flashtune_codegen::score::*;
use flashtune_codegen::{Mask, Shape};
use rand::Rng;
use std::ops::Range;

/// What a tile holds, from its elements.
fn truth(mask: &[bool], sizes: &Shape, q: &Range<u32>, kv: &Range<u32>) -> TileKind {
    let visible = q.clone().flat_map(|i| kv.clone().map(move |j| (i * sizes.kv_len + j) as usize));
    let visible = visible.filter(|i| mask[*i]).count();
    match visible {
        0 => TileKind::Masked,
        n if n == q.len() * kv.len() => TileKind::Visible,
        _ => TileKind::Mixed,
    }
}

/// Tiles of both sizes over everything, ragged ones at the ends.
fn tiles(sizes: &Shape, block_q: u32, block_kv: u32) -> Vec<(Range<u32>, Range<u32>)> {
    let blocks = |n: u32, block: u32| (0..n).step_by(block as usize).map(move |i| i..n.min(i + block));
    blocks(sizes.q_len, block_q).flat_map(|q| blocks(sizes.kv_len, block_kv).map(move |kv| (q.clone(), kv))).collect()
}

#[test]
fn no_tile_of_a_random_program_is_classified_wrongly() {
    let mut g = Generator::new(7);
    let (mut decided, mut mixed) = (0, 0);
    for round in 0..3000 {
        let text = format!("{DECLARATIONS} mask = {};", g.mask(1 + round % 6).text());
        let program = Program::parse(&text).unwrap();
        // One who looks at elements, too, is never wrong.
        let looks = round % 2 == 1;
        let classes = if looks { TileProgram::by_elements(&program) } else { TileProgram::new(&program) };
        let sizes = g.sizes();
        let data = g.data(&sizes);
        let mut bound = Bound::new(&program, &sizes, &data, Precision::F32).unwrap();
        let mut classifier = Classifier::new(&program, &classes, &sizes, &data).unwrap();
        let at = g.place(&sizes);
        let mask = bound.mask_matrix(&sizes, at.b, at.h);
        let (block_q, block_kv) = (g.rng.random_range(1..20), g.rng.random_range(1..20));
        let mut live = vec![false; sizes.kv_len as usize];
        for (q, kv) in tiles(&sizes, block_q, block_kv) {
            let (got, want) = (classifier.kind(at.b, at.h, &q, &kv), truth(&mask, &sizes, &q, &kv));
            let right = got == want || got == TileKind::Mixed;
            assert!(
                right,
                "{got:?} is {want:?}: {q:?} {kv:?} of {at:?}, {sizes:?}, {data:?}\n{}\n{}",
                program,
                classes.text()
            );
            decided += u32::from(got != TileKind::Mixed);
            mixed += u32::from(got == TileKind::Mixed && want != TileKind::Mixed);

            // Keys outside of the bounds are seen by nobody.
            let keys = classifier.keys(at.b, at.h, &q);
            let outside = truth(&mask, &sizes, &q, &(0..keys.start)) == TileKind::Masked
                && truth(&mask, &sizes, &q, &(keys.end..sizes.kv_len)) == TileKind::Masked;
            assert!(outside, "{keys:?} for {q:?} of {sizes:?}\n{}\n{}", program, classes.text());

            // Visits are in order, apart, and hold every key that is seen.
            let visits = classifier.visits(at.b, at.h, &q, block_kv);
            assert!(visits.is_sorted_by(|a, b| a.keys.end <= b.keys.start));
            live.fill(false);
            visits.iter().for_each(|v| live[v.keys.start as usize..v.keys.end as usize].fill(true));
            for i in q.clone() {
                let row = &mask[(i * sizes.kv_len) as usize..][..sizes.kv_len as usize];
                assert!(row.iter().zip(&live).all(|(seen, live)| *live || !seen), "{visits:?}\n{program}");
            }
            for v in visits.iter().filter(|v| !v.mixed) {
                assert_eq!(truth(&mask, &sizes, &q, &v.keys), TileKind::Visible);
            }
        }
    }
    // It must say something, too.
    assert!(decided > 10_000 && mixed < decided / 4, "{decided} tiles decided, {mixed} needlessly left open");
}

/// Data for the built-ins: document numbers without gaps, the same for queries and keys.
fn builtin_data(g: &mut Generator, sizes: &Shape) -> SideData {
    let n = sizes.q_len.max(sizes.kv_len) as usize;
    let (mut docs, mut doc) = (Vec::new(), 0);
    for _ in 0..n {
        docs.push(doc);
        doc += i64::from(g.rng.random_bool(0.2));
    }
    let of = |len: u32| Elements::Int(docs[..len as usize].to_vec());
    let step = g.rng.random_range(1..9);
    let (left, right) = (g.rng.random_range(0..12), g.rng.random_range(0..12));
    let prefix = (0..sizes.batch).map(|_| g.rng.random_range(0..=30)).collect();
    SideData::default()
        .scalar("left", Scalar::Int(left))
        .scalar("right", Scalar::Int(right))
        .scalar("chunk", Scalar::Int(step))
        .scalar("block", Scalar::Int(step))
        .scalar("step", Scalar::Int(step))
        .tensor("prefix", &[sizes.batch as usize], Elements::Int(prefix))
        .tensor("doc_q", &[1, sizes.q_len as usize], of(sizes.q_len))
        .tensor("doc_kv", &[1, sizes.kv_len as usize], of(sizes.kv_len))
}

#[test]
fn the_built_in_masks_leave_no_tile_mixed_that_is_not() {
    let mut g = Generator::new(9);
    let masks = BUILTINS.into_iter().filter(|b| b.name != "boolean_mask");
    let masks: Vec<(&str, Program)> = masks
        .map(|b| (b.name, Program::parse(b.text).unwrap()))
        // Windows that are written with their reach, one of them empty, and one that shifts the diagonal.
        .chain([
            ("window", Program::mask_of("kv <= q and q - kv < 7").unwrap()),
            ("empty", Program::mask_of("kv <= q and q < kv").unwrap()),
            ("window of a scalar", Program::mask_of("left: int; abs_ = q - kv; -2 <= abs_ and abs_ < left").unwrap()),
            ("dilated window", Program::mask_of("d = q - kv; 0 <= d and d < 9 and d % 4 == 0").unwrap()),
            ("columns", Program::mask_of("kv < 5 or kv >= kv_len - 3").unwrap()),
        ])
        .filter(|(_, p)| p.mask().is_some() || p.text().is_empty())
        .collect();
    assert!(masks.len() >= 13);
    for (name, program) in &masks {
        let classes = TileProgram::new(program);
        for round in 0..200 {
            let mut sizes = g.sizes();
            if round % 2 == 0 {
                sizes.q_len = sizes.kv_len;
            }
            // Documents are numbered without gaps where queries and keys are the same.
            if name.starts_with("document") {
                sizes.q_len = sizes.kv_len;
            }
            let data = builtin_data(&mut g, &sizes);
            let mut bound = Bound::new(program, &sizes, &data, Precision::F32).unwrap();
            let mut classifier = Classifier::new(program, &classes, &sizes, &data).unwrap();
            let at = g.place(&sizes);
            let mask = bound.mask_matrix(&sizes, at.b, at.h);
            let (block_q, block_kv) = (g.rng.random_range(1..20), g.rng.random_range(1..20));
            for (q, kv) in tiles(&sizes, block_q, block_kv) {
                let (got, want) = (classifier.kind(at.b, at.h, &q, &kv), truth(&mask, &sizes, &q, &kv));
                assert_eq!(got, want, "{name} {q:?} {kv:?} {sizes:?} {data:?}\n{}", classes.text());
            }
        }
    }
}

#[test]
fn live_tiles_of_a_window_grow_with_the_length_and_not_with_its_square() {
    let program = Program::mask_of("kv <= q and q - kv < 1024").unwrap();
    let classes = TileProgram::new(&program);
    let data = SideData::default();
    let live = |len: u32| {
        let sizes = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: len, kv_len: len, mask: Mask::Full };
        let mut classifier = Classifier::new(&program, &classes, &sizes, &data).unwrap();
        let visits = (0..len).step_by(128).map(|q| classifier.visits(0, 0, &(q..q + 128), 128));
        visits.flatten().map(|v| v.keys.len() / 128).sum::<usize>()
    };
    assert_eq!(live(8192), 9 * 64 - 36);
    assert_eq!(live(16384), 9 * 128 - 36);
}

#[test]
fn who_looks_at_elements_knows_documents_and_blocks_in_memory() {
    let mut g = Generator::new(21);
    let masks = [
        ("d: i32[q_len]; mask = d[q] == d[kv];", "d", 1),
        ("d: i64[*]; mask = d[q] == d[kv] and kv <= q;", "d", 1),
        ("d: bool[*, *]; mask = d[q // 16, kv // 16];", "d", 2),
        ("d: bool[q_len, kv_len]; mask = not d[q, kv];", "d", 2),
    ];
    let (mut open, mut before, mut tiles_seen) = (0, 0, 0);
    for (text, name, axes) in masks {
        let program = Program::parse(text).unwrap();
        let (blind, looking) = (TileProgram::new(&program), TileProgram::by_elements(&program));
        for _ in 0..50 {
            let n = g.rng.random_range(1..150);
            let sizes = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: n, kv_len: n, mask: Mask::Full };
            let (n, block) = (n as usize, 16);
            // Documents that come in any order; blocks that are seen or not.
            let elements = match axes {
                1 => Elements::Int((0..n).map(|i| (i / 23 * 7 % 5) as i64).collect()),
                _ if text.contains("//") => Elements::Bool((0..100).map(|_| g.rng.random_bool(0.5)).collect()),
                _ => Elements::Bool((0..n * n).map(|i| (i / n / 16 + i % n / 16) % 3 == 0).collect()),
            };
            let shape = if axes == 1 {
                vec![n]
            } else if text.contains("//") {
                vec![10, 10]
            } else {
                vec![n, n]
            };
            let data = SideData::default().tensor(name, &shape, elements);
            let mut bound = Bound::new(&program, &sizes, &data, Precision::F32).unwrap();
            let mask = bound.mask_matrix(&sizes, 0, 0);
            for (q, kv) in tiles(&sizes, block, block) {
                let want = truth(&mask, &sizes, &q, &kv);
                let kind = |classes| Classifier::new(&program, classes, &sizes, &data).unwrap().kind(0, 0, &q, &kv);
                let got = kind(&looking);
                assert!(got == want || got == TileKind::Mixed, "{text} {q:?} {kv:?}\n{}", looking.text());
                assert!(axes == 1 || got == want, "{text} {q:?} {kv:?}\n{}", looking.text());
                open += u32::from(got != want);
                before += u32::from(kind(&blind) != want);
                tiles_seen += 1;
            }
        }
    }
    assert!(open * 10 < before && before * 2 > tiles_seen, "{open}, before {before} of {tiles_seen}");
}

#[test]
fn floats_of_rows_and_keys_bound_tiles_where_functions_are_taken() {
    let sizes = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 256, kv_len: 256, mask: Mask::Full };
    // How many of 256 tiles are left mixed needlessly, at most.
    for (text, most) in [
        ("int_floor(sqrt(abs(q - kv))) <= 5", 0),
        ("int_floor(float(kv) / 32.0) <= int_floor(float(q) / 32.0)", 30),
        ("sqrt(abs(q - kv)) < 6.5 and kv <= q", 0),
        ("exp(-0.05 * abs(q - kv)) > 0.01", 0),
        ("log(1.0 + abs(q - kv)) <= 4.0", 0),
        ("sigmoid(0.1 * (kv - q)) < 0.9", 0),
        ("int_round(8.0 * log(1.0 + abs(q - kv))) % 2 == 0 and int_ceil(0.25 * kv) <= 30", 0),
        // NaN is no number, wherever the tile is.
        ("sqrt(q - kv) >= 0.0", 120),
        ("log(kv - 100.0) < 3.0", 96),
        ("int_trunc(float(kv) * 1e30) > 5 or not sqrt(kv - q) < 5.0", 164),
    ] {
        let program = Program::mask_of(text).unwrap();
        let classes = TileProgram::new(&program);
        let data = SideData::default();
        let mut bound = Bound::new(&program, &sizes, &data, Precision::F32).unwrap();
        let mut classifier = Classifier::new(&program, &classes, &sizes, &data).unwrap();
        let mask = bound.mask_matrix(&sizes, 0, 0);
        let (mut decided, mut needless) = (0, 0);
        for (q, kv) in tiles(&sizes, 16, 16) {
            let (got, want) = (classifier.kind(0, 0, &q, &kv), truth(&mask, &sizes, &q, &kv));
            assert!(got == want || got == TileKind::Mixed, "{text} {q:?} {kv:?} {got:?}\n{}", classes.text());
            decided += u32::from(got != TileKind::Mixed);
            needless += u32::from(got == TileKind::Mixed && want != TileKind::Mixed);
        }
        assert!(needless <= most && decided > 90, "{text}: {decided}, {needless}");
    }
    // Programs of other words are classified as before.
    let plain = Program::mask_of("0.5 * kv < 0.25 * q").unwrap();
    assert!(TileProgram::new(&plain).text().contains("all_visible = false"));
}
