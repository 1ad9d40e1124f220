//! A kernel: problem, schedule and arch, rendered to source.

use crate::{
    Arch, DType, Error, KvElement, KvScales, KvStore, Op, Problem, Resources, Result, ScaleUnit, Schedule, TemplateSet,
    abi,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything that determines the generated source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// What is computed.
    pub problem: Problem,
    /// How it is computed.
    pub schedule: Schedule,
    /// What it is compiled for.
    pub arch: Arch,
}

/// The language of a generated source, which decides the compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Language {
    /// C11 with GNU extensions, for the system C compiler.
    C,
    /// CUDA C++ without any include, for NVRTC.
    Cuda,
}

/// A rendered kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Name of the kernel: unique per problem, schedule and arch.
    pub name: String,
    /// The symbol to launch (CUDA). CPU kernels export `ft_tiles`, `ft_scratch_bytes` and `ft_tile`.
    pub entry: String,
    /// Source language.
    pub language: Language,
    /// The compiler options that belong to the source, beyond output and input paths.
    pub options: Vec<String>,
    /// The text.
    pub text: String,
}

impl Source {
    /// The text without comments and line breaks: sources of equal tokens and options compile to the same machine code.
    pub fn tokens(&self) -> String {
        crate::seen::tokens(&self.text)
    }
}

impl Kernel {
    /// Checks problem, family, schedule and resources.
    pub fn check(&self) -> Result<()> {
        self.problem.validate_on(self.arch)?;
        self.schedule.family().supports(&self.problem, self.arch)?;
        self.schedule.validate(&self.problem, self.arch)?;
        self.resources().check(self.arch, self.schedule.blocks_per_sm())
    }

    /// What the kernel needs on the device, by estimate.
    pub fn resources(&self) -> Resources {
        self.schedule.resources(&self.problem)
    }

    /// The name: problem, family, schedule and arch in one word.
    pub fn name(&self) -> String {
        let family = self.schedule.family().name().rsplit('/').next().unwrap_or_default();
        format!("{}.{family}.{}.{}", self.problem, self.schedule, self.arch)
    }

    /// The source language.
    pub fn language(&self) -> Language {
        match self.arch {
            Arch::Cpu(_) => Language::C,
            Arch::Sm(_) => Language::Cuda,
        }
    }

