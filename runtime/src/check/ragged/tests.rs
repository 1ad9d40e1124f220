use super::*;
use crate::{CpuDevice, compiler_for};
use flashtune_codegen::abi::{ABI_VERSION, ArgsLayout, declaration};
use flashtune_codegen::{
    Arch, CpuIsa, DType, Kernel, KvElement, KvKind, KvScales, KvStore, Language, MaskKind, NaiveRaggedSchedule,
    Schedule, Source,
};

/// A correct kernel for f32 and head dim 16 over a store of the same.
const KERNEL: &str = include_str!("../../../testdata/ragged.c");
const MOST: Most = Most { sequences: 5, rows: 20, keys: 90, heads: 6 };
/// Enough that every option of a batch meets most others.
const BATCHES: u64 = 80;

fn problem(mask: MaskKind) -> Problem {
    Problem::forward(DType::F32, 16, mask).unwrap().with_kv(KvKind::RAGGED)
}

fn module(device: &dyn Device, text: &str, mask: MaskKind) -> Arc<dyn Module> {
    let options = ["-O1", "-shared", "-fPIC", "-lm"].map(str::to_owned).to_vec();
    let arch = Arch::Cpu(CpuIsa::Generic);
    let source = Source {
        name: "ragged".into(),
        entry: "ft_tile".into(),
        language: Language::C,
        options: options.clone(),
        text: format!("#include <stdint.h>\n{}\n{text}", declaration::<RaggedArgs>(Language::C)),
    };
    let compiler = compiler_for(arch).unwrap();
    let (bytes, facts) = compiler.compile(&source).unwrap();
    // Of the right arguments and plan; what is launched is the text.
    let schedule = Schedule::NaiveRagged(NaiveRaggedSchedule { block_q: 16, block_kv: 32, threads: 256 });
    let recipe = flashtune_cache::Recipe {
        kernel: Kernel { problem: problem(mask), schedule, arch },
        templates: "test".into(),
        options,
        compiler: compiler.id().clone(),
        abi: ABI_VERSION,
    };
    let args = ArgsLayout::of(&recipe.kernel);
    device.load(&flashtune_cache::Artifact { recipe, args, entry: source.entry, facts, bytes }).unwrap()
}

/// Cases that many kernels are tried with.
fn cases(mask: MaskKind) -> (Arc<dyn Device>, Vec<(RaggedBatch, RaggedCase)>) {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let problem = problem(mask);
    let case = |seed| {
        let batch = RaggedBatch::random(&problem, MOST, seed);
        let case = RaggedCase::new(device.clone(), &problem, &batch).unwrap();
        (batch, case)
    };
    let cases = (0..BATCHES).map(case).collect();
    (device, cases)
}

#[test]
fn a_correct_kernel_passes_in_every_batch() {
    for mask in [MaskKind::FULL, MaskKind::CAUSAL, MaskKind { left: true, right: true }] {
        let (device, cases) = cases(mask);
        let module = module(&*device, KERNEL, mask);
        let mut rows = 0;
        for (batch, case) in &cases {
            let report = case.check(&*module).unwrap();
            assert!(report.passed(), "{batch}: {report}");
            rows += report.verdict.rows;
        }
        assert!(rows > 5000, "{rows}");
    }
}

#[test]
fn every_kind_of_fault_is_found() {
    let (device, cases) = cases(MaskKind::CAUSAL);
    let faults = [
        ("i >= q_len", "i > q_len", "written|oracle"),
        ("j < kv_len; j++", "j <= kv_len && j < 90; j++", "oracle"),
        ("position + RIGHT + 1", "position + RIGHT", "oracle"),
        ("i + kv_len - q_len", "i", "oracle"),
        ("first += pad, kv_len -= pad", "first += pad", "oracle"),
        ("first += pad, kv_len -= pad", "kv_len -= pad", "oracle"),
        ("+ a->kv_added", "", "oracle"),
        ("kv_len += at(a->kv_added_begin", "kv_len -= at(a->kv_added_begin", "oracle"),
        ("at(a->last_page, b, lw)", "a->page_tokens", "oracle"),
        ("if (a->slots)", "if (0)", "oracle"),
        ("a->v_table ? at(a->v_table", "a->v_table ? at(a->k_table", "oracle"),
        (
            "if (k_id < 0 || k_id >= a->pages || v_id < 0 || v_id >= a->pages) continue;",
            "if (k_id < 0 || k_id >= a->pages) k_id = 0; if (v_id < 0 || v_id >= a->pages) v_id = 0;",
            "oracle",
        ),
        ("words == 1 ? array[i] : ((const int64_t *)array)[i]", "array[words * i]", "oracle"),
        ("d / 4 * a->k_stride[3] + d % 4", "d", "oracle"),
        ("a->q_begin ? 0 : b", "b", "written|oracle"),
        ("empty ? a->lse_empty", "empty ? -INFINITY", "LSE"),
        ("* a->lse_unit", "", "LSE"),
        ("/* after */", "if (i + 1 == q_len && q_len < a->q_len) o[a->o_stride[2]] = 0;", "written|oracle|bytes"),
        (
            "/* after */",
            "if (a->kv_lengths) ((int32_t *)a->kv_lengths)[0] += 0 * i + (h == 0);",
            "kv_lengths was written",
        ),
        ("/* after */", "static int n; o[3] += 1e-7f * n++;", "two launches"),
    ];
    for (from, to, words) in faults {
        assert!(KERNEL.contains(from), "{from}");
        let module = module(&*device, &KERNEL.replace(from, to), MaskKind::CAUSAL);
        let mut reports = cases.iter().map(|(_, case)| {
            let report = case.check(&*module).unwrap();
            // A fault in the inputs must not reach the next kernel.
            case.restore().unwrap();
            report
        });
        let seen = reports.find(|report| !report.passed()).map(|report| report.to_string()).unwrap_or_default();
        assert!(words.split('|').any(|word| seen.contains(word)), "`{to}` in place of `{from}`: {seen}");
    }
}

/// What no kernel of this build computes on the host is at least made.
#[test]
fn quantised_batches_have_numbers_and_scales_that_differ() {
    for element in [KvElement::E4m3, KvElement::E5m2, KvElement::Int8] {
        for scales in [KvScales::PerHead, KvScales::PerToken] {
            let store = KvStore { element, scales, v_columns: true };
            let problem = Problem::forward(DType::Bf16, 64, MaskKind::CAUSAL).unwrap().with_kv(KvKind::Ragged(store));
            let batch = RaggedBatch { kv_heads: 3, heads: 6, layout: StoreLayout::Chunks, ..RaggedBatch::default() };
            let batch = RaggedBatch { mask: flashtune_codegen::Mask::Causal, ..batch };
            let data = RaggedData::new(&problem, &batch).unwrap();
            assert!(data.is_finite() && data.rows() == 12, "{element:?} {scales:?}");
            let values = data.parts()[&Part::KScale].as_chunks::<4>().0.iter().map(|x| f32::from_ne_bytes(*x));
            let (least, most) = values.fold((f32::MAX, 0.0f32), |(a, b), x| (a.min(x), b.max(x)));
            assert!(least > 0.0 && most > 20.0 * least, "{element:?} {scales:?}: {least} to {most}");
            let args = data.args(|_| 4096);
            assert_eq!((args.v_stride[1], args.v_stride[3]), (1, 16));
        }
    }
}
