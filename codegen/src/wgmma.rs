//! The text of the warpgroup matrix instructions that a kernel needs.
//!
//! The instruction names every accumulator register, and their number follows from the tile: it is written per width,
//! not once. Everything else about it is in `templates/lib/cuda/wgmma.cuh`.

use crate::DType;
use std::fmt::Write;

/// Specialisations of the template's `wgmma<Element, kColumns>` for these widths (multiples of 8 up to 256), each once.
pub(crate) fn instructions(dtype: DType, widths: &[u32]) -> String {
    let mut widths = widths.to_vec();
    widths.sort_unstable();
    widths.dedup();
    let mut text = String::new();
    for columns in widths {
        specialisation(&mut text, dtype.name(), columns);
    }
    text
}

fn specialisation(text: &mut String, element: &str, columns: u32) {
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
    static __device__ __forceinline__ void depth(float (&d)[{n}], u64 a, u64 b) {{
        asm volatile("{name} {{{registers}}}, {a}, {b}, 1, 1, 1, 0, 1;"
                     : {accumulators} : "l"(a), "l"(b) : "memory");
    }}
    static __device__ __forceinline__ void depth(float (&d)[{n}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {{
        asm volatile("{name} {{{registers}}}, {{{a}, {b}, {c}, {d}}}, {e}, 1, 1, 1, 1;"
                     : {accumulators} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b) : "memory");
    }}
}};
"#
    )
    .expect("writing to a string");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_is_written_once_with_all_its_registers() {
        let text = instructions(DType::F16, &[128, 16, 128]);
        assert_eq!(text.matches("template <> struct wgmma<f16,").count(), 2);
        assert!(text.contains("m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, keep, 1, 1, 0, 0;"));
        assert!(text.contains("%63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"), "{text}");
        assert_eq!(text.matches("\"+f\"(d[63])").count(), 3);
    }
}
