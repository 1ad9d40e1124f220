//! Scales of e4m3 operands, and what is expected of a kernel that is given them.

use crate::guarded::Guarded;
use crate::reference::{Attention, RowId, Rows, e4m3, oracle_of};
use crate::{Descales, Device, HostTensor, Result};
use flashtune_codegen::{DType, Problem, Shape};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Scales of Q, K and V, of the units that a problem has, and of an O of e4m3, on the device and here.
pub(super) struct Scales {
    kv_heads: usize,
    values: [e4m3::Scales; 3],
    memory: [Guarded; 3],
    of_o: Option<(f32, Guarded)>,
}

impl Scales {
    /// Drawn at random.
    pub(super) fn new(device: &dyn Device, problem: &Problem, shape: &Shape, seed: u64) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x5ca1e);
        let kv_heads = shape.kv_heads as usize;
        let sizes = |heads: u32, rows: u32, dim: u32| [shape.batch, heads, rows, dim].map(|n| n as usize);
        let (units, kv) = (problem.scales, |dim| sizes(shape.kv_heads, shape.kv_len, dim));
        let values = [
            (units.q, sizes(shape.heads, shape.q_len, problem.head_dim_qk)),
            (units.k, kv(problem.head_dim_qk)),
            (units.v, kv(problem.head_dim_v)),
        ]
        .map(|(unit, sizes)| e4m3::Scales::random(unit, sizes, kv_heads, &mut rng));
        let upload = |name, scales: &e4m3::Scales| Guarded::new(device, name, bytemuck::cast_slice(&scales.values));
        let [q, k, v] = &values;
        let memory = [upload("q_descale", q)?, upload("k_descale", k)?, upload("v_descale", v)?];
        // Most of O comes to lie among normal numbers, and the largest of it, here and there, beyond 448.
        let of_o = (problem.output_dtype() == DType::E4m3).then(|| 2f32.powf(rng.random_range(2.0..8.0)));
        let of_o = of_o.map(|by| Guarded::new(device, "o_scale", bytemuck::bytes_of(&by)).map(|memory| (by, memory)));
        let of_o = of_o.transpose()?;
        Ok(Self { kv_heads, values, memory, of_o })
    }

    pub(super) fn views(&self) -> Descales {
        let [q, k, v] = [0, 1, 2].map(|i| Some(self.values[i].at(self.memory[i].address())));
        Descales { q, k, v }
    }

    /// Where the scale of O lies, of problems that have one.
    pub(super) fn of_output(&self) -> Option<u64> {
        self.of_o.as_ref().map(|(_, memory)| memory.address())
    }

    /// The exact rows of what the operands mean, and those of an emulation that rounds P alone; both times the scale of
    /// O, as that of V.
    pub(super) fn expected(
        &self,
        operands: [&HostTensor; 3],
        attention: &Attention<'_>,
        output: DType,
        ids: &[RowId],
    ) -> (Rows, Rows) {
        let [of_q, of_k, of_v] = &self.values;
        let mut of_v = of_v.clone();
        if let Some((by, _)) = &self.of_o {
            of_v.values.iter_mut().for_each(|scale| *scale *= by);
        }
        let scales = [of_q, of_k, &of_v];
        let [q, k, v] = [0, 1, 2].map(|i| e4m3::dequantised(operands[i], scales[i], self.kv_heads));
        let oracle = oracle_of(&q, &k, &v, attention, ids);
        let emulated = e4m3::emulated([&q, &k, &v], attention, output, &oracle);
        (oracle, emulated)
    }
}
