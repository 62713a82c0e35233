//! A core whose steps a test drives by hand.

use octavo_core::{Config, Core, RequestSpec, Stats, StepPlan};

use super::{VOCAB, token_table};

/// A small core, whose limits a test can reach.
pub(crate) fn config() -> Config {
    Config {
        block_size: 4,
        num_blocks: 41,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 64,
        vocab_size: VOCAB,
        eos_token_ids: vec![0],
        ..Config::default()
    }
}

/// A core and its arena; every sample is the same token.
pub(crate) struct Bench {
    pub(crate) core: Core,
    pub(crate) arena: Vec<i32>,
}

impl Bench {
    pub(crate) fn new(config: Config) -> Self {
        let core = Core::new(config, Some(token_table())).expect("a good configuration");
        let arena = vec![0; core.layout().arena_len()];
        Self { core, arena }
    }

    pub(crate) fn submit(&mut self, request_id: i64, prompt: &[u32], max_tokens: usize) {
        let spec = RequestSpec {
            request_id,
            prompt: prompt.to_vec(),
            max_tokens,
            n: 1,
            ..RequestSpec::default()
        };
        self.core.submit(spec).expect("fits");
    }

    pub(crate) fn plan(&mut self) -> Option<StepPlan> {
        let plan = self.core.plan(&mut self.arena).expect("a step may be planned");
        self.core.check_invariants().expect("no contradiction");
        plan
    }

    pub(crate) fn commit(&mut self, plan: &StepPlan, token: i32) -> Vec<(i64, i32)> {
        let sampled = vec![token; plan.num_logits];
        let frame = self.core.commit(plan.step, &sampled).expect("good samples");
        let events =
            frame.request_ids.iter().copied().zip(frame.finish_reasons.iter().copied()).collect();
        self.core.check_invariants().expect("no contradiction");
        events
    }

    pub(crate) fn step(&mut self, token: i32) -> (StepPlan, Vec<(i64, i32)>) {
        let plan = self.plan().expect("work is left");
        let events = self.commit(&plan, token);
        (plan, events)
    }

    /// Tokens of each row of the plan made last.
    pub(crate) fn row_lengths(&self, plan: &StepPlan) -> Vec<i32> {
        self.array(plan, "query_start")[..=plan.num_rows]
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .collect()
    }

    pub(crate) fn array(&self, _plan: &StepPlan, name: &str) -> &[i32] {
        self.core.layout().slice(&self.arena, name)
    }

    pub(crate) fn stats(&self) -> Stats {
        self.core.stats()
    }
}

/// A prompt; those of one family begin alike.
pub(crate) fn prompt(len: u32, family: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 3 + family * 11 + 1) % VOCAB as u32).collect()
}
