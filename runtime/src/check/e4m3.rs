//! Scales of e4m3 operands, and what is expected of a kernel that is given them.

use super::guarded::Guarded;
use crate::reference::{Attention, RowId, Rows, e4m3, oracle_of};
use crate::{Descale, Descales, Device, HostTensor, Result};
use flashtune_codegen::{DType, Shape};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Scales of Q, K and V, a number for each sequence and KV head, on the device and here.
pub(super) struct Scales {
    shape: [u64; 2],
    values: [Vec<f32>; 3],
    memory: [Guarded; 3],
}

impl Scales {
    /// Numbers around 1, so that those of another head are far off.
    pub(super) fn new(device: &dyn Device, shape: &Shape, seed: u64) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x5ca1e);
        let count = shape.batch as usize * shape.kv_heads as usize;
        let values = [(); 3].map(|()| (0..count).map(|_| rng.random_range(0.5..2.0f32)).collect::<Vec<f32>>());
        let upload = |name, values: &[f32]| Guarded::new(device, name, bytemuck::cast_slice(values));
        let [q, k, v] = &values;
        let memory = [upload("q_descale", q)?, upload("k_descale", k)?, upload("v_descale", v)?];
        Ok(Self { shape: [shape.batch, shape.kv_heads].map(u64::from), values, memory })
    }

    pub(super) fn views(&self) -> Descales {
        let strides = [self.shape[1] as i64, 1];
        let view = |memory: &Guarded| Some(Descale { address: memory.address(), shape: self.shape, strides });
        let [q, k, v] = &self.memory;
        Descales { q: view(q), k: view(k), v: view(v) }
    }

    /// The exact rows of what the operands mean, and those of an emulation that rounds P alone.
    pub(super) fn expected(
        &self,
        operands: [&HostTensor; 3],
        attention: &Attention<'_>,
        output: DType,
        ids: &[RowId],
    ) -> (Rows, Rows) {
        let [q, k, v] = [0, 1, 2].map(|i| e4m3::dequantised(operands[i], &self.values[i], self.shape[1] as usize));
        let oracle = oracle_of(&q, &k, &v, attention, ids);
        let emulated = e4m3::emulated([&q, &k, &v], attention, output, &oracle);
        (oracle, emulated)
    }
}
