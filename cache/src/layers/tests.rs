//! Order, refusals and refreshing.

use super::*;
use crate::testing::{TEMPLATES, arch, artifact, device, problem, record, schedule, shape, validity};
use crate::{BundleContents, DeviceFingerprint, Launches, SecretKey, Store, sign_bundle};
use flashtune_codegen::{Arch, CpuIsa, DType, Family, MaskKind, ShapeBucket};

fn bundle(records: Vec<Record>) -> Vec<u8> {
    let mut load = |key: &Key| (0..8).map(artifact).find(|a| a.recipe.key() == *key);
    BundleContents { records, artifacts: vec![], load: &mut load, created: 0 }.to_bytes()
}

fn trusting() -> Trust {
    Trust::default().allow_unsigned(true)
}

fn leak(bytes: Vec<u8>) -> &'static [u8] {
    Box::leak(bytes.into_boxed_slice())
}

fn wanted(len: u32) -> RecordKey {
    let bucket = ShapeBucket::of(&shape(len));
    RecordKey { device: device(), problem: problem(), bucket, launches: Launches::Eager }
}

fn find(layers: &Layers, len: u32) -> Found {
    layers.find(&validity().into(), &wanted(len))
}

#[test]
fn exact_comes_before_near_and_near_before_other_devices() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = CacheDir::at(tmp.path());
    let mut elsewhere = record(512, 3);
    elsewhere.key.device.name = "another processor".into();
    let embedded = leak(bundle(vec![elsewhere, record(512, 2), record(1024, 1), record(8192, 1)]));
    let layers = Layers::open(&dir, &[], Some(embedded)).unwrap();
    let found = find(&layers, 512);
    let lens: Vec<_> = found.matches.iter().map(|m| m.record.key.bucket.q_len).collect();
    assert_eq!(lens, [512, 1024, 8192, 512]);
    assert_eq!(found.matches[0].quality, MatchQuality::Exact);
    assert_eq!(found.matches[1].quality, MatchQuality::NearestShape { distance: 3.0 });
    assert!(matches!(found.matches[3].quality, MatchQuality::OtherDevice { .. }) && found.refusals.is_empty());
    let other = flashtune_codegen::Problem::forward(DType::F16, 64, MaskKind::FULL).unwrap();
    assert!(layers.find(&validity().into(), &RecordKey { problem: other, ..wanted(512) }).matches.is_empty());
    // Reading made nothing.
    assert!(!dir.base().exists());
}

#[test]
fn what_was_measured_for_the_other_way_of_launching_serves_and_is_told_from_an_answer() {
    let graph = |len, n| {
        let mut record = record(len, n);
        record.key.launches = Launches::Graph;
        record
    };
    let tmp = tempfile::tempdir().unwrap();
    let embedded = leak(bundle(vec![graph(512, 1), record(512, 2), graph(1024, 3), record(1024, 4), graph(2048, 5)]));
    let layers = Layers::open(&CacheDir::at(tmp.path()), &[], Some(embedded)).unwrap();
    let order = |len, launches| {
        let found = layers.find(&validity().into(), &RecordKey { launches, ..wanted(len) });
        found.matches.iter().map(|m| (m.record.schedule, m.quality)).collect::<Vec<_>>()
    };
    let (eager, for_graphs) = (order(512, Launches::Eager), order(512, Launches::Graph));
    assert_eq!(eager[..2], [(schedule(2), MatchQuality::Exact), (schedule(1), MatchQuality::OtherLaunches)]);
    assert_eq!(for_graphs[..2], [(schedule(1), MatchQuality::Exact), (schedule(2), MatchQuality::OtherLaunches)]);
    // Among neighbours that are as near, those for this way go first.
    assert_eq!((eager[2].0, for_graphs[2].0), (schedule(4), schedule(3)));
    assert_eq!(order(2048, Launches::Eager)[0], (schedule(5), MatchQuality::OtherLaunches));
}

