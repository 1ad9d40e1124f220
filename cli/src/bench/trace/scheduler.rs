//! Which tokens of which sequences a step computes: continuous batching with prompts in chunks.
//!
//! Every sequence that generates gets a row; what is left of the budget goes to prompts, in the order in which they
//! came in. A request comes in when a place is free and the pages of all its keys are: none is ever put out again.
//! Requests come in by arrival, and none overtakes another, so the large ones wait, but not for ever.

use super::requests::Request;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::collections::VecDeque;

/// What bounds a step and the cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Limits {
    /// Rows of a step.
    pub token_budget: u32,
    /// Sequences at a time.
    pub max_sequences: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Pages of a layer's cache.
    pub pages: u32,
    /// Seconds that a step takes by the clock of arrivals: that clock is no real one, so that a schedule does not
    /// depend on how fast kernels are.
    pub step_seconds: f64,
}

/// Limits that no schedule keeps.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum LimitError {
    /// Not every sequence could get its row.
    #[error(
        "--token-budget is {budget}, but each of --max-sequences {sequences} takes a row of a step; name at \
         least {sequences}"
    )]
    Budget {
        /// The budget.
        budget: u32,
        /// The sequences.
        sequences: u32,
    },
    /// A request that never fits.
    #[error(
        "--cache-pages is {pages}, but a request of {prompt} and {output} tokens takes {needed} of {page_tokens} \
         tokens; name at \
         least {needed}"
    )]
    Pages {
        /// Pages that there are.
        pages: u32,
        /// Tokens of the prompt.
        prompt: u32,
        /// Tokens that are generated.
        output: u32,
        /// Pages that it takes.
        needed: u32,
        /// Tokens of a page.
        page_tokens: u32,
    },
}

/// What a step is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Prompts alone.
    Prefill,
    /// Sequences that generate alone.
    Decode,
    /// Both.
    Mixed,
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Kind::Prefill => "prefill",
            Kind::Decode => "decode",
            Kind::Mixed => "mixed",
        }
    }
}

/// The rows of one sequence in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StepPart {
    /// The request, by its number in the trace.
    pub request: u32,
    /// Keys that it had before.
    pub before: u32,
    /// Rows that are computed, behind those.
    pub rows: u32,
    /// Whether the row is one of generation.
    pub generates: bool,
    /// Pages of the sequence, those of the new rows among them.
    pub pages: Vec<u32>,
}

impl StepPart {
    /// Keys after the step's rows were appended.
    pub(crate) fn keys(&self) -> u32 {
        self.before + self.rows
    }
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    /// At least one.
    pub parts: Vec<StepPart>,
    pub kind: Kind,
}

impl Step {
    pub(crate) fn rows(&self) -> u32 {
        self.parts.iter().map(|p| p.rows).sum()
    }
}

/// A sequence that came in.
struct Running {
    request: u32,
    /// Keys that are in the cache.
    done: u32,
    pages: Vec<u32>,
}

/// The state between steps.
pub(crate) struct Scheduler {
    limits: Limits,
    requests: Vec<Request>,
    /// Those that did not come in yet, by arrival.
    waiting: VecDeque<u32>,
    running: Vec<Running>,
    free: Vec<u32>,
    /// Pages that those who run may still take.
    promised: u32,
    clock: f64,
}

impl Scheduler {
    /// For requests by arrival. Pages are handed out in an order that the seed says, as those of a server that ran
    /// before.
    ///
    /// # Errors
    /// What limits no schedule keeps.
    pub(crate) fn new(requests: Vec<Request>, limits: Limits, seed: u64) -> Result<Self, LimitError> {
        let Limits { token_budget: budget, max_sequences: sequences, pages, page_tokens, .. } = limits;
        if budget < sequences {
            return Err(LimitError::Budget { budget, sequences });
        }
        for r in &requests {
            let needed = r.keys().div_ceil(page_tokens);
            if needed > pages {
                return Err(LimitError::Pages { pages, prompt: r.prompt, output: r.output, needed, page_tokens });
            }
        }
        let mut free: Vec<u32> = (0..pages).collect();
        free.shuffle(&mut StdRng::seed_from_u64(seed));
        let waiting = (0..requests.len() as u32).collect();
        Ok(Self { limits, requests, waiting, running: Vec::new(), free, promised: 0, clock: 0.0 })
    }

    /// Whether a part's last row gives a token: that of a prompt's end, and those of generation.
    pub(crate) fn gives_a_token(&self, part: &StepPart) -> bool {
        part.keys() >= self.requests[part.request as usize].prompt
    }

