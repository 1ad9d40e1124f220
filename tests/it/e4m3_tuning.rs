//! Schedules of e4m3 are tuned: on the CPU, whose kernel is that of the tests, with an O of every dtype.

use crate::common::{Place, alone};

#[test]
fn e4m3_is_tuned_with_every_output() {
    let (place, _alone) = (Place::new(), alone());
    // More rows than a part of the grid has, which begins in the middle of O.
    let of = "--dtype e4m3 --head-dim 32 --mask causal --batch 1 --heads 2 --kv-heads 1 --q-len 256 --budget-s 10";
    for output in ["f16", "bf16", "f32", "e4m3"] {
        let args = [&of.split(' ').collect::<Vec<_>>()[..], &["--o-dtype", output]].concat();
        let report = place.tune(&args);
        let tuned = report["tuned"].as_array().unwrap();
        assert_eq!(tuned.len(), 1, "{output}: {report}");
        assert!(!tuned[0]["schedule"].is_null(), "{output}: {report}");
    }
}