#[test]
fn what_a_result_of_the_users_own_has_to_beat_is_what_the_layers_below_serve() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = CacheDir::at(tmp.path());
    let (store, files) = (Store::open(&dir).unwrap(), ArtifactFiles::new(&dir));
    store.put_record(&record(512, 1)).unwrap();
    files.put(&artifact(1)).unwrap();
    store.publish(&files).unwrap();
    let mut built = record(512, 5);
    built.finalists.clear();
    let named = tmp.path().join("built.ftb");
    std::fs::write(&named, bundle(vec![built])).unwrap();
    let embedded = leak(bundle(vec![record(512, 2), record(1024, 3)]));
    let layers = Layers::open_with(Some(&dir), &[named], Some(embedded), &trusting()).unwrap();
    assert_eq!(find(&layers, 512).matches[0].record.schedule, schedule(1), "the user's own goes first");
    // Not the user's own, not another size's, not what was never measured.
    assert_eq!(layers.rivals(&validity().into(), &wanted(512)), [schedule(2)]);
}

#[test]
fn records_of_another_template_set_arch_or_abi_are_refused_with_the_field() {
    let tmp = tempfile::tempdir().unwrap();
    let mut old = record(256, 1);
    old.provenance.templates = "old".into();
    let mut old2 = record(1024, 1);
    old2.provenance.templates = "old".into();
    let mut amx = record(512, 1);
    amx.key.device.arch = Arch::Cpu(CpuIsa::Amx);
    let embedded = leak(bundle(vec![old, old2, amx, record(512, 2)]));
    let layers = Layers::open(&CacheDir::at(tmp.path()), &[], Some(embedded)).unwrap();
    let found = find(&layers, 512);
    assert_eq!(found.matches.len(), 1);
    let mut refusals: Vec<_> =
        found.refusals.iter().map(|r| (r.difference.field, r.difference.found.as_str(), r.records)).collect();
    refusals.sort();
    assert_eq!(refusals, [("arch", "cpu-amx", 1), ("templates", "old", 2)]);
    assert!(found.refusals.iter().all(|r| r.layer == EMBEDDED_LAYER && r.difference.expected.len() > 3));
    let strict: Needed = Validity { abi: validity().abi + 1, ..validity() }.into();
    let found = layers.find(&strict, &wanted(512));
    assert!(found.matches.is_empty() && found.refusals.iter().any(|r| r.difference.field == "abi"));
    assert_eq!(strict.templates(Family::ForwardCpu), TEMPLATES);
    assert_eq!(strict.arch(), arch());
}

#[test]
fn the_earlier_layer_wins_among_equals_and_artifacts_come_from_any() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = CacheDir::at(tmp.path().join("cache"));
    let named = tmp.path().join("named.ftb");
    std::fs::write(&named, bundle(vec![record(512, 2)])).unwrap();
    let embedded = leak(bundle(vec![record(512, 3), record(128, 4)]));
    let files = ArtifactFiles::new(&dir);
    {
        let store = Store::open(&dir).unwrap();
        store.put_record(&record(512, 1)).unwrap();
        store.publish(&files).unwrap();
    }
    files.put(&artifact(5)).unwrap();
    let layers = Layers::open_with(Some(&dir), std::slice::from_ref(&named), Some(embedded), &trusting()).unwrap();
    let found = find(&layers, 512);
    let names: Vec<_> = found.matches[..3].iter().map(|m| m.layer.as_str()).collect();
    assert_eq!(names, [SNAPSHOT_LAYER, named.to_str().unwrap(), EMBEDDED_LAYER]);
    let layer_of = |n: u32| layers.artifact(&artifact(n).recipe.key()).map(|(_, l)| l);
    assert_eq!(layer_of(2).as_deref(), named.to_str());
    assert_eq!(layer_of(4).as_deref(), Some(EMBEDDED_LAYER));
    assert_eq!(layer_of(5).as_deref(), Some(FILES_LAYER));
    assert_eq!(layer_of(6), None);
    let info = layers.info();
    assert_eq!(info.iter().map(|i| i.records).collect::<Vec<_>>(), [1, 1, 2]);
}

