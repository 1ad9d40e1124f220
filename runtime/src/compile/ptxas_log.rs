//! Reads what ptxas reports about a kernel (`--ptxas-options=-v`) out of NVRTC's log.

use flashtune_cache::Facts;

/// Registers, spills, stack and shared memory, and the performance notes. A log of several functions gives the largest
/// need of any of them, and the sum of all spills. None when the log tells of no function: nothing is known of the
/// spills then.
pub(super) fn parse(log: &str) -> Option<Facts> {
    let mut facts = Facts::default();
    let mut told = false;
    for line in log.lines() {
        let line = line.trim();
        // The part after the tool's prefix, which has changed between versions ("ptxas info    :", "ptxas         .").
        for part in line.split([',', ':', '.']) {
            let words: Vec<&str> = part.split_whitespace().collect();
            match words[..] {
                ["Used", n, "registers"] => {
                    told = true;
                    facts.registers = facts.registers.max(number(n));
                }
                [n, "bytes", "stack", "frame"] | [n, "bytes", "cumulative", "stack", "size"] => {
                    facts.stack_bytes = facts.stack_bytes.max(number(n));
                }
                [n, "bytes", "spill", "stores" | "loads"] => facts.spill_bytes += number(n),
                [n, "bytes", "smem"] => facts.static_smem_bytes = facts.static_smem_bytes.max(number(n)),
                _ => {}
            }
        }
        if is_performance_note(line) {
            facts.warnings.push(line.to_owned());
        }
    }
    told.then_some(facts)
}

fn number(text: &str) -> u32 {
    text.parse().unwrap_or(0)
}

/// Notes of the form `(C7508) Potential Performance Loss: ...`: setmaxnreg ignored, wgmma serialised, waits injected.
/// The kernel compiles and computes, but it is not the kernel that was written.
fn is_performance_note(line: &str) -> bool {
    let code = |rest: &str| rest.len() > 4 && rest.as_bytes()[..4].iter().all(u8::is_ascii_digit);
    line.split("(C").skip(1).any(|rest| code(rest) && (rest.starts_with("75") || rest.contains("Performance Loss")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_kernel() {
        let f = parse(
            "ptxas info    : 0 bytes gmem\n\
             ptxas info    : Compiling entry function 'k' for 'sm_80'\n\
             ptxas info    : Function properties for k\n\
             ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]\n\
             ptxas info    : Compile time = 1.371 ms\n",
        )
        .unwrap();
        assert_eq!(f, Facts { registers: 8, ..Facts::default() });
    }

    #[test]
    fn spills_stack_and_shared_memory() {
        let f = parse(
            "ptxas info    : 0 bytes gmem\n\
             ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
             ptxas info    : Function properties for k\n\
             ptxas         .     1856 bytes stack frame, 2752 bytes spill stores, 2728 bytes spill loads\n\
             ptxas info    : Used 32 registers, used 1 barriers, 1856 bytes cumulative stack size, 400 bytes smem\n\
             ptxas info    : Compile time = 191.682 ms\n",
        )
        .unwrap();
        assert_eq!((f.registers, f.spill_bytes, f.stack_bytes, f.static_smem_bytes), (32, 2752 + 2728, 1856, 400));
        assert!(f.warnings.is_empty());
    }

    #[test]
    fn the_older_format_and_several_functions() {
        let f = parse(
            "ptxas info    : Function properties for helper\n\
             \x20   16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n\
             ptxas info    : Used 40 registers, 360 bytes cmem[0]\n\
             ptxas info    : Function properties for k\n\
             \x20   0 bytes stack frame, 12 bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 384 bytes cmem[0]\n",
        )
        .unwrap();
        assert_eq!((f.registers, f.spill_bytes, f.stack_bytes, f.static_smem_bytes), (168, 24, 16, 1024));
    }

    #[test]
    fn performance_notes_are_kept_verbatim_and_other_notes_are_not() {
        let lost = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine \
                    register count at entry.";
        let serial = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized \
                      due to insufficient register resources for the wgmma pipeline in the function 'k'";
        let wait = "ptxas info    : (C7517) wgmma.wait_group is injected in around line 201 by compiler to allow use \
                    of registers";
        let log = format!(
            "ptxas info    : Used 168 registers\n{lost}\n\
             k.cu(1): warning #177-D: variable was declared but never referenced\n{serial}\n{wait}\n\
             ptxas info    : (C1234) something else\n"
        );
        assert_eq!(parse(&log).unwrap().warnings, [lost, serial, wait]);
    }
    #[test]
    fn a_log_without_a_function_is_unknown_and_not_free_of_spills() {
        for log in [
            "",
            "k.cu(1): warning #177-D: variable was declared but never referenced\n",
            "ptxas info    : 0 bytes gmem\n",
        ] {
            assert_eq!(parse(log), None, "{log}");
        }
    }
}
