//! The numeric contract on the cpu, through the engine, against the fp64 oracle.

use crate::common::Place;
use flashtune::{DType, DeviceSpec, Distribution, Engine, HostForward, HostOutput, HostTensor, Layout, Mask, Shape};
use flashtune_runtime::reference::{all_rows, compare, oracle, unfused_rows};
use std::sync::LazyLock;

/// One engine for all tests of this file: its compiled kernels are shared.
static ENGINE: LazyLock<(Place, Engine)> = LazyLock::new(|| {
    let place = Place::new();
    let engine = Engine::builder().device(DeviceSpec::Cpu).cache_dir(place.cache()).build().expect("the cpu device");
    (place, engine)
});

/// One call: sizes, dtype, layout, values.
#[derive(Debug, Clone, Copy)]
struct Call {
    dtype: DType,
    /// Batch, heads, KV heads, rows of Q, rows of K and V.
    sizes: [usize; 5],
    dims: (usize, usize),
    mask: Mask,
    layout: Layout,
    values: Distribution,
    scale: Option<f32>,
}

impl Default for Call {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            sizes: [1, 2, 2, 16, 16],
            dims: (64, 64),
            mask: Mask::Full,
            layout: Layout::Bhsd,
            values: Distribution::Normal,
            scale: None,
        }
    }
}

impl Call {
    fn inputs(&self) -> [HostTensor; 3] {
        let [b, h, kh, q, kv] = self.sizes;
        let (dqk, dv) = self.dims;
        let tensor = |shape, seed| HostTensor::random(self.dtype, shape, self.layout, seed, self.values);
        [tensor([b, h, q, dqk], 1), tensor([b, kh, kv, dqk], 2), tensor([b, kh, kv, dv], 3)]
    }

    fn run(&self, [q, k, v]: &[HostTensor; 3]) -> HostOutput {
        ENGINE
            .1
            .forward_host_call(&HostForward {
                layout: self.layout,
                mask: self.mask,
                scale: self.scale,
                ..HostForward::new(q, k, v)
            })
            .unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }

    /// Runs and compares every row of O and LSE with the oracle.
    #[track_caller]
    fn holds_with(&self, inputs: &[HostTensor; 3]) -> HostOutput {
        let out = self.run(inputs);
        let [b, h, kh, q_len, kv_len] = self.sizes.map(|n| n as u32);
        let shape = Shape { batch: b, heads: h, kv_heads: kh, q_len, kv_len, mask: self.mask };
        let scale = self.scale.unwrap_or(1.0 / (self.dims.0 as f32).sqrt());
        let [q, k, v] = inputs;
        let rows = all_rows(&shape);
        let expected = oracle(q, k, v, self.mask, scale, &rows);
        let unfused = unfused_rows(q, k, v, self.mask, scale, &rows);
        let verdict = compare(&out.o, Some(&out.lse), &expected, &unfused);
        assert!(verdict.passed(), "{self:?}: {verdict}");
        assert_eq!(verdict.rows, (b * h * q_len) as usize);
        out
    }

    #[track_caller]
    fn holds(&self) -> HostOutput {
        self.holds_with(&self.inputs())
    }
}

const WINDOW: Mask = Mask::Window { left: Some(17), right: Some(5) };

#[test]
fn odd_lengths() {
    for dtype in DType::ALL {
        for mask in [Mask::Full, Mask::Causal] {
            for len in [1, 7, 63, 129] {
                Call { dtype, mask, sizes: [2, 2, 2, len, len], ..Call::default() }.holds();
            }
        }
        Call { dtype, mask: Mask::Causal, sizes: [1, 2, 2, 1000, 1000], ..Call::default() }.holds();
    }
}

#[test]
fn query_and_key_lengths_that_differ_both_ways() {
    for (q, kv) in [(1, 1000), (7, 129), (129, 7), (63, 64), (200, 129)] {
        for mask in [Mask::Full, Mask::Causal, WINDOW] {
            Call { mask, sizes: [1, 2, 2, q, kv], ..Call::default() }.holds();
        }
        Call { dtype: DType::Bf16, mask: Mask::Causal, sizes: [1, 2, 2, q, kv], ..Call::default() }.holds();
    }
}