#[test]
fn a_new_snapshot_is_noticed_and_a_damaged_one_leaves_the_old_in_use() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = CacheDir::at(tmp.path());
    let layers = Layers::open(&dir, &[], None).unwrap();
    assert!(find(&layers, 512).matches.is_empty() && !layers.refresh());
    let files = ArtifactFiles::new(&dir);
    let store = Store::open(&dir).unwrap();
    store.put_record(&record(512, 1)).unwrap();
    store.publish(&files).unwrap();
    assert!(layers.refresh() && !layers.refresh());
    assert_eq!(find(&layers, 512).matches.len(), 1);
    std::fs::write(tmp.path().join("bad"), b"not a bundle").unwrap();
    std::fs::rename(tmp.path().join("bad"), dir.snapshot_path()).unwrap();
    assert!(layers.refresh() && !layers.refresh());
    assert_eq!(find(&layers, 512).matches.len(), 1);
    store.put_record(&record(128, 1)).unwrap();
    store.publish(&files).unwrap();
    assert!(layers.refresh());
    assert_eq!(find(&layers, 512).matches.len(), 2);
    std::fs::remove_file(dir.snapshot_path()).unwrap();
    assert!(layers.refresh());
    assert!(find(&layers, 512).matches.is_empty());
}

#[test]
fn named_bundles_need_a_trusted_signature_and_others_do_not() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = CacheDir::at(tmp.path().join("cache"));
    let named = tmp.path().join("named.ftb");
    std::fs::write(&named, bundle(vec![record(512, 2)])).unwrap();
    let (ours, theirs) = (SecretKey::generate().unwrap(), SecretKey::generate().unwrap());
    let open = |trust: &Trust| Layers::open_with(Some(&dir), std::slice::from_ref(&named), None, trust);
    let trust = Trust::default().trust(ours.public());
    let problem = |outcome: Result<Layers>| match outcome {
        Err(crate::Error::Untrusted { problem, .. }) => problem,
        other => panic!("{other:?}"),
    };
    assert!(problem(open(&trust)).contains("not signed"));
    sign_bundle(&named, &theirs).unwrap();
    assert!(problem(open(&trust)).contains(&theirs.public().to_string()));
    assert!(open(&trusting()).is_ok());
    sign_bundle(&named, &ours).unwrap();
    assert_eq!(open(&trust).unwrap().info()[0].signer, Some(ours.public()));
    assert!(problem(open(&Trust::default())).contains("not trusted"));
    // What is part of the program is as trustworthy as the program.
    assert!(Layers::open(&dir, &[], Some(leak(bundle(vec![record(512, 2)])))).is_ok());
}

