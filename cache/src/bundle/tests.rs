//! What a bundle holds, and what becomes of it when any byte is changed.

use super::*;
use crate::BundleContents;
use crate::bundle::format::ENTRY;
use crate::testing::{arch, artifact, record, validity};
use crate::{SecretKey, Trust};
use flashtune_codegen::{Arch, CpuIsa};
use proptest::prelude::*;
use std::sync::LazyLock;

fn contents(records: Vec<Record>, created: u64) -> Vec<u8> {
    let mut load = |key: &Key| (0..8).map(artifact).find(|a| a.recipe.key() == *key);
    BundleContents { records, artifacts: Vec::new(), load: &mut load, created }.to_bytes()
}

fn sample() -> Vec<u8> {
    contents(vec![record(128, 1), record(512, 2), record(2048, 3), record(4096, 1)], 7)
}

static SAMPLE: LazyLock<Vec<u8>> = LazyLock::new(sample);
static KEY: LazyLock<SecretKey> = LazyLock::new(|| SecretKey::generate().unwrap());
static SIGNED: LazyLock<Vec<u8>> = LazyLock::new(|| signed(&SAMPLE));

fn signed(bytes: &[u8]) -> Vec<u8> {
    let root = Bundle::from_bytes("b", bytes.to_vec()).unwrap().root;
    [bytes, &KEY.trailer(&root)].concat()
}

#[test]
fn everything_put_in_comes_out() {
    let b = Bundle::from_bytes("b", sample()).unwrap();
    assert_eq!((b.record_count(), b.artifact_count()), (4, 3));
    for (len, n) in [(128, 1), (512, 2), (2048, 3), (4096, 1)] {
        let r = record(len, n);
        assert_eq!(b.record(&r.key).unwrap(), Some(r.clone()));
        assert_eq!(b.artifact(&r.artifact).unwrap(), Some(artifact(n)));
    }
    assert_eq!(b.record(&record(8192, 1).key).unwrap(), None);
    assert_eq!(b.artifact(&artifact(7).recipe.key()).unwrap(), None);
    assert_eq!(b.records().map(|r| r.unwrap()).filter(|(_, v)| **v == validity()).count(), 4);
    let set = &b.manifest().sets[0];
    assert_eq!(
        (b.manifest().created, set.records, &*set.arch, &*set.family),
        (7, 4, &*arch().to_string(), "forward/cpu")
    );
}

#[test]
fn the_order_of_the_content_does_not_change_the_bytes() {
    let shuffled = contents(vec![record(4096, 1), record(2048, 3), record(128, 1), record(512, 2)], 7);
    assert_eq!(sample(), shuffled);
    let later = contents(vec![record(128, 1)], 8);
    assert_ne!(contents(vec![record(128, 1)], 7), later);
}

#[test]
fn a_record_whose_artifact_is_gone_stays() {
    let mut none = |_: &Key| None;
    let bytes =
        BundleContents { records: vec![record(128, 1)], artifacts: vec![], load: &mut none, created: 0 }.to_bytes();
    let b = Bundle::from_bytes("b", bytes).unwrap();
    assert_eq!((b.record_count(), b.artifact_count()), (1, 0));
    assert!(b.check(&validity().into()).is_ok());
}

#[test]
fn an_empty_bundle_opens_and_serves_nobody() {
    let b = Bundle::from_bytes("b", contents(vec![], 0)).unwrap();
    assert_eq!((b.record_count(), b.artifact_count()), (0, 0));
    assert!(b.check(&validity().into()).is_err());
}

#[test]
fn files_are_mapped_and_bad_ones_named() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("x.ftb");
    assert!(matches!(Bundle::map(&path), Err(Error::Io { .. })));
    std::fs::write(&path, b"").unwrap();
    assert!(matches!(Bundle::map(&path), Err(Error::Damaged { .. })));
    std::fs::write(&path, sample()).unwrap();
    assert_eq!(Bundle::map(&path).unwrap().record_count(), 4);
    std::fs::write(&path, &sample()[..500]).unwrap();
    let e = Bundle::map(&path).unwrap_err().to_string();
    assert!(e.contains("x.ftb") && e.contains("500"), "{e}");
}

#[test]
fn verifying_notices_every_byte_that_changed() {
    Bundle::from_bytes("b", sample()).unwrap().verify().unwrap();
    let mut bytes = sample();
    for at in 0..bytes.len() {
        bytes[at] ^= 0x40;
        let verified = Bundle::from_bytes("b", bytes.clone()).and_then(|b| b.verify());
        assert!(verified.is_err(), "byte {at}");
        bytes[at] ^= 0x40;
    }
}

