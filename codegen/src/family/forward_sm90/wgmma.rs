//! The text of the warpgroup matrix instructions that a kernel needs.
//!
//! The instruction names every accumulator register, and their number follows from the tile: it is written per width,
//! not once. Everything else about it is in `templates/lib/cuda/ptx/wgmma.cuh`.

use crate::{DType, Problem, Sm90Schedule};
use std::fmt::Write;

/// Specialisations of the template's `wgmma<Element, kColumns>` for a kernel's widths (multiples of 8 up to 256), each
/// once. Those of a quick kernel have whole products, from the fence to the wait, as one statement each: the compiler
/// then handles each accumulator once and not once for every step.
pub(crate) fn instructions(problem: &Problem, schedule: &Sm90Schedule) -> String {
    let (scores, output) = (schedule.block_kv, problem.head_dim_v.next_multiple_of(16));
    let mut widths = vec![scores, output];
    widths.dedup();
    let mut text = String::new();
    for columns in widths {
        let mut products = String::new();
        if schedule.quick && columns == scores {
            products += &whole_scores(problem, columns, schedule.seeds(problem));
        }
        if schedule.quick && columns == output {
            products += &whole_output(problem.dtype, columns, schedule.block_kv / 16);
        }
        specialisation(&mut text, problem.dtype.name(), columns, &products);
    }
    text
}

/// Specialisations for products of these widths and dtype, each with `depths(d, a, b, keep)` beside the others:
/// d = keep * d + A^T B, A and B in shared memory by depth.
pub(in crate::family) fn instructions_by_depth(dtype: DType, widths: &[u32]) -> String {
    let mut widths = widths.to_vec();
    widths.sort_unstable();
    widths.dedup();
    let mut text = String::new();
    for columns in widths {
        let (n, name) = (columns / 2, name(dtype, columns));
        let (registers, constraints) = accumulators(columns, "+f");
        let [a, b, keep] = [n, n + 1, n + 2].map(|i| format!("%{i}"));
        let product = format!(
            r#"
    static __device__ __forceinline__ void depths(float (&d)[{n}], u64 a, u64 b, bool keep) {{
        asm volatile("{{.reg .pred keep; setp.ne.b32 keep, {keep}, 0;\n"
                     "{name} {{{registers}}}, {a}, {b}, keep, 1, 1, 1, 1;}}"
                     : {constraints} : "l"(a), "l"(b), "r"(int(keep)) : "memory");
    }}"#
        );
        specialisation(&mut text, dtype.name(), columns, &product);
    }
    text
}

/// The accumulators of an instruction, as operands and as their constraints.
fn accumulators(columns: u32, constraint: &str) -> (String, String) {
    let n = columns / 2;
    let list = |of: &dyn Fn(u32) -> String| (0..n).map(of).collect::<Vec<_>>().join(", ");
    (list(&|i| format!("%{i}")), list(&|i| format!("\"{constraint}\"(d[{i}])")))
}

fn name(dtype: DType, columns: u32) -> String {
    format!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{0}.{0}", dtype.name())
}

/// `whole_rows(d, a, b)`: d = A B^T over the head dim. In chunks of 64 columns, which are 64 rows of 128 bytes of A
/// apart and `columns` such rows of B. Seeded, d += A B^T.
fn whole_scores(problem: &Problem, columns: u32, seeded: bool) -> String {
    let (n, name) = (columns / 2, name(problem.dtype, columns));
    let (registers, constraints) = accumulators(columns, if seeded { "+f" } else { "=f" });
    let steps: String = (0..problem.head_dim_qk.div_ceil(16))
        .map(|step| {
            let (chunk, within) = (step / 4 * 128, step % 4 * 32);
            let (a, b) = ((chunk * 64 + within) >> 4, (chunk * columns + within) >> 4);
            let keep = if step == 0 && !seeded { "none" } else { "all" };
            format!(
                r#"
                     "add.s64 a, %{n}, {a}; add.s64 b, %{}, {b};\n"
                     "{name} {{{registers}}}, a, b, {keep}, 1, 1, 0, 0;\n""#,
                n + 1
            )
        })
        .collect();
    format!(
        r#"
    static __device__ __forceinline__ void whole_rows(float (&d)[{n}], u64 a, u64 b) {{
        asm volatile("{{.reg .b64 a, b; .reg .pred none, all; setp.ne.b32 none, 0, 0; setp.eq.b32 all, 0, 0;\n"
                     "wgmma.fence.sync.aligned;\n"{steps}
                     "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;}}"
                     : {constraints} : "l"(a), "l"(b) : "memory");
    }}"#
    )
}

/// `whole_depth(d, p, b)`: d += P V over the keys of a block. 16 rows of V are 2048 bytes.
fn whole_output(dtype: DType, columns: u32, steps: u32) -> String {
    let (n, name) = (columns / 2, name(dtype, columns));
    let (registers, constraints) = accumulators(columns, "+f");
    let b = n + 4 * steps;
    let products: String = (0..steps)
        .map(|step| {
            let p = (0..4).map(|i| format!("%{}", n + 4 * step + i)).collect::<Vec<_>>().join(", ");
            format!(
                r#"
                     "add.s64 b, %{b}, {};\n"
                     "{name} {{{registers}}}, {{{p}}}, b, 1, 1, 1, 1;\n""#,
                step * 128
            )
        })
        .collect();
    let p = (0..4 * steps).map(|i| format!("\"r\"(p[{i}])")).collect::<Vec<_>>().join(", ");
    format!(
        r#"
    static __device__ __forceinline__ void whole_depth(float (&d)[{n}], const u32 (&p)[{}], u64 b) {{
        asm volatile("{{.reg .b64 b; wgmma.fence.sync.aligned;\n"{products}
                     "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;}}"
                     : {constraints} : {p}, "l"(b) : "memory");
    }}"#,
        4 * steps
    )
}