    /// Compiler options that belong to the kernel. They are part of its key and of the comment at its top.
    pub fn compile_options(&self) -> Vec<String> {
        match self.arch {
            Arch::Cpu(isa) => ["-O3", "-shared", "-fPIC", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno"]
                .into_iter()
                .chain(isa.flags())
                .map(str::to_owned)
                .collect(),
            Arch::Sm(sm) => vec![
                format!("--gpu-architecture={sm}"),
                "--std=c++17".to_owned(),
                "--device-as-default-execution-space".to_owned(),
                "--ptxas-options=-v".to_owned(),
            ]
            .into_iter()
            // By count of its output: the same arithmetic, and no spill.
            .chain(self.schedule.is_quick().then(|| "--ptxas-options=-O1".to_owned()))
            .collect(),
        }
    }

    /// Renders the source. Pure and deterministic: the same kernel and templates give the same bytes.
    pub fn render(&self, templates: &TemplateSet) -> Result<Source> {
        self.check()?;
        let name = self.name();
        let options = self.compile_options();
        let entry = match self.language() {
            Language::C => "ft_tile".to_owned(),
            Language::Cuda => {
                let word: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
                format!("ft_{word}")
            }
        };
        let mut fields = self.fields();
        fields.insert("header", self.header(&name, &options, templates));
        fields.insert("entry", entry.clone());
        let text = templates.render(self.schedule.family().template(), &fields)?;
        Ok(Source { name, entry, language: self.language(), options, text })
    }

    /// The comment at the top of the generated file: enough to rebuild it by hand.
    fn header(&self, name: &str, options: &[String], templates: &TemplateSet) -> String {
        let how = match self.language() {
            Language::C => format!("cc {} -o kernel.so kernel.c", options.join(" ")),
            Language::Cuda => format!(
                "nvcc -cubin -arch={} -std=c++17 -Xptxas -v{} kernel.cu   (NVRTC options: {})",
                self.arch,
                if self.schedule.is_quick() { ",-O1" } else { "" },
                options.join(" ")
            ),
        };
        let program = self.problem.program.map_or(String::new(), |p| {
            let lines: Vec<&str> = p.text().lines().collect();
            // Nothing in a program can end the comment.
            format!("\n * program   {}", lines.join("\n *           ").replace("*/", "* /"))
        });
        format!(
            "flashtune {version}: {name}\n * problem   {problem}{program}\n * schedule  {schedule}\n * templates {hash}\n * rebuild   {how}",
            version = env!("CARGO_PKG_VERSION"),
            problem = self.problem,
            schedule = self.schedule,
            hash = templates.hash_of(self.schedule.family()),
        )
    }

    /// The names that a template may use: the fields of problem, schedule and arch, as words. Templates paste them into
    /// constants and never branch on them, so a misspelt name is an error, not a silent `false`.
    fn fields(&self) -> BTreeMap<&'static str, String> {
        let p = &self.problem;
        let mut m = BTreeMap::from([
            ("dtype", p.dtype.name().to_owned()),
            ("output", p.output_dtype().name().to_owned()),
            ("head_dim_qk", p.head_dim_qk.to_string()),
            ("head_dim_v", p.head_dim_v.to_string()),
            ("mask_left", u32::from(p.mask.left).to_string()),
            ("mask_right", u32::from(p.mask.right).to_string()),
            ("residual", u32::from(p.residual).to_string()),
            ("dropout", u32::from(p.dropout).to_string()),
            ("scales_of_queries", u32::from(p.scales.q == ScaleUnit::Rows).to_string()),
            ("scales_of_keys", u32::from(p.scales.k == ScaleUnit::Rows).to_string()),
            ("scales_of_channels", u32::from(p.scales.v == ScaleUnit::Channel).to_string()),
        ]);
        m.extend(p.kv.store().map(|store| store_fields(&store, p.dtype)).into_iter().flatten());
        m.extend(abi::fields(self.language(), p));
        let resources = self.resources();
        m.extend([
            ("threads", resources.threads.to_string()),
            ("smem_bytes", resources.smem_bytes.to_string()),
            ("mark_empty", crate::resources::marks_empty_rows(p).to_string()),
        ]);
        m.extend(match self.language() {
            Language::C => crate::score::cpu_fields(p.program.as_deref()),
            Language::Cuda => crate::score::cuda_fields(p.program.as_deref(), self.schedule.biases(p)),
        });
        if p.op == Op::Backward {
            m.insert("packed", u32::from(!p.kv.is_dense()).to_string());
            m.extend(crate::score::gradient_fields(p.program.as_deref(), self.language()));
        }
        if let Some(by) = p.by {
            m.extend(crate::score::term_fields(p.program.as_deref(), by.into(), self.language()));
        }
        self.schedule.constants(p, &mut m);
        m
    }
}

/// What the templates of ragged batches have for a store: the name of its elements' type, and flags.
fn store_fields(store: &KvStore, queries: DType) -> [(&'static str, String); 4] {
    let quantised = store.element != KvElement::Same;
    let element = if quantised { store.element.name() } else { queries.name() };
    let flag = |set: bool| u32::from(set).to_string();
    [
        ("kv_element", element.to_owned()),
        ("kv_scaled", flag(quantised)),
        ("kv_scale_per_token", flag(quantised && store.scales == KvScales::PerToken)),
        ("v_columns", flag(store.v_columns)),
    ]
}

impl From<tera::Error> for Error {
    fn from(e: tera::Error) -> Self {
        Error::Template { name: String::new(), message: e.to_string() }
    }
}
