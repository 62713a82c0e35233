//! The facade of the core: `submit`, `abort`, `plan`, `commit`, and what can be read between them.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::ids::Slot;
use crate::request::RequestSpec;
use crate::scheduler::Scheduler;
use crate::stats::Stats;
use crate::step::layout::{Layout, NUM_ARENAS};
use crate::step::open_step::OpenStep;
use crate::step::output::StepOutput;
use crate::step::plan::StepPlan;
use crate::step::writer::PlanWriter;
use crate::text::TokenTable;

/// Block pool, prefix cache, scheduler and sequences of one engine.
#[derive(Clone, Debug)]
pub struct Core {
    scheduler: Scheduler,
    layout: Layout,
    token_table: Option<Arc<TokenTable>>,
    /// Steps planned and not committed, oldest first; two at most.
    open: VecDeque<OpenStep>,
    /// Records of committed steps, for reuse.
    spare: Vec<OpenStep>,
    output: StepOutput,
    /// The step planned last.
    step: u64,
}

impl Core {
    /// A core without requests. Without a token table it decodes no text.
    ///
    /// # Errors
    /// `Error::Config` for a setting that cannot work.
    pub fn new(config: Config, token_table: Option<Arc<TokenTable>>) -> Result<Self> {
        config.validate()?;
        if let Some(table) = token_table.as_ref().filter(|table| table.len() > config.vocab_size) {
            return Err(Error::Config {
                field: "token_table",
                message: format!(
                    "has {} tokens, more than the vocabulary of {}",
                    table.len(),
                    config.vocab_size
                ),
            });
        }
        let rows = config.max_num_seqs;
        Ok(Self {
            layout: Layout::new(&config),
            scheduler: Scheduler::new(config, token_table.is_some()),
            token_table,
            open: VecDeque::with_capacity(2),
            spare: vec![OpenStep::with_capacity(rows), OpenStep::with_capacity(rows)],
            output: StepOutput::with_capacity(rows),
            step: 0,
        })
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &Config {
        self.scheduler.config()
    }

    /// Where each plan array lies in an arena.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Queue a request.
    ///
    /// # Errors
    /// For a request that is invalid or can never fit, so that none waits forever.
    pub fn submit(&mut self, mut spec: RequestSpec) -> Result<()> {
        if let Some(table) = &self.token_table {
            spec.begins_text |= !table.has_text(&spec.prompt, spec.skip_special);
        }
        self.scheduler.submit(spec)
    }

    /// End a request without an event. Its blocks are free for the next plan, and its tokens in flight are dropped.
    /// False when it is not known, or has ended.
    pub fn abort(&mut self, request_id: i64) -> bool {
        self.scheduler.abort(request_id)
    }

    /// Choose the next step and fill `arena`, the one that `next_arena` names; `None` when nothing can run now.
    ///
    /// # Errors
    /// When two steps are open, or the arena is shorter than the layout.
    pub fn plan(&mut self, arena: &mut [i32]) -> Result<Option<StepPlan>> {
        if self.open.len() >= 2 {
            return Err(Error::TooManyOpenSteps);
        }
        let step = self.step + 1;
        let mut writer = PlanWriter::new(&self.layout, arena, step, self.next_arena())?;
        let mut open = self.spare.pop().unwrap_or_default();
        open.clear(step);
        self.scheduler.plan(&mut writer, &mut open, self.open.is_empty());
        if open.rows.is_empty() {
            self.spare.push(open);
            return Ok(None);
        }
        self.step = step;
        self.open.push_back(open);
        Ok(Some(writer.finish()))
    }

    /// Take the sampled ids of the oldest open step, in logits order; further elements are ignored.
    ///
    /// # Errors
    /// When `step` is not the oldest open step, ids are missing, or an id is outside the vocabulary. The core is then
    /// unchanged.
    pub fn commit(&mut self, step: u64, sampled: &[i32]) -> Result<&StepOutput> {
        let mut open = self.take_open(step, sampled)?;
        self.output.clear();
        std::mem::swap(&mut self.output.started, &mut open.started);
        self.scheduler.commit(&open, sampled, self.token_table.as_deref(), &mut self.output);
        self.spare.push(open);
        Ok(&self.output)
    }

    /// The outputs of the step committed last.
    #[must_use]
    pub fn output(&self) -> &StepOutput {
        &self.output
    }

    /// The arena that the next step fills.
    #[must_use]
    pub fn next_arena(&self) -> usize {
        (self.step + 1) as usize % NUM_ARENAS
    }

    /// (step, arena, samples) of the oldest step that is not committed.
    #[must_use]
    pub fn oldest_open(&self) -> Option<(u64, usize, usize)> {
        let open = self.open.front()?;
        Some((open.step, open.step as usize % NUM_ARENAS, open.samples.len()))
    }

    /// (request, answer) of each constrained sample of the step planned last, in the order of `mask_logits`. All earlier
    /// tokens of these answers are committed.
    #[must_use]
    pub fn masked(&self) -> &[(i64, u32)] {
        self.scheduler.masked()
    }

    /// Prompt and committed output of the sequence in a slot.
    #[must_use]
    pub fn history(&self, slot: Slot) -> Option<&[u32]> {
        self.scheduler.history(slot)
    }

    /// True while a request is waiting, running or in flight.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.scheduler.has_requests() || !self.open.is_empty()
    }

    /// Gauges and counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.scheduler.stats()
    }

    /// Forget every cached block that no sequence holds; how many.
    pub fn reset_prefix_cache(&mut self) -> usize {
        self.scheduler.reset_prefix_cache()
    }

    /// Check that the core does not contradict itself.
    ///
    /// # Errors
    /// Says what contradicts what.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.scheduler.check_invariants(&self.open)
    }

    /// The record of the oldest open step, once its samples are known to be valid.
    fn take_open(&mut self, step: u64, sampled: &[i32]) -> Result<OpenStep> {
        let Some(open) = self.open.front().filter(|open| open.step == step) else {
            return Err(Error::NotOldestStep { step });
        };
        let (needed, vocab_size) = (open.samples.len(), self.config().vocab_size);
        let is_token = |token: i32| usize::try_from(token).is_ok_and(|token| token < vocab_size);
        let Some(sampled) = sampled.get(..needed) else {
            return Err(Error::ShortBuffer { name: "sampled", len: sampled.len(), needed });
        };
        if let Some(place) = sampled.iter().position(|&token| !is_token(token)) {
            return Err(Error::InvalidSample { token: sampled[place], place, vocab_size });
        }
        self.open.pop_front().ok_or(Error::NotOldestStep { step })
    }
}