    /// Whether a part is its request's last one.
    pub(crate) fn is_last_of(&self, part: &StepPart) -> bool {
        part.keys() == self.requests[part.request as usize].keys()
    }

    /// Pages that nobody has.
    #[cfg(test)]
    pub(crate) fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// The next step; none when all requests are done.
    pub(crate) fn next_step(&mut self) -> Option<Step> {
        self.admit();
        if self.running.is_empty() {
            // Nothing to do before the next one comes.
            self.clock = self.requests[*self.waiting.front()? as usize].arrival.max(self.clock);
            self.admit();
        }
        let mut budget = self.limits.token_budget;
        let mut rows = vec![0; self.running.len()];
        for (running, rows) in self.running.iter().zip(&mut rows) {
            if running.done >= self.requests[running.request as usize].prompt {
                (*rows, budget) = (1, budget - 1);
            }
        }
        let mut parts = Vec::new();
        for (running, mut rows) in self.running.iter_mut().zip(rows) {
            let request = &self.requests[running.request as usize];
            let generates = rows == 1;
            if !generates {
                rows = budget.min(request.prompt - running.done);
                budget -= rows;
            }
            if rows == 0 {
                continue;
            }
            let needed = (running.done + rows).div_ceil(self.limits.page_tokens) as usize - running.pages.len();
            self.promised -= needed as u32;
            running.pages.extend(self.free.drain(self.free.len() - needed..));
            let pages = running.pages.clone();
            parts.push(StepPart { request: running.request, before: running.done, rows, generates, pages });
            running.done += rows;
        }
        self.finish();
        self.clock += self.limits.step_seconds;
        let generating = parts.iter().filter(|p| p.generates).count();
        let kind = match generating {
            0 => Kind::Prefill,
            n if n == parts.len() => Kind::Decode,
            _ => Kind::Mixed,
        };
        Some(Step { parts, kind })
    }

    /// Lets in who came, as far as places and pages go.
    fn admit(&mut self) {
        while let Some(&next) = self.waiting.front() {
            let request = &self.requests[next as usize];
            let needed = request.keys().div_ceil(self.limits.page_tokens);
            let room = self.free.len() as u32 - self.promised;
            let places = self.running.len() < self.limits.max_sequences as usize;
            if request.arrival > self.clock || !places || needed > room {
                return;
            }
            self.waiting.pop_front();
            self.promised += needed;
            self.running.push(Running { request: next, done: 0, pages: Vec::new() });
        }
    }