#[test]
fn grouped_kv_heads() {
    for (heads, kv_heads) in [(8, 8), (8, 2), (6, 1), (3, 3)] {
        for dtype in [DType::F32, DType::F16] {
            Call { dtype, mask: Mask::Causal, sizes: [2, heads, kv_heads, 33, 70], ..Call::default() }.holds();
        }
    }
}

#[test]
fn head_dims_that_are_no_powers_of_two_and_differ() {
    for dims in [(16, 16), (24, 24), (40, 72), (72, 40), (136, 136), (192, 128), (256, 256)] {
        for dtype in [DType::F32, DType::Bf16] {
            Call { dtype, dims, mask: Mask::Causal, sizes: [1, 2, 1, 40, 65], ..Call::default() }.holds();
        }
    }
}

#[test]
fn windows_of_every_reach() {
    let windows = [(Some(0), Some(0)), (Some(17), Some(5)), (Some(3), None), (None, Some(40)), (Some(9000), Some(0))];
    for (left, right) in windows.into_iter().chain([(Some(u32::MAX), Some(u32::MAX)), (None, None)]) {
        let mask = Mask::Window { left, right };
        Call { mask, sizes: [1, 2, 2, 130, 130], ..Call::default() }.holds();
        Call { mask, dtype: DType::F16, sizes: [1, 2, 2, 50, 130], ..Call::default() }.holds();
    }
}

#[test]
fn rows_without_a_key_give_zero_and_minus_infinity() {
    let call = Call { mask: Mask::Causal, sizes: [1, 2, 2, 20, 5], ..Call::default() };
    let out = call.holds();
    for head in 0..2 {
        for row in 0..15 {
            assert_eq!(out.lse[head * 20 + row], f32::NEG_INFINITY, "head {head}, row {row}");
            assert!((0..64).all(|d| out.o.get([0, head, row, d]) == 0.0), "head {head}, row {row}");
        }
        assert!(out.lse[head * 20 + 15].is_finite());
    }
    // No key at all.
    let out = Call { sizes: [2, 2, 2, 3, 0], ..Call::default() }.holds();
    assert!(out.lse.iter().all(|x| *x == f32::NEG_INFINITY) && out.o.values().iter().all(|x| *x == 0.0));
}

#[test]
fn sizes_of_zero_compute_nothing_and_fail_nothing() {
    for sizes in [[0, 2, 2, 8, 8], [2, 0, 0, 8, 8], [1, 2, 2, 0, 8], [1, 2, 2, 0, 0]] {
        let out = Call { sizes, ..Call::default() }.holds();
        assert!(out.o.values().is_empty() && out.lse.is_empty(), "{sizes:?}");
        assert!(out.plan.is_none(), "no kernel is chosen where none runs");
    }
}

#[test]
fn nan_and_inf_in_masked_rows_do_not_leak() {
    for dtype in DType::ALL {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            // Keys 40 and later are after every query's position; keys before 10 are out of every window's reach.
            let call = Call {
                dtype,
                mask: Mask::Window { left: Some(6), right: Some(2) },
                sizes: [1, 2, 2, 20, 60],
                ..Call::default()
            };
            let [q, mut k, mut v] = call.inputs();
            let clean = call.run(&[q.clone(), k.clone(), v.clone()]);
            for i in 0..20 {
                let live = call.mask.live(i, 20, 60);
                assert!(live.start >= 10, "the poisoned rows are out of reach");
            }
            for head in 0..2 {
                for row in 0..10 {
                    k.write_row([0, head, row], &[bad; 64]);
                    v.write_row([0, head, row], &[bad; 64]);
                }
            }
            let inputs = [q, k, v];
            let out = call.holds_with(&inputs);
            assert_eq!(out.o.bytes(), clean.o.bytes(), "{dtype} {bad}: not one bit differs");
            assert_eq!(out.lse, clean.lse);
        }
    }
}

#[test]
fn a_key_that_only_later_queries_see_does_not_reach_earlier_ones() {
    for dtype in DType::ALL {
        let call = Call { dtype, mask: Mask::Causal, sizes: [1, 1, 1, 70, 70], ..Call::default() };
        let [q, mut k, mut v] = call.inputs();
        let clean = call.run(&[q.clone(), k.clone(), v.clone()]);
        k.write_row([0, 0, 50], &[f32::NAN; 64]);
        v.write_row([0, 0, 50], &[f32::INFINITY; 64]);
        let out = call.run(&[q, k, v]);
        for row in 0..70 {
            for d in 0..64 {
                let (x, y) = (out.o.get([0, 0, row, d]), clean.o.get([0, 0, row, d]));
                assert!(if row < 50 { x == y } else { !x.is_finite() }, "{dtype} row {row}: {x} {y}");
            }
        }
    }
}

