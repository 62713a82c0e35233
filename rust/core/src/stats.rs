//! What the core counts.

/// Gauges and counters. Token counts are of committed steps, so nothing is counted twice or taken back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Answers in the waiting queue.
    pub waiting: u64,
    /// Answers that wait for a prefix another one computes.
    pub deferred: u64,
    /// Answers that run.
    pub running: u64,
    /// Blocks that sequences can hold.
    pub blocks_total: u64,
    /// Blocks that no table holds; cached ones are taken last.
    pub blocks_free: u64,
    /// Blocks that hold a prefix others can reuse, held or free.
    pub blocks_cached: u64,
    /// Blocks that sequences hold.
    pub blocks_used: u64,
    /// Free blocks that hold a prefix others can reuse.
    pub blocks_free_cached: u64,
    /// Token slots of the blocks that sequences hold.
    pub slots_held: u64,
    /// Of those, slots that hold no token yet: room at the ends of running sequences, which no other can use.
    pub slots_unfilled: u64,
    /// Requests submitted.
    pub requests: u64,
    /// Answers that ended at an end token, a stop token or a stop text.
    pub finished_stop: u64,
    /// Answers that ended at their length.
    pub finished_length: u64,
    /// Answers that were aborted.
    pub finished_abort: u64,
    /// Sequences that lost their blocks to others and were computed again.
    pub preemptions: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Of those, found in the prefix cache.
    pub cached_prompt_tokens: u64,
    /// Tokens looked up in the prefix cache, after preemptions too.
    pub prefix_query_tokens: u64,
    /// Of those, found.
    pub prefix_hit_tokens: u64,
    /// Tokens appended to answers.
    pub generated_tokens: u64,
    /// Cached prefixes lost because their block was needed.
    pub evictions: u64,
    /// Steps planned.
    pub steps: u64,
    /// Blocks taken.
    pub allocations: u64,
    /// Blocks given back.
    pub frees: u64,
}

impl Stats {
    /// Every figure with its name.
    #[must_use]
    pub fn entries(&self) -> [(&'static str, u64); 24] {
        [
            ("waiting", self.waiting),
            ("deferred", self.deferred),
            ("running", self.running),
            ("blocks_total", self.blocks_total),
            ("blocks_free", self.blocks_free),
            ("blocks_cached", self.blocks_cached),
            ("blocks_used", self.blocks_used),
            ("blocks_free_cached", self.blocks_free_cached),
            ("slots_held", self.slots_held),
            ("slots_unfilled", self.slots_unfilled),
            ("requests", self.requests),
            ("finished_stop", self.finished_stop),
            ("finished_length", self.finished_length),
            ("finished_abort", self.finished_abort),
            ("preemptions", self.preemptions),
            ("prompt_tokens", self.prompt_tokens),
            ("cached_prompt_tokens", self.cached_prompt_tokens),
            ("prefix_query_tokens", self.prefix_query_tokens),
            ("prefix_hit_tokens", self.prefix_hit_tokens),
            ("generated_tokens", self.generated_tokens),
            ("evictions", self.evictions),
            ("steps", self.steps),
            ("allocations", self.allocations),
            ("frees", self.frees),
        ]
    }
}
