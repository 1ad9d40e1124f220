//! Inline assembly to calls: a generated CUDA source becomes C++ for the host, with the very device functions of the
//! templates. What an instruction does is in `machine/ptx.h`, under its own name.

use std::fmt::Write;

/// The source with every `asm` statement replaced. An instruction that the machine lacks is an error of the C++
/// compiler, which names it.
pub fn translate(source: &str) -> Result<String, String> {
    let mut out = String::with_capacity(source.len() * 2);
    let mut rest = source;
    while let Some(at) = next_of_interest(rest) {
        out.push_str(&rest[..at]);
        let found = &rest[at..];
        rest = if let Some(end) = found.strip_prefix("//").map(|_| "\n").or(found.strip_prefix("/*").map(|_| "*/")) {
            out.push('\n');
            &found[found.find(end).map_or(found.len(), |n| n + end.len())..]
        } else {
            let after = found["asm".len()..].trim_start();
            let after = after.strip_prefix("volatile").unwrap_or(after).trim_start();
            let after = after.strip_prefix('(').ok_or("asm without a parenthesis")?;
            let end = closing(after)?;
            out.push_str(&Statement::parse(&after[..end])?.to_cpp()?);
            &after[end + 1..]
        };
    }
    out.push_str(rest);
    Ok(out)
}

/// Where the first comment or the word `asm` begins.
fn next_of_interest(text: &str) -> Option<usize> {
    let is_part = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    let bytes = text.as_bytes();
    (0..bytes.len()).find(|&at| match bytes[at] {
        b'/' => matches!(bytes.get(at + 1), Some(b'/' | b'*')),
        b'a' => {
            let alone = (at == 0 || !is_part(bytes[at - 1])) && !bytes.get(at + 3).copied().is_some_and(is_part);
            alone && bytes[at..].starts_with(b"asm")
        }
        _ => false,
    })
}

/// Positions and characters outside of string literals, with the depth of parentheses and braces around each.
fn outside_strings(text: &str) -> impl Iterator<Item = (usize, char, i32)> {
    let (mut in_string, mut escaped, mut depth) = (false, false, 0);
    text.char_indices().filter_map(move |(at, c)| {
        if in_string {
            (in_string, escaped) = (escaped || c != '"', !escaped && c == '\\');
            return None;
        }
        match c {
            '"' => in_string = true,
            '(' | '{' | '[' => depth += 1,
            ')' | '}' | ']' => depth -= 1,
            _ => {}
        }
        (c != '"').then_some((at, c, depth))
    })
}

/// Where the parenthesis that is open at the start of the text closes.
fn closing(text: &str) -> Result<usize, String> {
    outside_strings(text)
        .find(|&(_, c, depth)| c == ')' && depth < 0)
        .map(|(at, ..)| at)
        .ok_or_else(|| "asm without an end".to_owned())
}

/// Splits at a character that stands outside of strings and parentheses.
fn split(text: &str, separator: char) -> Vec<&str> {
    let ends: Vec<usize> =
        outside_strings(text).filter(|&(_, c, depth)| c == separator && depth == 0).map(|(at, ..)| at).collect();
    let starts = std::iter::once(0).chain(ends.iter().map(|at| at + 1));
    let ends = ends.iter().copied().chain([text.len()]);
    starts.zip(ends).map(|(a, b)| text[a..b].trim()).collect()
}

/// One `asm` statement.
struct Statement {
    text: String,
    /// The expressions of `%0`, `%1` and so on.
    operands: Vec<String>,
}