    /// Gives back the pages of those who are done: their last token is generated by the step that was just made.
    fn finish(&mut self) {
        let (requests, free) = (&self.requests, &mut self.free);
        self.running.retain_mut(|running| {
            let done = running.done == requests[running.request as usize].keys();
            if done {
                free.append(&mut running.pages);
            }
            !done
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn request(prompt: u32, output: u32, arrival: f64) -> Request {
        Request { prompt, output, arrival }
    }

    const LIMITS: Limits = Limits { token_budget: 32, max_sequences: 4, page_tokens: 8, pages: 40, step_seconds: 0.5 };

    fn steps(requests: &[Request], limits: Limits, seed: u64) -> (Vec<Step>, usize) {
        let mut scheduler = Scheduler::new(requests.to_vec(), limits, seed).unwrap();
        let steps = std::iter::from_fn(|| scheduler.next_step()).collect();
        (steps, scheduler.free_pages())
    }

    /// Lengths of every kind, among them some that take most of the cache.
    fn many() -> Vec<Request> {
        (0..200u32).map(|i| request(1 + i * i % 97 + i % 13 / 12 * 150, 1 + i * 7 % 23, 0.0)).collect()
    }

    #[test]
    fn prompts_come_in_chunks_beside_those_who_generate() {
        let (steps, _) = steps(&[request(40, 3, 0.0), request(30, 1, 0.0)], LIMITS, 1);
        let told: Vec<Vec<(u32, u32, u32, bool)>> = steps
            .iter()
            .map(|s| s.parts.iter().map(|p| (p.request, p.before, p.rows, p.generates)).collect())
            .collect();
        assert_eq!(
            told,
            [
                vec![(0, 0, 32, false)],
                // The last row of the prompt gives the first token.
                vec![(0, 32, 8, false), (1, 0, 24, false)],
                vec![(0, 40, 1, true), (1, 24, 6, false)],
                vec![(0, 41, 1, true)],
            ]
        );
        assert_eq!(
            steps.iter().map(|s| s.kind).collect::<Vec<_>>(),
            [Kind::Prefill, Kind::Prefill, Kind::Mixed, Kind::Decode]
        );
    }

    #[test]
    fn budget_places_and_pages_are_kept_and_all_is_computed() {
        let requests = many();
        let (steps, free) = steps(&requests, LIMITS, 3);
        assert_eq!(free, LIMITS.pages as usize, "all pages come back");
        let mut done: BTreeMap<u32, u32> = BTreeMap::new();
        for step in &steps {
            assert!((1..=LIMITS.token_budget).contains(&step.rows()) && step.parts.len() <= 4);
            let mut taken = BTreeSet::new();
            for part in &step.parts {
                let before = done.entry(part.request).or_default();
                assert_eq!(*before, part.before, "rows follow each other");
                *before += part.rows;
                assert_eq!(part.pages.len() as u32, part.keys().div_ceil(LIMITS.page_tokens));
                assert!(part.pages.iter().all(|p| *p < LIMITS.pages && taken.insert(*p)), "a page has one owner");
                assert_eq!(part.generates, part.before >= requests[part.request as usize].prompt);
            }
        }
        assert_eq!(done.len(), requests.len());
        assert!(done.iter().all(|(r, keys)| *keys == requests[*r as usize].keys()));
    }

    #[test]
    fn pages_of_a_sequence_stay_while_it_runs() {
        let (steps, _) = steps(&many(), LIMITS, 3);
        let mut known: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for part in steps.iter().flat_map(|s| &s.parts) {
            let before = known.insert(part.request, part.pages.clone()).unwrap_or_default();
            assert_eq!(part.pages[..before.len()], before);
        }
    }

    #[test]
    fn nobody_starves_and_nobody_overtakes() {
        // One that takes nearly the whole cache, among a stream of small ones.
        let mut requests: Vec<Request> = (0..300).map(|_| request(9, 9, 0.0)).collect();
        requests.insert(5, request(280, 30, 0.0));
        let (steps, _) = steps(&requests, LIMITS, 1);
        let mut first: BTreeMap<u32, usize> = BTreeMap::new();
        for (i, step) in steps.iter().enumerate() {
            step.parts.iter().for_each(|p| {
                first.entry(p.request).or_insert(i);
            });
        }
        assert!(first.values().is_sorted(), "requests start in the order in which they came");
        assert!(first[&5] < 40, "the large one starts when those before it are done, at step {}", first[&5]);
        // Everybody who runs moves on within as many steps as others' prompts take.
        let mut last: BTreeMap<u32, usize> = BTreeMap::new();
        for (i, step) in steps.iter().enumerate() {
            for part in &step.parts {
                assert!(i - last.insert(part.request, i).unwrap_or(i) <= 12, "request {} waits", part.request);
            }
        }
    }

    #[test]
    fn schedules_are_their_seeds() {
        let all = |seed| steps(&many(), LIMITS, seed).0;
        assert_eq!(all(1), all(1));
        // Another seed hands out other pages, and nothing else differs.
        let rows =
            |steps: Vec<Step>| steps.iter().flat_map(|s| &s.parts).map(|p| (p.request, p.rows)).collect::<Vec<_>>();
        assert_ne!(all(1), all(2));
        assert_eq!(rows(all(1)), rows(all(2)));
    }

    #[test]
    fn requests_come_in_when_they_arrive() {
        let (steps, _) = steps(&[request(4, 3, 0.0), request(4, 1, 1.0), request(4, 1, 100.0)], LIMITS, 1);
        let who: Vec<Vec<u32>> = steps.iter().map(|s| s.parts.iter().map(|p| p.request).collect()).collect();
        // Steps of half a second; nothing happens between the third and the hundredth second.
        assert_eq!(who, [vec![0], vec![0], vec![0, 1], vec![2]]);
    }

    #[test]
    fn limits_that_no_schedule_keeps_are_refused() {
        let told = |limits| Scheduler::new(vec![request(300, 30, 0.0)], limits, 1).err().unwrap();
        assert_eq!(told(Limits { token_budget: 3, ..LIMITS }), LimitError::Budget { budget: 3, sequences: 4 });
        let pages = told(LIMITS);
        assert_eq!(pages, LimitError::Pages { pages: 40, prompt: 300, output: 30, needed: 42, page_tokens: 8 });
        assert!(pages.to_string().contains("--cache-pages is 40") && pages.to_string().contains("at least 42"));
        assert!(Scheduler::new(vec![request(300, 30, 0.0)], Limits { pages: 42, ..LIMITS }, 1).is_ok());
    }
}
