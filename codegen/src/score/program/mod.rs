//! A score program: a mask, a change of the score and a sink, over declared scalars and tensors.

mod derived;
pub(in crate::score) mod given;
pub(in crate::score) mod intern;
mod parts;

use crate::score::analysis::axes::MaskAxes;
use crate::score::analysis::bias::Bias;
use crate::score::analysis::dense::DenseMask;
use crate::score::analysis::facts::ScoreFacts;
use crate::score::analysis::rows::RowKeys;
use crate::score::analysis::window::WindowForm;
use crate::score::graph::Graph;
use crate::score::syntax::error::ProgramError;
use crate::score::syntax::words::{Declaration, Id};
pub use parts::ProgramBuilder;
use std::fmt;

/// Nodes that a program may have.
pub(crate) const MAX_NODES: usize = 1 << 15;
/// Side tensors that a program may read, and run-time scalars: they are passed to kernels by value.
pub const MAX_INPUTS: usize = 32;

/// A checked program in normal form.
///
/// - `mask`: bool; a key whose mask is false is not attended to, whatever its score is, NaN and infinity included.
/// - `score`: float; what goes into the softmax in place of `score`, in natural units.
/// - `sink`: float, the same for all keys of a row; the logit of a key without a value, which takes its part of the
///   softmax and adds nothing to O. The LSE takes it in. A row with a sink and no key has O = 0.
///
/// Two programs are equal if their texts are, and programs of the same meaning mostly have the same text
/// (`score::graph::normal`).
#[derive(Clone)]
pub struct Program {
    graph: Graph,
    mask: Option<Id>,
    score: Option<Id>,
    sink: Option<Id>,
    text: String,
    hash: [u8; 32],
    window: Option<WindowForm>,
    rows: Option<RowKeys>,
    axes: Option<MaskAxes>,
    biases: Vec<Bias>,
    dense: Option<Box<DenseMask>>,
    /// What is left of a program whose mask is a window.
    unmasked: Option<Box<Program>>,
}

impl PartialEq for Program {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Program {}

impl std::hash::Hash for Program {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

/// The text on one line: what was found of it follows from the text, and takes pages.
impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({:?})", self.text)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::str::FromStr for Program {
    type Err = ProgramError;
    fn from_str(text: &str) -> Result<Self, ProgramError> {
        ProgramBuilder::new().text(text)?.build()
    }
}

impl Program {
    /// Reads a whole program: declarations, names, and `mask = ...;`, `score = ...;`, `sink = ...;`.
    ///
    /// # Errors
    /// What cannot be read or does not fit together, with its place.
    pub fn parse(text: &str) -> Result<Self, ProgramError> {
        text.parse()
    }

    /// A mask alone, which may come after its declarations.
    ///
    /// # Errors
    /// As [`Program::parse`].
    pub fn mask_of(text: &str) -> Result<Self, ProgramError> {
        ProgramBuilder::new().mask(text)?.build()
    }

    /// A score alone, which may come after its declarations.
    ///
    /// # Errors
    /// As [`Program::parse`].
    pub fn score_of(text: &str) -> Result<Self, ProgramError> {
        ProgramBuilder::new().score(text)?.build()
    }

    /// The nodes of all results.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The mask; `None` when every key is visible.
    pub fn mask(&self) -> Option<Id> {
        self.mask
    }

    /// What takes the place of the score; `None` when it stays as it is.
    pub fn score(&self) -> Option<Id> {
        self.score
    }

    /// The sink's logit, if there is one.
    pub fn sink(&self) -> Option<Id> {
        self.sink
    }

    /// The scalars and tensors that the program reads, sorted by name: what a call has to bring.
    pub fn declarations(&self) -> &[Declaration] {
        self.graph.declarations()
    }

    /// The canonical text; [`Program::parse`] of it gives an equal program.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The hash of the canonical text.
    pub fn hash(&self) -> &[u8; 32] {
        &self.hash
    }

    /// The first 12 hex digits of the hash: the program's name in kernel names.
    pub fn name(&self) -> String {
        self.hash[..6].iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The mask of this program alone.
    ///
    /// # Errors
    /// Cannot fail for a valid program.
    pub fn mask_only(&self) -> Result<Self, ProgramError> {
        ProgramBuilder::of(self.graph.clone(), self.mask, None, None).build()
    }

    /// The same without ranges that are no promises, for calls with other values; `None` if it has none of these.
    pub fn widened(&self) -> Option<Self> {
        if !self.declarations().iter().any(|d| d.usually) {
            return None;
        }
        let mut graph = self.graph.clone();
        graph.declarations_mut().iter_mut().for_each(|d| *d = d.clone().widened());
        // Nothing becomes larger by it.
        ProgramBuilder::of(graph, self.mask, self.score, self.sink).build().ok()
    }

    /// This program, and the mask of another beside its own.
    ///
    /// # Errors
    /// A name that both declare, and not in the same way.
    pub fn with_mask_of(&self, other: &Program) -> Result<Self, ProgramError> {
        ProgramBuilder::new().text(other.mask_only()?.text())?.text(self.text())?.build()
    }

    /// What the mask is as a window, if it says no more than one does.
    pub(crate) fn window(&self) -> Option<&WindowForm> {
        self.window.as_ref()
    }

    /// The score and the sink of a program whose mask is a window; `None` when it has neither.
    pub fn unmasked(&self) -> Option<&Program> {
        self.unmasked.as_deref()
    }

    /// The run of keys that the mask leaves each query, if that is what it does.
    pub fn rows(&self) -> Option<&RowKeys> {
        self.rows.as_ref()
    }

    /// What the mask changes with besides rows and keys.
    pub fn mask_axes(&self) -> Option<MaskAxes> {
        self.axes
    }

    /// What the runs change with, for a mask whose rows had better find theirs in memory: those that are searched for,
    /// or come in no order.
    pub fn runs(&self) -> Option<MaskAxes> {
        self.axes.filter(|_| self.rows.as_ref().is_some_and(|r| !r.searches.is_empty() || !r.nondecreasing))
    }

    /// What lists of key blocks change with, for a mask that does not leave each query one run of keys.
    pub fn lists(&self) -> Option<MaskAxes> {
        self.axes.filter(|_| self.rows.is_none())
    }

    /// The tensor of bools that the mask reads by query and key, of a mask whose live blocks are listed.
    pub fn dense_mask(&self) -> Option<&DenseMask> {
        self.dense.as_deref().filter(|_| self.lists().is_some())
    }

    /// The tensors of which a tile of scores reads a tile; at most [`MAX_BIASES`](crate::score::MAX_BIASES).
    pub fn biases(&self) -> &[Bias] {
        &self.biases
    }

    /// What the change of the score costs a kernel for each score.
    pub(crate) fn score_facts(&self) -> ScoreFacts {
        self.score.map_or_else(ScoreFacts::default, |score| ScoreFacts::of(&self.graph, score, &self.biases))
    }

    /// Nothing is masked, changed or added.
    pub fn is_plain(&self) -> bool {
        self.mask.is_none() && self.score.is_none() && self.sink.is_none()
    }
}