impl Statement {
    fn parse(inside: &str) -> Result<Self, String> {
        let sections = split(inside, ':');
        let text = sections[0].split('"').skip(1).step_by(2).collect::<String>().replace("\\n", "\n");
        let operands = sections[1..sections.len().min(3)].iter().flat_map(|s| split(s, ',')).filter(|s| !s.is_empty());
        let operands = operands
            .map(|o| {
                let expression = o.find('(').zip(o.rfind(')')).map(|(a, b)| o[a..=b].to_owned());
                expression.ok_or_else(|| format!("asm operand `{o}`"))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { text, operands })
    }

    fn to_cpp(&self) -> Result<String, String> {
        let text = self.text.trim();
        let block = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')).unwrap_or(text);
        let mut out = String::from("{ ");
        for mut instruction in block.split(';').map(str::trim).filter(|i| !i.is_empty()) {
            while let Some((label, after)) = instruction.split_once(':')
                && label.chars().all(|c| c.is_alphanumeric() || c == '_')
                && !after.starts_with(':')
            {
                let _ = write!(out, "{label}: ");
                instruction = after.trim_start();
            }
            out.push_str(&self.instruction(instruction)?);
            out.push_str("; ");
        }
        out.push('}');
        Ok(out)
    }

    fn instruction(&self, text: &str) -> Result<String, String> {
        let (name, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        if let Some(predicates) = text.strip_prefix(".reg .pred ") {
            let names: Vec<_> = predicates.split(',').map(|p| format!("ptx_{}", p.trim())).collect();
            return Ok(format!("bool {}", names.join(", ")));
        }
        for (declaration, ty) in [(".reg .b64 ", "u64"), (".reg .b32 ", "u32"), (".reg .b16 ", "u16")] {
            if let Some(registers) = text.strip_prefix(declaration) {
                let names: Vec<_> = registers.split(',').map(|r| format!("ptx_{}", r.trim())).collect();
                return Ok(format!("ptx::{ty} {}", names.join(", ")));
            }
        }
        if let Some(guard) = name.strip_prefix('@') {
            let (not, predicate) = guard.strip_prefix('!').map_or(("", guard), |p| ("!", p));
            let guarded = match operands.trim().strip_prefix("bra ") {
                Some(label) => format!("goto {label}"),
                None => self.instruction(operands.trim())?,
            };
            return Ok(format!("if ({not}ptx_{predicate}) {guarded}"));
        }
        let mut call = name.replace("::", "__").replace('.', "_");
        let mut arguments = Vec::new();
        if let Some(shape) = name.strip_prefix("wgmma.mma_async.sync.aligned.m64n") {
            let (columns, formats) = shape
                .split_once("k16.f32.")
                .or_else(|| shape.split_once("k32.f32."))
                .ok_or_else(|| format!("`{name}`"))?;
            let (a, b) = formats.split_once('.').ok_or_else(|| format!("`{name}`"))?;
            let format = match (a, b) {
                ("e4m3", "e5m2") => "e4m3_e5m2",
                _ if a == b => a,
                _ => return Err(format!("`{name}`: mixed formats")),
            };
            call = format!("wgmma_mma_async_sync_aligned<ptx::Format::{format}, {columns}>");
            for (i, operand) in split(operands, ',').into_iter().enumerate() {
                arguments.push(match operand.strip_prefix('{').and_then(|o| o.strip_suffix('}')) {
                    None => self.operand(operand)?,
                    Some(registers) => {
                        let list = split(registers, ',')
                            .into_iter()
                            .map(|o| self.operand(o))
                            .collect::<Result<Vec<_>, _>>()?;
                        if i == 0 {
                            if list.len() * 2 != columns.parse().unwrap_or(0) {
                                return Err(format!("`{name}` with {} accumulators", list.len()));
                            }
                            format!("ptx::Registers<{}>{{{{&{}}}}}", list.len(), list.join(", &"))
                        } else {
                            format!("ptx::ARegisters{{{{{}}}}}", list.join(", "))
                        }
                    }
                });
            }
        } else {
            let flat: String = operands.chars().filter(|c| !"[]{}".contains(*c)).collect();
            for operand in flat.split(',').map(str::trim).filter(|o| !o.is_empty() && *o != "_") {
                arguments.push(self.operand(operand)?);
            }
        }
        Ok(format!("ptx::{call}({})", arguments.join(", ")))
    }

    fn operand(&self, text: &str) -> Result<String, String> {
        if let Some(special) = text.strip_prefix("%%") {
            return Ok(format!("ptx_{}", special.replace('.', "_")));
        }
        if let Some(number) = text.strip_prefix('%') {
            let expression = number.parse().ok().and_then(|n: usize| self.operands.get(n));
            return expression.cloned().ok_or_else(|| format!("operand `{text}` of `{}`", self.text));
        }
        // A number, or a predicate that the statement declares.
        Ok(if text.starts_with(|c: char| c.is_ascii_digit()) { text.to_owned() } else { format!("ptx_{text}") })
    }
}

#[test]
fn assembly_becomes_calls_in_the_order_of_the_text() {
    let source = r#"// asm("a") stays out
    u32 masm; asm volatile("cp.x::y.b64 [%0], [%1, {%3, %2}], _;" ::"l"(f(a, b)), "r"(c[0]), "r"(d), "r"(e) : "memory");
    asm volatile("" : "+f"(d[i])::"memory"); asm("mov.u32 %0, %%ctaid.x;" : "=r"(r));
    asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0;\n" "again: @!p bra again; op %0;}" : "=r"(r) : "r"(int(p)));"#;
    let text = translate(source).unwrap();
    for part in [
        "{ ptx::cp_x__y_b64((f(a, b)), (c[0]), (e), (d)); };",
        "{ };",
        "{ ptx::mov_u32((r), ptx_ctaid_x); };",
        "{ bool ptx_p; ptx::setp_ne_b32(ptx_p, (int(p)), 0); again: if (!ptx_p) goto again; ptx::op((r)); };",
        "u32 masm;",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(!text.contains("asm ") && !text.contains("stays"));
    let wgmma = r#"asm("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 1;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b), "r"(c), "r"(e), "l"(v));"#;
    let wanted = "ptx::wgmma_mma_async_sync_aligned<ptx::Format::f16, 8>(ptx::Registers<4>{{&(d[0]), &(d[1]), &(d[2]), \
                  &(d[3])}}, ptx::ARegisters{{(a), (b), (c), (e)}}, (v), 1, 1, 1, 1)";
    assert!(translate(wgmma).unwrap().contains(wanted), "{}", translate(wgmma).unwrap());
    assert!(translate("asm(\"mov %2, %0;\" : \"=r\"(x));").is_err());
}