#[test]
fn strided_layouts_give_what_contiguous_ones_give() {
    for dtype in DType::ALL {
        let plain = Call { dtype, mask: Mask::Causal, sizes: [2, 4, 2, 37, 41], dims: (64, 40), ..Call::default() };
        let values = plain.inputs().map(|t| (t.shape(), t.values()));
        let reference = plain.holds();
        for layout in [Layout::Bshd, Layout::Padded] {
            let call = Call { layout, ..plain };
            let inputs = values.clone().map(|(shape, x)| HostTensor::from_values(dtype, shape, layout, &x).unwrap());
            let out = call.holds_with(&inputs);
            assert_eq!(out.o.values(), reference.o.values(), "{dtype} {layout:?}");
            assert_eq!(out.lse, reference.lse);
        }
    }
}

#[test]
fn activations_with_outlier_channels() {
    // A few channels with an offset and a spread 20 to 100 times that of the others, as real models have them: the
    // scores are large, and the softmax is nearly one-hot.
    for dtype in DType::ALL {
        for mask in [Mask::Full, Mask::Causal] {
            let values = Distribution::NormalWithOutliers;
            Call { dtype, mask, values, sizes: [1, 4, 2, 150, 150], dims: (128, 128), ..Call::default() }.holds();
        }
    }
}

#[test]
fn scales_other_than_the_default() {
    for scale in [0.0, 1.0, -0.3, 40.0] {
        for dtype in [DType::F32, DType::Bf16] {
            Call { dtype, scale: Some(scale), mask: Mask::Causal, sizes: [1, 2, 2, 65, 65], ..Call::default() }.holds();
        }
    }
}

/// A million keys of one V: O is that V, however the weights are, and the log-sum-exp of equal scores the logarithm of
/// their number.
#[test]
fn sums_over_a_million_keys_of_one_v_keep_their_digits() {
    let kv: usize = 1_000_003;
    let (qk, value) = (2, [1.352_639, -0.733_477_1, 0.100_000_01, 1_234.567_9, -0.577_215_7]);
    let call = Call { sizes: [1, 1, 1, 3, kv], dims: (qk, value.len()), ..Call::default() };
    let k = HostTensor::random(DType::F32, [1, 1, kv, qk], Layout::Bhsd, 2, Distribution::Normal);
    let values: Vec<f32> = value.iter().copied().cycle().take(kv * value.len()).collect();
    let v = HostTensor::from_values(DType::F32, [1, 1, kv, value.len()], Layout::Bhsd, &values).unwrap();
    // Equal scores, which round alike; scores of all sizes; and scores that nearly are equal.
    for (what, q) in [("equal", [0.0, 0.0]), ("various", [1.7, -0.9]), ("small", [1e-4, 3e-4])] {
        let rows: Vec<f32> = q.into_iter().cycle().take(3 * qk).collect();
        let q = HostTensor::from_values(DType::F32, [1, 1, 3, qk], Layout::Bhsd, &rows).unwrap();
        let out = call.run(&[q, k.clone(), v.clone()]);
        for (i, o) in out.o.values().into_iter().enumerate() {
            let off = (f64::from(o) / f64::from(value[i % value.len()]) - 1.0).abs();
            assert!(off < 1e-6, "{what}, element {i}: off by {off:.2e}");
        }
        if what == "equal" {
            let off = out.lse.iter().map(|lse| (f64::from(*lse) - (kv as f64).ln()).abs()).fold(0.0, f64::max);
            assert!(off < 2e-6, "log-sum-exp: off by {off:.2e}");
        }
    }
}

#[test]
fn two_runs_give_the_same_bytes() {
    for dtype in DType::ALL {
        let call = Call { dtype, mask: Mask::Causal, sizes: [2, 4, 2, 130, 257], ..Call::default() };
        let inputs = call.inputs();
        let (one, two) = (call.run(&inputs), call.run(&inputs));
        assert_eq!(one.o.bytes(), two.o.bytes());
        assert_eq!(one.lse, two.lse);
    }
}