#[test]
fn a_foreign_bundle_is_refused_by_field() {
    let b = Bundle::from_bytes("b", sample()).unwrap();
    let field = |v: Validity| match b.check(&v.into()) {
        Err(Error::Mismatch { field, found, expected, .. }) => (field, found, expected),
        other => panic!("{other:?}"),
    };
    assert!(b.check(&validity().into()).is_ok());
    let other = Arch::Cpu(CpuIsa::Amx);
    assert_eq!(field(Validity { arch: other, ..validity() }), ("arch", arch().to_string(), "cpu-amx".into()));
    assert_eq!(field(Validity { templates: "ff".into(), ..validity() }).0, "templates");
    assert_eq!(field(Validity { abi: 99, ..validity() }).0, "abi");
    // When several differ, the first one in the order of the fields is named.
    assert_eq!(field(Validity { arch: other, abi: 99, ..validity() }).0, "arch");
}

#[test]
fn another_format_version_is_refused_by_name() {
    let mut bytes = sample();
    bytes[8] = crate::bundle::FORMAT as u8 + 1;
    assert!(matches!(Bundle::from_bytes("b", bytes), Err(Error::Mismatch { field: "format version", .. })));
}

#[test]
fn a_blob_under_a_foreign_key_is_refused_although_every_hash_matches() {
    // Someone who can compute hashes swaps the blobs of two artifacts: the recipe inside still tells.
    let good = sample();
    let b = Bundle::from_bytes("b", good.clone()).unwrap();
    let mut bytes = good.clone();
    let header = Header::decode(bytes.first_chunk().unwrap());
    let (indexes, one) = (header.records.0 as usize, header.artifacts.0 as usize);
    let two = one + ENTRY;
    let (first, second) = (good[one + 32..one + ENTRY].to_vec(), good[two + 32..two + ENTRY].to_vec());
    bytes[one + 32..one + ENTRY].copy_from_slice(&second);
    bytes[two + 32..two + ENTRY].copy_from_slice(&first);
    let fixed = header.encode(&bytes[indexes..]);
    bytes[..HEADER].copy_from_slice(&fixed);
    let forged = Bundle::from_bytes("b", bytes).unwrap();
    for key in b.artifact_keys().take(2) {
        assert!(matches!(forged.artifact(&key), Err(Error::Damaged { .. })));
    }
}

#[test]
fn signing_appends_and_can_be_repeated() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("x.ftb");
    std::fs::write(&path, sample()).unwrap();
    let other = SecretKey::generate().unwrap();
    let root = sign_bundle(&path, &other).unwrap();
    assert_eq!(sign_bundle(&path, &KEY).unwrap(), root);
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes == *SIGNED && bytes.starts_with(&SAMPLE));
    let b = Bundle::map(&path).unwrap();
    assert_eq!((b.signer(), b.record_count(), b.root()), (Some(KEY.public()), 4, root));
    assert_eq!(Bundle::from_bytes("b", sample()).unwrap().signer(), None);
}

#[test]
fn a_signature_of_another_bundle_or_key_is_damage_and_not_a_missing_signature() {
    let other = contents(vec![record(128, 1)], 7);
    let moved = [&other[..], &SIGNED[SAMPLE.len()..]].concat();
    let mut foreign = SIGNED.clone();
    let at = SAMPLE.len() + 8;
    foreign[at..at + 32].copy_from_slice(&SIGNED_BY_ANOTHER[at..at + 32]);
    for bytes in [moved, foreign] {
        let e = Bundle::from_bytes("b", bytes).unwrap_err().to_string();
        assert!(e.contains("signature"), "{e}");
    }
}

static SIGNED_BY_ANOTHER: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let root = Bundle::from_bytes("b", sample()).unwrap().root;
    [&SAMPLE[..], &SecretKey::generate().unwrap().trailer(&root)].concat()
});

#[test]
fn no_byte_of_a_signed_bundle_can_be_changed_unnoticed() {
    let trust = Trust::default().trust(KEY.public());
    for at in 0..SIGNED.len() {
        let mut bytes = SIGNED.clone();
        bytes[at] ^= 1 << (at % 8);
        let opened = Bundle::from_bytes("b", bytes.clone());
        // Blobs are checked when they are taken; all else, signature included, when the file is opened.
        let blobs = HEADER..Header::decode(SAMPLE.first_chunk().unwrap()).manifest.0 as usize;
        assert_eq!(opened.is_ok(), blobs.contains(&at), "byte {at}");
        if let Ok(b) = opened {
            trust.check(&b).unwrap();
            let wrong = b.records().filter(|r| r.is_err()).count()
                + (0..8).filter(|n| b.artifact(&artifact(*n).recipe.key()).is_err()).count();
            assert_eq!(wrong, 1, "byte {at}");
            answers_are_true(bytes);
        }
    }
}

