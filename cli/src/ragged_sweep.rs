//! What `flashtune check` goes through for kernels of ragged batches: problems with every kind of store, and batches;
//! and of packed sequences their gradients.

use super::sweep::Effort;
use flashtune::{DType, Layout, MaskKind, Problem, Program};
use flashtune_codegen::{KvElement, KvKind, KvScales, KvStore};
use flashtune_runtime::check::{Most, PackedBatch, RaggedBatch};
use flashtune_runtime::{CheckInputs, Distribution, Poison};

/// Masks, changes of the score and sinks: bounds from scalars and tensors, of sequences, heads, rows and keys.
const PROGRAMS: [&str; 7] = [
    "s: f32[heads]; sink = s[h];",
    "cap: float; score = cap * tanh(score * (1.0 / cap));",
    "slope: f32[heads]; score = score + slope[h] * (kv - (q + kv_len - q_len));",
    "prefix: i32[batch]; mask = kv < 9 * prefix[b] or kv <= q + kv_len - q_len;",
    "s: f32[heads]; mask = kv <= q + kv_len - q_len and kv % 3 != 1; score = 4.0 * tanh(score * 0.25); sink = s[h];",
    "d: i32[batch, kv_len] nondecreasing; mask = d[b, q + kv_len - q_len] == d[b, kv];",
    "bias: f32[batch, heads, kv_len]; score = score + bias[b, h, kv];",
];

/// Rows and keys of chunks of prompts, in one batch each.
const CHUNKS: [&[[u32; 2]]; 2] = [&[[130, 9000]], &[[70, 7000], [200, 2600], [1, 300], [0, 40]]];

/// Stores of the queries' elements come twice as often as any other.
fn store(nth: usize) -> KvStore {
    let elements = [KvElement::Same, KvElement::E4m3, KvElement::Same, KvElement::Int8, KvElement::E5m2];
    let element = elements[nth % elements.len()];
    let per_token = element != KvElement::Same && nth / elements.len() % 2 == 1;
    let scales = if per_token { KvScales::PerToken } else { KvScales::PerHead };
    KvStore { element, scales, v_columns: nth % 7 == 6 }
}

/// The problems of the sweep; every third with a score program, unless another is given to all.
pub(crate) fn problems(effort: Effort, program: &Program) -> Vec<Problem> {
    let dims: &[(u32, u32)] = match effort {
        Effort::Quick => &[(64, 64), (128, 128), (40, 72), (59, 33)],
        Effort::Full => &[
            (16, 16),
            (40, 40),
            (64, 64),
            (72, 72),
            (96, 96),
            (128, 128),
            (136, 136),
            (192, 192),
            (256, 256),
            (192, 128),
            (64, 256),
            (40, 72),
            (59, 59),
            (111, 111),
            (7, 250),
            (1, 1),
        ],
    };
    // A store's products are other instructions than another's: they are checked without a program, too.
    let (mut problems, mut without_program) = (Vec::new(), Vec::new());
    for &(qk, v) in dims {
        for dtype in DType::ALL.into_iter().chain([DType::E4m3]) {
            for mask in MaskKind::ALL {
                let nth = problems.len();
                let plain = Problem::forward_qk_v(dtype, qk, v, mask).expect("the dims above are supported");
                let problem = match dtype {
                    DType::E4m3 => {
                        // Of every head dim stores of all elements; of every other one also scales of tokens.
                        let element = [KvElement::E4m3, KvElement::E5m2, KvElement::E4m3, KvElement::Int8][nth % 4];
                        let per_token = nth / 16 % 2 == 1 && nth % 4 == 2;
                        let scales = if per_token { KvScales::PerToken } else { KvScales::PerHead };
                        let store = KvStore { element, scales, v_columns: nth / 16 == 3 && nth % 4 == 0 };
                        let output = DType::OUTPUTS_OF_E4M3[nth % DType::OUTPUTS_OF_E4M3.len()];
                        plain.with_output(output).with_kv(KvKind::Ragged(store))
                    }
                    _ => plain.with_kv(KvKind::Ragged(store(nth))),
                };
                let own = || Program::parse(PROGRAMS[nth / 3 % PROGRAMS.len()]).expect("a program of the list above");
                if dtype == DType::E4m3 && program.is_plain() && nth % 3 == 1 {
                    without_program.push(problem);
                }
                problems.push(match (program.is_plain(), nth % 3) {
                    (false, _) => problem.with_program(program.clone()),
                    (true, 1) => problem.with_program(own()),
                    (true, _) => problem,
                });
            }
        }
    }
    problems.append(&mut without_program);
    problems
}

/// The same problems' gradients, of packed sequences.
pub(crate) fn backward_problems(effort: Effort, program: &Program) -> Vec<Problem> {
    let all = problems(effort, program).into_iter().filter(|p| p.dtype != DType::E4m3);
    all.map(|p| p.with_kv(KvKind::RAGGED).backward()).collect()
}

/// Packed sequences for a backward problem with their inputs, the same ones every time.
pub(crate) fn packed(problem: &Problem, effort: Effort, nth: usize, seed: u64) -> Vec<(PackedBatch, CheckInputs)> {
    let (count, lengths): (u64, &[u32]) = match effort {
        Effort::Quick => (3, &[1, 7, 33, 64, 65, 100, 129, 150]),
        Effort::Full => (8, &[1, 16, 63, 64, 100, 128, 129, 200, 257, 600]),
    };
    let case = |i: u64| {
        let (i, seed) = (i as usize + nth, seed.wrapping_add(nth as u64 * 1000 + i));
        let inputs = CheckInputs {
            layout: Layout::ALL[i % 3],
            distribution: [Distribution::Normal, Distribution::NormalWithOutliers, Distribution::Uniform][i / 2 % 3],
            seed,
            lse: i.is_multiple_of(2),
            poison: [Poison::None, Poison::Nan, Poison::Infinite][i / 3 % 3],
            scale: (i % 5 == 1).then_some(-0.3),
        };
        (PackedBatch::random(problem.mask, lengths, 5, seed), inputs)
    };
    (0..count).map(case).collect()
}

