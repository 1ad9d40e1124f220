//! Calls of a kernel on the emulated machine, and what they must give.

use crate::machine::{Buffer, Emulated, Hopper, Launch};
use crate::side::{Side, side_data};
use flashtune::{DType, Distribution, HostTensor, Layout, Mask, Shape};
use flashtune_codegen::abi::ArgsLayout;
use flashtune_codegen::score::SideData;
use flashtune_codegen::{Kernel, StageRole};
use flashtune_runtime::check::{drawn_dropout, dropout_mask, residual_fails};
use flashtune_runtime::reference::{Attention, RowId, Rows, all_rows, compare, e4m3, oracle_of, unfused_rows_in};
use flashtune_runtime::{Descales, ForwardTensors, TensorView, forward_call};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// One call.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Batch, heads, KV heads, rows of Q, rows of K and V.
    pub sizes: [usize; 5],
    pub mask: Mask,
    pub layout: Layout,
    pub values: Distribution,
    pub scale: Option<f32>,
    pub lse: bool,
    /// NaN and infinities in this many rows or elements of K, elements of V and rows of Q.
    pub bad: [usize; 3],
    /// What the first column of Q is, less noise, and that of K is the negative of: without a scale, all scores are
    /// below zero by the square of it over the root of the head dim.
    pub below: f32,
    pub seed: u64,
}

/// Inputs of a case and what is expected of it.
pub struct Expected {
    case: Case,
    inputs: [HostTensor; 3],
    /// Of e4m3 operands; else none.
    scales: Vec<e4m3::Scales>,
    data: SideData,
    rows: Rows,
    unfused: Rows,
}

/// Lengths at and around what tiles and matrix instructions divide.
const LENGTHS: [usize; 16] = [1, 2, 7, 16, 33, 63, 64, 65, 100, 127, 128, 129, 192, 200, 256, 300];

impl Case {
    /// A case for a kernel of this problem. Sizes are small, but for a few that cross several tiles.
    pub fn random(kernel: &Kernel, rng: &mut StdRng) -> Self {
        let lengths = |rng: &mut StdRng| match rng.random_range(0..12) {
            0 => rng.random_range(1..=500),
            _ => *LENGTHS.choose(rng).expect("not empty"),
        };
        let q_len = lengths(rng);
        let kv_len = match rng.random_range(0..10) {
            0..5 => q_len,
            5 => 0,
            6 => lengths(rng) * 3,
            _ => lengths(rng),
        };
        let kv_heads = rng.random_range(1..=2);
        let group = *[1, 1, 2, 3, 4, 8].choose(rng).expect("not empty");
        let reach = |rng: &mut StdRng| *[0, 1, 5, 31, 64, 100, 200, 1000, u32::MAX].choose(rng).expect("not empty");
        let kind = kernel.problem.mask;
        let mask = match (kind.left, kind.right) {
            (false, false) => Mask::Full,
            (false, true) if rng.random_bool(0.6) => Mask::Causal,
            (left, right) => Mask::Window { left: left.then(|| reach(rng)), right: right.then(|| reach(rng)) },
        };
        let few = |rng: &mut StdRng, most: usize| if rng.random_bool(0.7) { 0 } else { rng.random_range(1..=most) };
        let scale = *[None, None, None, Some(-0.2), Some(0.0), Some(1.0)].choose(rng).expect("not empty");
        Self {
            sizes: [rng.random_range(1..=2), kv_heads * group, kv_heads, q_len, kv_len],
            mask,
            layout: *Layout::ALL.choose(rng).expect("not empty"),
            values: *[Distribution::Normal, Distribution::NormalWithOutliers, Distribution::Uniform]
                .choose(rng)
                .expect("not empty"),
            scale,
            lse: rng.random_bool(0.7),
            // A scale of zero takes Q for zeros; under a negative one, infinite rows of Q and K give scores of -inf,
            // which count as nothing to attend to.
            bad: [few(rng, 2), few(rng, 6), if scale.is_some_and(|s| s <= 0.0) { 0 } else { few(rng, 1) }],
            below: *[0.0, 0.0, 0.0, 0.0, 5.0, 12.0, 40.0].choose(rng).expect("not empty"),
            seed: rng.random(),
        }
    }