/// One who may write to the file changes it after it was checked, with hashes that fit: none of it is used.
#[test]
fn what_is_written_into_a_mapped_file_is_never_loaded() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("x.ftb");
    std::fs::write(&path, &*SIGNED).unwrap();
    let b = Bundle::map(&path).unwrap();
    // A whole bundle of the same layout whose artifacts were made by another compiler.
    let mut load = |key: &Key| {
        let mut found = (0..8).map(artifact).find(|a| a.recipe.key() == *key)?;
        found.bytes.reverse();
        Some(found)
    };
    let records = vec![record(128, 1), record(512, 2), record(2048, 3), record(4096, 1)];
    let forged = BundleContents { records, artifacts: vec![], load: &mut load, created: 7 }.to_bytes();
    assert_eq!(forged.len(), SAMPLE.len());
    let key = artifact(1).recipe.key();
    assert_eq!(Bundle::from_bytes("f", forged.clone()).unwrap().artifact(&key).unwrap().unwrap().recipe.key(), key);
    let mut file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::io::Write::write_all(&mut file, &forged).unwrap();
    assert!(matches!(b.artifact(&key), Err(Error::Damaged { .. })));
    assert_eq!(b.record(&record(128, 1).key).unwrap(), Some(record(128, 1)), "its bytes are the same in both");
}

/// Whatever a changed bundle answers is the truth or an error.
fn answers_are_true(bytes: Vec<u8>) {
    let Ok(b) = Bundle::from_bytes("b", bytes) else { return };
    assert!(b.signer().is_none_or(|k| k == KEY.public()));
    let good = Bundle::from_bytes("b", SAMPLE.clone()).unwrap();
    for (r, v) in b.records().flatten() {
        assert_eq!(good.record(&r.key).unwrap(), Some(r));
        assert_eq!(*v, validity());
    }
    for n in 0..4 {
        if let Ok(Some(a)) = b.artifact(&artifact(n).recipe.key()) {
            assert_eq!(a, artifact(n));
        }
    }
    let _ = b.check(&validity().into());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::testing::mutations(3000)))]

    #[test]
    fn mutated_bundles_never_panic_and_never_lie(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = SAMPLE.clone();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        answers_are_true(bytes);
    }

    /// The indexes and the header are where the offsets are: a mutation there is repaired with a fresh root hash, so
    /// that the checks behind the hash are reached too.
    #[test]
    fn mutated_indexes_with_a_valid_root_never_panic_and_never_lie(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = SAMPLE.clone();
        let index = Header::decode(bytes.first_chunk().unwrap()).records.0 as usize;
        let places: Vec<usize> = (16..104).chain(index..bytes.len()).collect();
        for (at, byte) in edits {
            bytes[places[at.index(places.len())]] = byte;
        }
        let header = Header::decode(bytes.first_chunk().unwrap());
        let start = usize::try_from(header.records.0).unwrap_or(usize::MAX).min(bytes.len());
        let fixed = header.encode(&bytes[start..]);
        bytes[..HEADER].copy_from_slice(&fixed);
        answers_are_true(bytes);
    }

    /// Whoever holds no key cannot make a signature, whatever else is made to fit.
    #[test]
    fn mutated_signed_bundles_are_never_taken_for_signed_ones(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        fix_root in any::<bool>(),
    ) {
        let mut bytes = SIGNED.clone();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if fix_root {
            let header = Header::decode(bytes.first_chunk().unwrap());
            let start = usize::try_from(header.records.0).unwrap_or(usize::MAX).min(SAMPLE.len());
            let fixed = header.encode(&bytes[start..SAMPLE.len()]);
            bytes[..HEADER].copy_from_slice(&fixed);
        }
        if let Ok(b) = Bundle::from_bytes("b", bytes.clone()) {
            prop_assert_eq!(b.root(), Bundle::from_bytes("b", SIGNED.clone()).unwrap().root());
        }
        answers_are_true(bytes);
    }

    /// Blocks, or index entries, in each other's places.
    #[test]
    fn bundles_whose_parts_are_swapped_never_panic_and_never_lie(
        one in any::<prop::sample::Index>(),
        other in any::<prop::sample::Index>(),
        length in 1usize..400,
        entries in any::<bool>(),
        fix_root in any::<bool>(),
    ) {
        let mut bytes = SIGNED.clone();
        let header = Header::decode(SAMPLE.first_chunk().unwrap());
        let index = header.records.0 as usize;
        let (from, step, length) = if entries { (index, ENTRY, ENTRY) } else { (0, 1, length) };
        let places = (bytes.len() - from) / step;
        let mut at = [one, other].map(|i| from + step * i.index(places));
        at.sort_unstable();
        let length = length.min(at[1] - at[0]).min(bytes.len() - at[1]);
        let (low, high) = bytes.split_at_mut(at[1]);
        low[at[0]..at[0] + length].swap_with_slice(&mut high[..length]);
        if fix_root {
            // Without the signature, which would not fit.
            bytes.truncate(SAMPLE.len());
            let fixed = header.encode(&bytes[index..]);
            bytes[..HEADER].copy_from_slice(&fixed);
        }
        answers_are_true(bytes);
    }

    #[test]
    fn truncated_and_extended_bundles_never_panic_and_never_lie(
        cut in any::<prop::sample::Index>(), extra in 0usize..9,
    ) {
        let mut bytes = SIGNED.clone();
        bytes.truncate(cut.index(bytes.len() + 1));
        bytes.extend(std::iter::repeat_n(0, extra));
        answers_are_true(bytes);
    }
}