fn specialisation(text: &mut String, element: &str, columns: u32, products: &str) {
    let n = columns / 2;
    let registers = (0..n).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ");
    let accumulators = (0..n).map(|i| format!("\"+f\"(d[{i}])")).collect::<Vec<_>>().join(", ");
    let name = format!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element}");
    let operand = |i: u32| format!("%{}", n + i);
    let (a, b, c, d, e) = (operand(0), operand(1), operand(2), operand(3), operand(4));
    // The last words of each instruction: scale of D, signs of A and B, then which operands are stored by depth.
    write!(
        text,
        r#"
template <> struct wgmma<{element}, {columns}> {{
    static __device__ __forceinline__ void rows(float (&d)[{n}], u64 a, u64 b, bool keep) {{
        asm volatile("{{.reg .pred keep; setp.ne.b32 keep, {c}, 0;\n"
                     "{name} {{{registers}}}, {a}, {b}, keep, 1, 1, 0, 0;}}"
                     : {accumulators} : "l"(a), "l"(b), "r"(int(keep)) : "memory");
    }}
    static __device__ __forceinline__ void depth(float (&d)[{n}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {{
        asm volatile("{name} {{{registers}}}, {{{a}, {b}, {c}, {d}}}, {e}, 1, 1, 1, 1;"
                     : {accumulators} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b) : "memory");
    }}{products}
}};
"#
    )
    .expect("writing to a string");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::Program;

    /// Scores of 128 keys, outputs of 16 columns.
    fn kernel() -> (Problem, Sm90Schedule) {
        let bucket = crate::ShapeBucket { parallel: 16, group: 1, q_len: 1024, kv_len: 1024, ..Default::default() };
        let problem = Problem::forward(DType::F16, 128, crate::MaskKind::CAUSAL).unwrap();
        let schedule = Sm90Schedule::default_for(&problem, crate::SmArch { number: 90, specific: true }, &bucket);
        (Problem { head_dim_v: 16, ..problem }, Sm90Schedule { block_kv: 128, ..schedule })
    }

    #[test]
    fn a_quick_kernel_has_each_product_as_one_statement() {
        let (problem, schedule) = kernel();
        assert!(!instructions(&problem, &schedule).contains("whole_"));
        let text = instructions(&problem, &schedule.quick().unwrap());
        let body = |name: &str| {
            let at = text.find(&format!("void {name}(")).unwrap();
            text[at..].split_once("\n    }").unwrap().0.to_owned()
        };
        let (rows, depth) = (body("whole_rows"), body("whole_depth"));
        assert_eq!((rows.matches("wgmma.mma_async").count(), depth.matches("wgmma.mma_async").count()), (8, 8));
        assert_eq!((rows.matches("none, 1, 1").count(), rows.matches(" all, 1, 1").count()), (1, 7));
        // The fifth step is in the second chunk of 64 columns.
        assert!(rows.contains("add.s64 a, %64, 512; add.s64 b, %65, 1024;"), "{rows}");
        assert!(
            depth.contains("add.s64 b, %40, 896;") && depth.contains("{%36, %37, %38, %39}, b, 1, 1, 1, 1;"),
            "{depth}"
        );
    }

    #[test]
    fn a_quick_product_starts_from_what_is_added() {
        let (problem, schedule) = kernel();
        let program = Program::parse("t: f16[q_len, kv_len]; score = score + t[q, kv];").unwrap();
        let problem = problem.with_program(program);
        let quick = Sm90Schedule { bias_stages: 1, ..schedule.quick().unwrap() };
        let body = |schedule| {
            let text = instructions(&problem, &schedule);
            let at = text.find("void whole_rows(").unwrap();
            text[at..].split_once("\n    }").unwrap().0.to_owned()
        };
        let (seeded, plain) = (body(quick), body(Sm90Schedule { bias_stages: 0, ..quick }));
        assert_eq!((seeded.matches("none, 1, 1").count(), plain.matches("none, 1, 1").count()), (0, 1));
        assert!(seeded.contains("\"+f\"(d[63])") && plain.contains("\"=f\"(d[63])"), "{seeded}");
    }

    #[test]
    fn every_width_is_written_once_with_all_its_registers() {
        let (problem, schedule) = kernel();
        let text = instructions(&problem, &schedule);
        assert_eq!(text.matches("template <> struct wgmma<f16,").count(), 2);
        assert!(text.contains("m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, keep, 1, 1, 0, 0;"));
        let same = instructions(&Problem { head_dim_v: 128, ..problem }, &schedule);
        assert_eq!(same.matches("template <> struct wgmma<f16,").count(), 1);
        assert!(text.contains("%63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"), "{text}");
        assert_eq!(text.matches("\"+f\"(d[63])").count(), 2);
    }
}