#[test]
fn a_folder_that_others_may_write_to_is_not_read() {
    use std::os::unix::fs::PermissionsExt;
    let tmp = tempfile::tempdir().unwrap();
    let dir = CacheDir::at(tmp.path());
    dir.create().unwrap();
    std::fs::write(dir.snapshot_path(), bundle(vec![record(512, 1)])).unwrap();
    ArtifactFiles::new(&dir).put(&artifact(5)).unwrap();
    let found = |layers: &Layers| {
        (find(layers, 512).matches.len(), layers.artifact(&artifact(5).recipe.key()).is_some(), layers.own().is_some())
    };
    assert_eq!(found(&Layers::open(&dir, &[], None).unwrap()), (1, true, true));
    std::fs::set_permissions(dir.base(), std::fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(found(&Layers::open(&dir, &[], None).unwrap()), (0, false, false));
    assert_eq!(found(&Layers::open_with(Some(&dir), &[], None, &trusting()).unwrap()), (1, true, true));
}

#[test]
fn bundles_serve_without_a_folder() {
    let tmp = tempfile::tempdir().unwrap();
    let named = tmp.path().join("named.ftb");
    std::fs::write(&named, bundle(vec![record(512, 2)])).unwrap();
    let layers = Layers::open_with(None, &[named], None, &trusting()).unwrap();
    assert_eq!(find(&layers, 512).matches.len(), 1);
    assert!(
        layers.artifact(&artifact(2).recipe.key()).is_some() && layers.artifact(&artifact(3).recipe.key()).is_none()
    );
    assert!(!layers.refresh());
}

#[test]
fn a_damaged_snapshot_is_an_empty_layer_but_a_damaged_named_bundle_is_an_error() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = CacheDir::at(tmp.path());
    dir.create().unwrap();
    std::fs::write(dir.snapshot_path(), b"garbage").unwrap();
    let layers = Layers::open(&dir, &[], None).unwrap();
    assert!(layers.info().is_empty());
    assert!(Layers::open(&dir, &[dir.snapshot_path()], None).is_err());
    assert!(Layers::open(&dir, &[tmp.path().join("absent.ftb")], None).is_err());
}

#[test]
fn of_twelve_kinds_of_devices_each_is_served_by_its_own_and_refused_the_others_by_name() {
    let sm = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a"].map(|s| s.parse::<Arch>().unwrap());
    let all: Vec<Arch> = CpuIsa::ALL.map(Arch::Cpu).into_iter().chain(sm).collect();
    assert_eq!(all.len(), 12);
    let of = |arch: Arch| {
        let mut record = record(512, 1);
        record.key.device = DeviceFingerprint { arch, name: format!("a device of {arch}"), ..device() };
        record
    };
    let tmp = tempfile::tempdir().unwrap();
    let embedded = leak(bundle(all.iter().map(|arch| of(*arch)).collect()));
    let together = Layers::open(&CacheDir::at(tmp.path()), &[], Some(embedded)).unwrap();
    for here in &all {
        let needed = Validity { arch: *here, ..validity() }.into();
        let found = together.find(&needed, &of(*here).key);
        assert!(matches!(&found.matches[..], [one] if one.record.key.device.arch == *here), "{here}");
        // The others are named, each once, with what was found and what is needed.
        let mut refused: Vec<_> = found.refusals.iter().map(|r| r.difference.found.clone()).collect();
        let mut others: Vec<_> = all.iter().filter(|a| *a != here).map(Arch::to_string).collect();
        refused.sort();
        others.sort();
        assert_eq!(refused, others, "{here}");
        let (wanted, records) = (here.to_string(), |r: &RecordRefusal| (r.difference.field, r.records));
        assert!(found.refusals.iter().all(|r| r.difference.expected == wanted && records(r) == ("arch", 1)), "{here}");
        // The same arch with another name, size or driver is no refusal and no exact answer.
        let other = DeviceFingerprint { units: 99, driver: "7.0".into(), ..of(*here).key.device };
        let found = together.find(&needed, &RecordKey { device: other, ..of(*here).key });
        assert!(matches!(found.matches[0].quality, MatchQuality::OtherDevice { .. }) && found.matches.len() == 1);
        // A file of one device, on each of the others.
        let contents = BundleContents { records: vec![of(*here)], artifacts: vec![], load: &mut |_| None, created: 0 };
        let alone = Bundle::from_bytes("one", contents.to_bytes()).unwrap();
        for there in &all {
            let checked = alone.check(&Validity { arch: *there, ..validity() }.into());
            match checked {
                Ok(()) => assert_eq!(here, there),
                Err(crate::Error::Mismatch { field, found, expected, .. }) => {
                    assert_eq!((field, found, expected), ("arch", here.to_string(), there.to_string()));
                }
                Err(e) => panic!("{here} on {there}: {e}"),
            }
        }
    }
}