/// A bundle with its root made to fit.
fn rooted(mut bytes: Vec<u8>) -> Vec<u8> {
    let header = Header::decode(bytes.first_chunk().unwrap());
    let fixed = header.encode(&bytes[header.records.0 as usize..]);
    bytes[..HEADER].copy_from_slice(&fixed);
    bytes
}

#[test]
fn an_entry_of_a_newer_build_is_refused_alone_and_said_to_be_so() {
    // One field of one record has a name that nobody knows here.
    let mut bytes = sample();
    let header = Header::decode(bytes.first_chunk().unwrap());
    let first = header.records.0 as usize;
    let entry = Entry::decode(&bytes[first..]);
    let blob = entry.offset as usize..(entry.offset + entry.length) as usize;
    let name = bytes[blob.clone()].windows(9).position(|w| w == b"unroll_kv").unwrap();
    bytes[blob.start + name + 8] = b'w';
    let hash = *blake3::hash(&bytes[blob]).as_bytes();
    bytes[first + 48..first + 80].copy_from_slice(&hash);
    let b = Bundle::from_bytes("b", rooted(bytes)).unwrap();
    let refused: Vec<Error> = b.records().filter_map(Result::err).collect();
    assert!(matches!(&refused[..], [Error::Foreign { .. }]), "{refused:?}");
    let e = refused[0].to_string();
    assert!(e.contains("unroll_kw") && e.contains("newer"), "{e}");
    assert_eq!(b.records().filter(Result::is_ok).count(), 3);
    assert!(b.check(&validity().into()).is_ok());

    // All of them are of an arch that is not known yet.
    let mut bytes = sample();
    let at = bytes.windows(10).position(|w| w == b"\"cpu-avx2\"").unwrap();
    bytes[at + 8] = b'9';
    let (offset, length) = header.manifest;
    let hash = *blake3::hash(&bytes[offset as usize..(offset + length) as usize]).as_bytes();
    bytes[72..104].copy_from_slice(&hash);
    let b = Bundle::from_bytes("b", rooted(bytes)).unwrap();
    assert_eq!((b.record_count(), b.records().filter(|r| matches!(r, Err(Error::Foreign { .. }))).count()), (4, 4));
    assert!(matches!(b.artifact(&artifact(1).recipe.key()), Err(Error::Foreign { .. })));
    assert!(matches!(b.check(&validity().into()), Err(Error::Foreign { .. })));
}

#[test]
fn headers_and_entries_may_grow() {
    let (old, more) = (sample(), 8);
    let mut header = Header::decode(old.first_chunk().unwrap());
    let index = header.records.0 as usize;
    let mut wide = Vec::new();
    for entry in old[index..].chunks_exact(ENTRY) {
        let entry = Entry::decode(entry);
        wide.extend_from_slice(&Entry { offset: entry.offset + more, ..entry }.encode());
        wide.extend_from_slice(b"more of it");
    }
    header.manifest.0 += more;
    header.records.0 += more;
    header.artifacts.0 = header.records.0 + header.records.1 * (ENTRY as u64 + 10);
    header.total = header.records.0 + wide.len() as u64;
    let mut bytes = header.encode(&[]).to_vec();
    bytes.extend_from_slice(&[7; 8]);
    bytes[12..14].copy_from_slice(&(HEADER as u16 + 8).to_le_bytes());
    bytes[14..16].copy_from_slice(&(ENTRY as u16 + 10).to_le_bytes());
    let root = root_hash(&bytes, &wide);
    bytes[104..136].copy_from_slice(&root);
    bytes.extend_from_slice(&old[HEADER..index]);
    bytes.extend_from_slice(&wide);
    let b = Bundle::from_bytes("b", bytes.clone()).unwrap();
    assert_eq!(b.records().filter(Result::is_ok).count(), 4);
    assert_eq!(b.artifact(&artifact(2).recipe.key()).unwrap(), Some(artifact(2)));
    // What was added is part of what is hashed, and signed.
    bytes[140] ^= 1;
    assert!(matches!(Bundle::from_bytes("b", bytes), Err(Error::Damaged { .. })));
}