/// Batches for a problem, the same ones every time.
pub(crate) fn batches(problem: &Problem, effort: Effort, nth: usize, seed: u64) -> Vec<RaggedBatch> {
    let (count, most) = match effort {
        Effort::Quick => (6, Most { sequences: 5, rows: 150, keys: 700, heads: 16 }),
        Effort::Full => (16, Most { sequences: 12, rows: 300, keys: 3000, heads: 32 }),
    };
    let seed = |i: u64| seed.wrapping_add(nth as u64 * 1000 + i);
    let random = (0..count).map(|i| RaggedBatch::random(problem, most, seed(i)));
    // Few tiles beside so many keys that a device of any size has a part of them for each of its multiprocessors.
    let chunks = CHUNKS.iter().zip(500..).map(|(lengths, i)| RaggedBatch {
        lengths: lengths.to_vec(),
        values: Distribution::Normal,
        ..RaggedBatch::random(problem, most, seed(i))
    });
    random.chain(chunks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{Family, ragged_unaddressable};
    use flashtune_runtime::check::{Index, RaggedData, StoreLayout};

    #[test]
    fn the_quick_sweep_meets_every_dtype_mask_and_store() {
        let quick = problems(Effort::Quick, &Program::parse("score = score;").unwrap());
        for dtype in DType::ALL {
            assert!(MaskKind::ALL.iter().all(|mask| quick.iter().any(|p| p.dtype == dtype && p.mask == *mask)));
        }
        let stores: Vec<KvStore> = quick.iter().filter_map(|p| p.kv.store()).collect();
        for element in [KvElement::Same, KvElement::E4m3, KvElement::E5m2, KvElement::Int8] {
            assert!(stores.iter().any(|s| s.element == element), "{element:?}");
        }
        assert!(stores.iter().any(|s| s.v_columns) && stores.iter().any(|s| s.scales == KvScales::PerToken));
        assert!(quick.iter().filter(|p| p.program.is_some()).count() >= 7);
        // Of each problem of e4m3 queries also the kernel that has no program.
        let e4m3 = || quick.iter().filter(|p| p.dtype == DType::E4m3);
        assert!(e4m3().all(|p| e4m3().any(|plain| plain.program.is_none()
            && plain.kv == p.kv
            && plain.mask == p.mask
            && [plain.head_dim_qk, plain.head_dim_v] == [p.head_dim_qk, p.head_dim_v])));
        assert!(problems(Effort::Full, &Program::parse("score = score;").unwrap()).len() >= 140);
    }

    #[test]
    fn batches_fit_their_problem_and_differ() {
        for (nth, problem) in problems(Effort::Quick, &Program::parse("score = score;").unwrap()).iter().enumerate() {
            let batches = batches(problem, Effort::Full, nth, 0);
            assert!(batches.iter().all(|b| b.mask.kind() == problem.mask && b.heads % b.kv_heads == 0), "{problem}");
            assert!(batches.windows(2).all(|pair| pair[0] != pair[1]), "{problem}");
        }
    }

    #[test]
    fn packed_batches_fit_their_problem_and_have_sequences_without_rows_or_keys() {
        let plain = Program::parse("score = score;").unwrap();
        let (mut empty, mut unused) = ([0; 2], 0);
        for (nth, problem) in backward_problems(Effort::Quick, &plain).iter().enumerate() {
            assert!(Family::BackwardNaive.supports(problem, "sm_75".parse().unwrap()).is_ok(), "{problem}");
            for (batch, _) in packed(problem, Effort::Quick, nth, 0) {
                assert!(batch.mask.kind() == problem.mask && batch.heads % batch.kv_heads == 0, "{batch}");
                (0..2).for_each(|side| empty[side] += usize::from(batch.lengths.iter().any(|n| n[side] == 0)));
                unused += usize::from(batch.unused > 0);
            }
        }
        assert!(empty.iter().all(|n| *n > 10) && unused > 10, "{empty:?} {unused}");
    }

    /// `flashtune check` gives kernels that load by TMA no other batches.
    #[test]
    fn tma_addresses_packs_slots_and_pages_of_the_quick_sweep() {
        let (mut met, mut served) = ([0; 2], [0; 2]);
        for (nth, problem) in problems(Effort::Quick, &Program::parse("score = score;").unwrap()).iter().enumerate() {
            if Family::ForwardSm90Ragged.supports(problem, "sm_90a".parse().unwrap()).is_err() {
                continue;
            }
            for batch in batches(problem, Effort::Quick, nth, 0).iter().filter(|b| b.lengths.iter().all(|l| l[1] < 800))
            {
                let data = RaggedData::new(problem, batch).unwrap();
                let in_pages = matches!(batch.index, Index::Table | Index::Csr);
                let why = ragged_unaddressable(problem, &data.args(|_| 1 << 32));
                let odd = in_pages && (batch.page_tokens % 16 != 0 || batch.left_pad);
                let apart = batch.layout == StoreLayout::Chunks && batch.lengths.iter().any(|l| l[1] > 1);
                met[usize::from(in_pages)] += 1;
                served[usize::from(in_pages)] += usize::from(why.is_none());
                assert_eq!(why.is_some(), odd || apart, "{batch}: {why:?}");
            }
        }
        assert!(served.iter().all(|n| *n >= 8), "{served:?} of {met:?}");
    }
}
