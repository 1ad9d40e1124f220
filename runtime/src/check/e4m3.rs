//! Scales of e4m3 operands, and what is expected of a kernel that is given them.

use crate::guarded::Guarded;
use crate::reference::{Attention, RowId, Rows, e4m3, oracle_of};
use crate::{Descales, Device, HostTensor, Result};
use flashtune_codegen::{DType, Problem, Shape};
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Scales of Q, K and V, of the units that a problem has, on the device and here.
pub(super) struct Scales {
    kv_heads: usize,
    values: [e4m3::Scales; 3],
    memory: [Guarded; 3],
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
        Ok(Self { kv_heads, values, memory })
    }

    pub(super) fn views(&self) -> Descales {
        let [q, k, v] = [0, 1, 2].map(|i| Some(self.values[i].at(self.memory[i].address())));
        Descales { q, k, v }
    }

    /// The exact rows of what the operands mean, and those of an emulation that rounds P alone.
    pub(super) fn expected(
        &self,
        operands: [&HostTensor; 3],
        attention: &Attention<'_>,
        output: DType,
        ids: &[RowId],
    ) -> (Rows, Rows) {
        let [q, k, v] = [0, 1, 2].map(|i| e4m3::dequantised(operands[i], &self.values[i], self.kv_heads));
        let oracle = oracle_of(&q, &k, &v, attention, ids);
        let emulated = e4m3::emulated([&q, &k, &v], attention, output, &oracle);
        (oracle, emulated)
    }
}
