//! The text of the warpgroup matrix instructions on e4m3 that a kernel needs: one names every accumulator register.

use super::Sm90Fp8Schedule;
use std::fmt::Write;

/// Specialisations of the template's `wgmma<Element, kColumns>` for the widths of scores and of the parts of O, which
/// has so many columns; where keys are in e5m2 also for 32 keys, whose matrix steps are added in fp32.
///
/// K and V are of `keys`, e4m3 or e5m2, beside e4m3 queries and probabilities. `rows(d, a, b, keep)` is d = keep * d +
/// A B^T with both operands in shared memory by rows; with `a0` to `a3` A is in registers.
pub(super) fn instructions(schedule: &Sm90Fp8Schedule, columns: u32, keys: &str) -> String {
    let last = columns - (columns.div_ceil(schedule.part) - 1) * schedule.part;
    let scores = if keys == "e5m2" { 32 } else { schedule.block_kv };
    let widths = [schedule.block_kv, scores, schedule.part, last];
    let mut text = String::new();
    for (i, width) in widths.into_iter().enumerate() {
        if !widths[..i].contains(&width) {
            specialisation(&mut text, width, keys);
        }
    }
    text
}

fn specialisation(text: &mut String, columns: u32, keys: &str) {
    let n = columns / 2;
    let registers = (0..n).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ");
    let accumulators = (0..n).map(|i| format!("\"+f\"(d[{i}])")).collect::<Vec<_>>().join(", ");
    let name = format!("wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.{keys}");
    let operand = |i: u32| format!("%{}", n + i);
    let [a, b, c, d, e, f] = [0, 1, 2, 3, 4, 5].map(operand);
    write!(
        text,
        r#"
template <> struct wgmma<e4m3, {columns}> {{
    static __device__ __forceinline__ void rows(float (&d)[{n}], u64 a, u64 b, bool keep) {{
        asm volatile("{{.reg .pred keep; setp.ne.b32 keep, {c}, 0;\n"
                     "{name} {{{registers}}}, {a}, {b}, keep, 1, 1;}}"
                     : {accumulators} : "l"(a), "l"(b), "r"(int(keep)) : "memory");
    }}
    static __device__ __forceinline__ void rows(float (&d)[{n}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool keep) {{
        asm volatile("{{.reg .pred keep; setp.ne.b32 keep, {f}, 0;\n"
                     "{name} {{{registers}}}, {{{a}, {b}, {c}, {d}}}, {e}, keep, 1, 1;}}"
                     : {accumulators} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(keep)) : "memory");
    }}
}};
"#
    )
    .expect("a string takes all that is written to it");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_is_written_once_and_names_all_of_its_registers() {
        let of = |block_kv, part| instructions(&Sm90Fp8Schedule { block_kv, part, ..Default::default() }, 64, "e4m3");
        let text = of(128, 64);
        assert_eq!(text.matches("template <>").count(), 2);
        assert!(text.contains("m64n128k32.f32.e4m3.e4m3") && text.contains("\"+f\"(d[63]) :") && text.contains("%66"));
        let mixed = instructions(&Sm90Fp8Schedule { block_kv: 64, part: 64, ..Default::default() }, 64, "e5m2");
        assert!(["m64n64k32.f32.e4m3.e5m2", "m64n32k32.f32.e4m3.e5m2"].iter().all(|name| mixed.contains(name)));
        assert!(!mixed.contains(".e4m3.e4m3"));
        assert_eq!(of(64, 64).matches("template <>").count(), 1);
        let uneven = of(128, 48);
        assert!(uneven.contains("m64n48k32") && uneven.contains("m64n16k32"));
    }
}