    pub fn expected(self, kernel: &Kernel) -> Expected {
        let p = kernel.problem;
        let [b, h, kh, q_len, kv_len] = self.sizes;
        let (dqk, dv) = (p.head_dim_qk as usize, p.head_dim_v as usize);
        let tensor = |shape, n| HostTensor::random(p.dtype, shape, self.layout, self.seed + n, self.values);
        let mut inputs =
            [tensor([b, h, q_len, dqk], 1), tensor([b, kh, kv_len, dqk], 2), tensor([b, kh, kv_len, dv], 3)];
        for (i, sign) in [(0, 1.0), (1, -1.0)] {
            let [b, h, s, d] = inputs[i].shape();
            let mut row = vec![0.0; d];
            for at in (0..if self.below > 0.0 { b * h * s } else { 0 }).map(|n| [n / s / h, n / s % h, n % s]) {
                inputs[i].read_row(at, &mut row);
                inputs[i].set([at[0], at[1], at[2], 0], sign * self.below + row[0] / 16.0);
            }
        }
        let mut rng = StdRng::seed_from_u64(self.seed);
        // An infinite element of K gives scores of inf and -inf. A row that saw nothing but scores of -inf would have
        // no weights by the oracle; kernels take it for a row without keys.
        let (shape, most) = (self.shape(), self.bad[0] as u64);
        let live = |i: u64| self.mask.live(i, q_len as u64, kv_len as u64);
        let elements = (0..q_len as u64).map(live).all(|l| l.is_empty() || l.end - l.start > most);
        for (i, count) in [(1, self.bad[0]), (2, self.bad[1]), (0, self.bad[2])] {
            let [b, h, s, d] = inputs[i].shape();
            for _ in 0..if s == 0 { 0 } else { count } {
                let bad = *[f32::NAN, f32::INFINITY, f32::NEG_INFINITY].choose(&mut rng).expect("not empty");
                let at = [rng.random_range(0..b), rng.random_range(0..h), rng.random_range(0..s)];
                match i {
                    2 => inputs[i].set([at[0], at[1], at[2], rng.random_range(0..d)], bad),
                    1 if elements && rng.random_bool(0.5) => {
                        inputs[i].set([at[0], at[1], at[2], rng.random_range(0..d)], bad)
                    }
                    // Rows of Q and K that are -inf and inf from end to end would give such scores, too.
                    _ => inputs[i].write_row(at, &vec![if bad.is_nan() { bad } else { f32::INFINITY }; d]),
                }
            }
        }
        let ids: Vec<RowId> = all_rows(&shape);
        let scale = self.scale.unwrap_or(p.default_scale());
        let [q, k, v] = &inputs;
        let data = p.program.map_or(SideData::default(), |program| side_data(&program, &shape, self.seed));
        let program = p.program.as_deref().map(|program| (program, &data));
        let dropout = dropout_mask(&p, self.seed);
        let attention = Attention { mask: self.mask, scale, program, sequence: 0, dropout };
        let mut scales = Vec::new();
        let (rows, unfused) = if p.dtype == DType::E4m3 {
            let units = [p.scales.q, p.scales.k, p.scales.v];
            let of = |i: usize| e4m3::Scales::random(units[i], inputs[i].shape(), kh, &mut rng);
            scales = (0..3).map(of).collect();
            // That of O is one of V, too.
            let of_o = if p.output_dtype() == DType::E4m3 { 2f32.powf(rng.random_range(2.0..8.0)) } else { 1.0 };
            let mut of_v = scales[2].clone();
            of_v.values.iter_mut().for_each(|scale| *scale *= of_o);
            let of = [&scales[0], &scales[1], &of_v];
            let [q, k, v] = [0, 1, 2].map(|i| e4m3::dequantised(&inputs[i], of[i], kh));
            scales.push(e4m3::Scales::of_heads(&[of_o], 1));
            let rows = oracle_of(&q, &k, &v, &attention, &ids);
            let emulated = e4m3::emulated([&q, &k, &v], &attention, p.output_dtype(), &rows);
            (rows, emulated)
        } else {
            let mut rows = oracle_of(q, k, v, &attention, &ids);
            let unfused = unfused_rows_in(p.precision, [q, k, v], &attention, &mut rows);
            (rows, unfused)
        };
        Expected { case: self, inputs, scales, data, rows, unfused }
    }

    pub fn shape(&self) -> Shape {
        let [batch, heads, kv_heads, q_len, kv_len] = self.sizes.map(|n| n as u32);
        Shape { batch, heads, kv_heads, q_len, kv_len, mask: self.mask }
    }
}

/// Where buffer `i` of `bytes` lies: it ends where readable memory ends.
pub fn address(i: u64, bytes: usize) -> u64 {
    const PAGE: u64 = 4096;
    0x2000_0000_0000 + (i << 36) + (bytes as u64).next_multiple_of(PAGE) - bytes as u64
}

impl Expected {
    /// Runs the case under the machine's random schedule of this seed. `units` is the number of multiprocessors.
    pub fn run(&self, kernel: &Kernel, emulated: &mut Emulated, seed: u64, units: u32) -> Result<HostTensor, String> {
        self.run_by(kernel, emulated, seed, units, &mut None)
    }

    /// The same by what another run has found of the mask; what this one finds is left there if nothing is.
    pub fn run_by(
        &self,
        kernel: &Kernel,
        emulated: &mut Emulated,
        seed: u64,
        units: u32,
        findings: &mut Option<Vec<u8>>,
    ) -> Result<HostTensor, String> {
        let case = &self.case;
        let shape = case.shape();
        let dtype = kernel.problem.output_dtype();
        let [q, k, v] = &self.inputs;
        let [b, h, _, q_len, _] = case.sizes;
        let mut o = HostTensor::poisoned(dtype, [b, h, q_len, kernel.problem.head_dim_v as usize], case.layout);
        let mut lse = vec![0xffu8; b * h * q_len * 4];
        let view = |i: u64, t: &HostTensor| t.view_at(address(i, t.bytes().len()));
        let lse_rows = [b as u64, h as u64, q_len as u64];
        let tensors = ForwardTensors {
            q: view(0, q),
            k: view(1, k),
            v: view(2, v),
            o: view(3, &o),
            lse: case.lse.then(|| TensorView::rows(address(4, lse.len()), lse_rows)),
        };
        let mut call = forward_call(&tensors, case.mask, case.scale).map_err(|e| e.to_string())?;
        let quantised = kernel.problem.dtype == DType::E4m3;
        // What a program reads lies behind the scales.
        let behind = if quantised { 9 } else { 5 };
        if quantised {
            let view = |i: usize| {
                let scales = &self.scales[i];
                Some(scales.at(address(5 + i as u64, scales.values.len() * 4)))
            };
            let descales = Descales { q: view(0), k: view(1), v: view(2) };
            call = call.with_descales(&descales).map_err(|e| e.to_string())?;
            if dtype == DType::E4m3 {
                call = call.with_output_scale(address(8, 4)).map_err(|e| e.to_string())?;
            }
        }
        if let Some(why) = flashtune_codegen::unaddressable(&call.args) {
            return Err(why);
        }
        let mut side = Side::default();
        if let Some(program) = kernel.problem.program {
            side = Side::new(&program, &shape, &self.data, behind)?;
        }
        // Behind all that is found of a mask, which lies behind what a program reads.
        let mut lost = HostTensor::poisoned(DType::Bf16, o.shape(), Layout::Bshd);
        if kernel.problem.residual {
            call = call.with_residual(&view(20, &lost)).map_err(|e| e.to_string())?;
        }
        let mut state = Vec::new();
        if let Some((dropout, on_device)) = drawn_dropout(&kernel.problem, case.seed) {
            let mut dropout = dropout;
            if let Some(words) = on_device {
                state = bytemuck::bytes_of(&words).to_vec();
                (dropout.seed_at, dropout.offset_at) = (address(21, 16), address(21, 16) + 8);
            }
            call = call.with_dropout(&dropout).map_err(|e| e.to_string())?;
        }
        let plan = kernel.plan(&shape).map_err(|e| e.to_string())?;
        let main = *plan.main().ok_or("nothing to launch")?;
        let hopper = plan.tiling.map(|tiling| {
            let maps = kernel.tensor_maps(&tiling, &call.args).ok_or("no tensor maps")?;
            let biases = kernel.bias_maps(&call.args, &side.arguments);
            Ok::<_, &str>(Hopper { maps, biases, tiling, queue: (seed % 3) as i32 - 1 })
        });
        // Behind all tensors; what is in it before is nothing to rely on.
        let metadata = plan.mask_metadata();
        let (given, bytes) = (findings.take(), metadata.map_or(0, |(bytes, ..)| bytes as usize));
        let before = plan.stages().filter(|s| s.entry.role == StageRole::MaskMetadata);
        let mut grids = [0; 2];
        before.zip(&mut grids).for_each(|(stage, grid)| *grid = if given.is_none() { stage.grid } else { 0 });
        let mut found = given.unwrap_or_else(|| vec![0xffu8; bytes]);
        if found.len() != bytes {
            return Err(format!("{} bytes were found, the kernel takes {bytes}", found.len()));
        }
        let at = address(behind + side.tensors.len() as u64, found.len());
        // Where masks take too much memory, the kernel evaluates them.
        let masks = metadata.and_then(|(_, _, masks)| masks);
        let masks = masks.filter(|_| !seed.is_multiple_of(4)).map(|offset| at + offset);
        let launch = Launch {
            seed,
            stage: 0,
            prelude: (grids, [at, masks.unwrap_or(0)]),
            grid: main.blocks(units),
            threads: main.threads,
            smem_bytes: main.smem_bytes,
            args: bytemuck::bytes_of(&call.args)[..ArgsLayout::of(kernel).forward as usize].to_vec(),
            any_order: false,
            late: false,
            hopper: hopper.transpose()?,
            side: side.table,
        };
        let mut inputs = self.inputs.clone();
        let mut scales: Vec<Vec<u8>> = self.scales.iter().map(|s| bytemuck::cast_slice(&s.values).to_vec()).collect();
        let [q, k, v] = &mut inputs;
        let mut buffers = [
            (q.bytes_mut(), false),
            (k.bytes_mut(), false),
            (v.bytes_mut(), false),
            (o.bytes_mut(), true),
            (&mut lse[..], true),
        ]
        .into_iter()
        .chain(scales.iter_mut().map(|bytes| (&mut bytes[..], false)))
        .chain(side.tensors.iter_mut().map(|bytes| (&mut bytes[..], false)))
        .chain([(&mut found[..], true)])
        .enumerate()
        .map(|(i, (bytes, written))| Buffer { address: address(i as u64, bytes.len()), bytes, written })
        .collect::<Vec<_>>();
        if kernel.problem.residual {
            let bytes = lost.bytes_mut();
            buffers.push(Buffer { address: address(20, bytes.len()), bytes, written: true });
        }
        if !state.is_empty() {
            buffers.push(Buffer { address: address(21, state.len()), bytes: &mut state, written: false });
        }
        emulated.run(&launch, &mut buffers)?;
        *findings = Some(found);

        let lse: Vec<f32> = lse.as_chunks::<4>().0.iter().map(|x| f32::from_ne_bytes(*x)).collect();
        if !case.lse && lse.iter().any(|x| x.to_bits() != u32::MAX) {
            return Err("an LSE was written that nobody asked for".into());
        }
        let wanted = case.lse.then_some(&lse[..]);
        let verdict = match quantised {
            true => e4m3::compare(&o, wanted, &self.rows, &self.unfused),
            false => compare(&o, wanted, &self.rows, &self.unfused),
        };
        if !verdict.passed() {
            return Err(verdict.to_string());
        }
        if kernel.problem.residual
            && let Some(wrong) = residual_fails(&o, &lost, &self.rows)
        {
            return Err(wrong);
        }
        let untouched = HostTensor::zeros(dtype, o.shape(), case.layout);
        if untouched.bytes().iter().zip(o.bytes()).any(|(gap, o)| *gap == 0xff && *o != 0xff) {
            return Err("O was written between its rows".into());
        }
        Ok(o)
    }

    /// How far an O is from fp64 at most.
    pub fn largest_error(&self, o: &HostTensor) -> f64 {
        let errors = o.values().into_iter().zip(&self.rows.o).map(|(x, y)| (f64::from(x) - y).abs());
        // NaN is as far as can be.
        errors.fold(0.0, |most, x| if x.is_nan() { f64::INFINITY } else { most.max(x) })
    }

    /// Whether O can be compared bit by bit: NaN have many.
    pub fn is_finite(&self) -> bool {
        self.case.bad == [0; 3] && self.rows.o.iter().all(|x| x.is_finite())
    }
}
